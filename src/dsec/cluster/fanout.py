"""Calls about sandboxes of several edges: split by the edge that an id names, or asked of all, and put together.

Invariant: an answer is whole or an error. A node that is silent but not lost makes a list `unavailable`, for its
sandboxes are still there; a lost node's are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from multidict import CIMultiDict

from dsec.api.batch import DeleteRequest, ExecBatch, ExecItem, ExecResult, PauseRequest
from dsec.api.exchange import MAX_BATCH_BYTES, Exchange
from dsec.api.held import GROUP_HOLD_S, HeldAnswer
from dsec.cluster.nodes import Nodes
from dsec.cluster.upstream import NotSent, Upstream
from dsec.cluster.wire import Member
from dsec.edge.client import Page, Principal
from dsec.errors import DsecError, ErrorBody, InvalidRequest, SandboxNotFound, from_body
from dsec.spec.ids import edge_of
from dsec.spec.sandbox import SandboxInfo

NDJSON = b"application/x-ndjson"
_encode = msgspec.json.Encoder().encode
_page = msgspec.json.Decoder(Page).decode
_result = msgspec.json.Decoder(ExecResult).decode
_error = msgspec.json.Decoder(ErrorBody).decode


def edge_for(sandbox_id: str) -> int:
    """The edge that an id names. Raises `SandboxNotFound` for what is no id."""
    edge = edge_of(sandbox_id)
    if edge is None:
        raise SandboxNotFound(
            f"there is no sandbox {sandbox_id[:64]}", remedy="Records of ended sandboxes are kept for a day."
        )
    return edge


class Fanout:
    """For the event loop."""

    def __init__(self, nodes: Nodes, upstream: Upstream) -> None:
        self._nodes = nodes
        self._upstream = upstream

    async def page(self, principal: Principal, query: Sequence[tuple[str, str]], limit: int, after: str | None) -> Page:
        """A page, in the order of ids, which is that of the edges. Raises `Unavailable`."""
        found: list[SandboxInfo] = []
        first = edge_for(after) if after is not None else 0
        for member in self._nodes.alive():
            edge = member.claim.edge
            if edge < first:
                continue
            asked = [*query, ("limit", str(limit - len(found)))]
            if after is not None and edge == first:
                asked.append(("after", after))
            page = _page(await self._whole(member, "GET", f"/v1/sandboxes?{urlencode(asked)}", principal))
            found += page.sandboxes
            if len(found) >= limit:
                return Page(sandboxes=found, next=found[-1].id)
        return Page(sandboxes=found)

    async def named(self, principal: Principal, run: str, name: str) -> SandboxInfo:
        """Whoever has it. Raises `SandboxNotFound`, `Unavailable`."""
        target = f"/v1/named/{quote(run, safe='')}/{quote(name, safe='')}"
        answers = await asyncio.gather(
            *(self._upstream.json(member, "GET", target, principal) for member in self._nodes.alive())
        )
        for status, body in answers:
            if status == 200:
                return msgspec.json.decode(body, type=SandboxInfo)
            error = from_body(_error(body))
            if not isinstance(error, SandboxNotFound):
                raise error
        raise SandboxNotFound(f"there is no sandbox named {name[:64]!r}")

    async def delete(self, x: Exchange, principal: Principal) -> list[dict[str, object]]:
        """POST /v1/sandboxes:delete"""
        ids = x.decode(msgspec.json.Decoder(DeleteRequest), await x.body()).ids
        query = x.scope["query_string"].decode("latin-1")
        return await self._by_edge(principal, "/v1/sandboxes:delete" + ("?" + query if query else ""), ids)

    async def pause(self, x: Exchange, principal: Principal, *, resume: bool) -> list[dict[str, object]]:
        """POST /v1/sandboxes:pause, :resume"""
        asked = x.decode(msgspec.json.Decoder(PauseRequest), await x.body())
        target = "/v1/sandboxes:resume" if resume else "/v1/sandboxes:pause"
        if asked.ids is not None and asked.run is None and asked.labels is None:
            return await self._by_edge(principal, target, asked.ids)
        if asked.ids is not None or (asked.run is None and asked.labels is None):
            raise InvalidRequest("name sandboxes by `ids`, or by `run` and `labels`")
        body = _encode(asked)
        answers = await asyncio.gather(
            *(self._whole(member, "POST", target, principal, body) for member in self._nodes.alive())
        )
        return [item for answer in answers for item in msgspec.json.decode(answer)["results"]]

    async def _by_edge(self, principal: Principal, target: str, ids: Sequence[str]) -> list[dict[str, object]]:
        """A call that takes ids and gives results: each edge gets its own; the results are in the order given."""
        results: dict[str, dict[str, object]] = {}
        groups: dict[int, list[str]] = {}
        for each in ids:
            edge = edge_of(each)
            groups.setdefault(-1 if edge is None else edge, []).append(each)

        async def one(edge: int, some: list[str]) -> None:
            try:
                member = await self._nodes.find(edge, some[0])
                answer = await self._whole(member, "POST", target, principal, _encode({"ids": some}))
                for item in msgspec.json.decode(answer)["results"]:
                    results[item["id"]] = item
            except DsecError as error:
                for each in some:
                    results[each] = {"id": each, "error": msgspec.to_builtins(error.body())}

        await asyncio.gather(*(one(edge, some) for edge, some in groups.items()))
        return [results[each] for each in ids]

    async def exec(self, x: Exchange, principal: Principal) -> None:
        """POST /v1/exec:batch: lines as they come from the edges."""
        x.check_query()
        items = x.decode(msgspec.json.Decoder(ExecBatch), await x.body(MAX_BATCH_BYTES)).items
        groups: dict[int, list[ExecItem]] = {}
        for place, item in enumerate(items):
            edge = edge_of(item.sandbox)
            numbered = msgspec.structs.replace(item, index=place if item.index is None else item.index)
            groups.setdefault(-1 if edge is None else edge, []).append(numbered)
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        tasks = [asyncio.create_task(self._exec_at(principal, edge, some, lines)) for edge, some in groups.items()]
        try:
            held = HeldAnswer(x, NDJSON, hold_s=GROUP_HOLD_S)
            async with held:
                for _ in items:
                    held.push(await lines.get())
                    if held.full:
                        await held.flush()
                await held.finish()
        finally:
            for task in tasks:
                task.cancel()  # the commands go on

    async def _exec_at(
        self, principal: Principal, edge: int, items: list[ExecItem], lines: asyncio.Queue[bytes]
    ) -> None:
        """One edge's part; attached to again after a cut, for every command has a key."""
        waiting = {item.index: item for item in items}
        while waiting:
            try:
                member = await self._nodes.find(edge, items[0].sandbox)
                headers = CIMultiDict(
                    {
                        "authorization": f"Bearer {self._upstream.bearer(member, principal)}",
                        "content-type": "application/json",
                    }
                )
                data = _encode({"items": list(waiting.values())})
                async with self._upstream.ask(member, "POST", "/v1/exec:batch", headers=headers, data=data) as response:
                    if response.status == 401:
                        raise NotSent("it has just joined again")
                    if response.status != 200:
                        raise from_body(_error(await response.read()))
                    async for line in response.content:
                        result = _result(line)
                        if waiting.pop(result.index, None) is not None:
                            lines.put_nowait(line)
            except (NotSent, aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
                lost = self._upstream.unreachable(self._nodes.member(edge, items[0].sandbox), error)
                self._fail(waiting, lost, lines)
            except DsecError as error:
                self._fail(waiting, error, lines)

    @staticmethod
    def _fail(waiting: dict[int | None, ExecItem], error: DsecError, lines: asyncio.Queue[bytes]) -> None:
        for index in waiting:
            lines.put_nowait(_encode(ExecResult(index or 0, error=error.body())) + b"\n")
        waiting.clear()

    async def _whole(
        self, member: Member, method: str, target: str, principal: Principal, body: bytes | None = None
    ) -> bytes:
        """A short exchange's body. Raises what the edge answers, `Unavailable`."""
        status, answer = await self._upstream.json(member, method, target, principal, body)
        if status != 200:
            try:
                raise from_body(_error(answer))
            except msgspec.MsgspecError:
                raise self._upstream.unreachable(member, f"it answered {status}") from None
        return answer

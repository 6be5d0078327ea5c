"""Calls about sandboxes of several edges: split by the edge that an id names, or asked of all, and put together.

Invariant: an answer is whole or an error. A node that is silent but not lost makes a list `unavailable`, for its
sandboxes are still there; a lost node's are not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from multidict import CIMultiDict

from dsec.api.batch import DeleteRequest, ExecBatch, ExecItem, ExecResult, PauseRequest
from dsec.api.exchange import MAX_BATCH_BYTES, Exchange
from dsec.api.held import GROUP_HOLD_S, HeldAnswer
from dsec.cluster.moves import Moves
from dsec.cluster.nodes import Nodes
from dsec.cluster.upstream import NotSent, Upstream
from dsec.cluster.wire import Member
from dsec.edge.client import NodeInfo, Page, Principal
from dsec.errors import DsecError, ErrorBody, InvalidRequest, SandboxNotFound, from_body
from dsec.spec.sandbox import SandboxInfo

NDJSON = b"application/x-ndjson"
LOOK_WIDTH = 64
"""Sandboxes of lost nodes that are looked up at the same time."""
_SUMS = (
    "live", "starting", "queued", "ending", "max_live", "max_starting", "memory_committed_bytes",
    "memory_capacity_bytes", "disk_free_bytes", "created_total", "failed_total", "stuck",
)  # fmt: skip
log = logging.getLogger("dsec.cluster")
_node = msgspec.json.Decoder(NodeInfo).decode
_encode = msgspec.json.Encoder().encode
_page = msgspec.json.Decoder(Page).decode
_result = msgspec.json.Decoder(ExecResult).decode
_error = msgspec.json.Decoder(ErrorBody).decode


class Fanout:
    """For the event loop."""

    def __init__(self, nodes: Nodes, upstream: Upstream, moves: Moves) -> None:
        self._moves = moves
        self._nodes = nodes
        self._upstream = upstream

    async def page(self, principal: Principal, query: Sequence[tuple[str, str]], limit: int, after: str | None) -> Page:
        """A page, in the order of the edges and then of ids: that of ids, but for sandboxes that moved. Raises
        `Unavailable`."""
        found: list[SandboxInfo] = []
        first = self._moves.edge_of(after) if after is not None else 0
        for member in self._nodes.alive():
            edge = member.claim.edge
            if edge < first:
                continue
            asked = [*query, ("limit", str(limit - len(found)))]
            if after is not None and edge == first:
                asked.append(("after", after))
            page = _page(await self.whole(member, "GET", f"/v1/sandboxes?{urlencode(asked)}", principal))
            found += page.sandboxes
            if len(found) >= limit:
                return Page(sandboxes=found, next=found[-1].id)
        return Page(sandboxes=found)

    async def node(self, principal: Principal) -> NodeInfo:
        """All nodes as if they were one: counts are sums, `backends` and `features` are those that any has. Raises
        `Unavailable`."""
        members = self._nodes.alive()
        answers = await asyncio.gather(*(self.whole(member, "GET", "/v1/node", principal) for member in members))
        infos = [_node(answer) for answer in answers]
        sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMS}
        return NodeInfo(
            edge=0,
            backends={name: epoch for info in infos for name, epoch in info.backends.items()},
            features=sorted({feature for info in infos for feature in info.features}),
            started_at=min((info.started_at for info in infos), default=0.0),
            **sums,
        )

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
            *(self.whole(member, "POST", target, principal, body) for member in self._nodes.alive())
        )
        return [item for answer in answers for item in msgspec.json.decode(answer)["results"]]

    async def _by_edge(self, principal: Principal, target: str, ids: Sequence[str]) -> list[dict[str, object]]:
        """A call that takes ids and gives results: each edge gets its own; the results are in the order given."""
        results: dict[str, dict[str, object]] = {}
        groups, errors = await self._located(ids)
        for each, error in errors.items():
            results[each] = {"id": each, "error": msgspec.to_builtins(error.body())}

        async def one(some: list[str]) -> None:
            try:
                member = await self._moves.find(some[0])
                answer = await self.whole(member, "POST", target, principal, _encode({"ids": some}))
                for item in msgspec.json.decode(answer)["results"]:
                    results[item["id"]] = item
            except DsecError as error:
                for each in some:
                    results[each] = {"id": each, "error": msgspec.to_builtins(error.body())}

        await asyncio.gather(*(one(some) for some in groups.values()))
        return [results[each] for each in ids]

    async def _located(self, ids: Iterable[str]) -> tuple[dict[int, list[str]], dict[str, DsecError]]:
        """Sandboxes by the node to ask, and why others can't be asked of."""
        groups: dict[int, list[str]] = {}
        errors: dict[str, DsecError] = {}

        async def locate(sandbox_id: str) -> None:
            try:
                groups.setdefault((await self._moves.find(sandbox_id)).claim.edge, []).append(sandbox_id)
            except DsecError as error:
                errors[sandbox_id] = error

        lost = []
        for each in dict.fromkeys(ids):
            if self._moves.is_at_once(each):
                await locate(each)
            else:
                lost.append(each)
        for start in range(0, len(lost), LOOK_WIDTH):
            await asyncio.gather(*map(locate, lost[start : start + LOOK_WIDTH]))
        return groups, errors

    async def exec(self, x: Exchange, principal: Principal) -> None:
        """POST /v1/exec:batch: lines as they come from the edges."""
        x.check_query()
        items = x.decode(msgspec.json.Decoder(ExecBatch), await x.body(MAX_BATCH_BYTES)).items
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        at, errors = await self._located(item.sandbox for item in items)
        edges = {sandbox_id: edge for edge, some in at.items() for sandbox_id in some}
        groups: dict[int, list[ExecItem]] = {}
        for place, item in enumerate(items):
            numbered = msgspec.structs.replace(item, index=place if item.index is None else item.index)
            if item.sandbox in errors:
                self._fail({numbered.index: numbered}, errors[item.sandbox], lines)
            else:
                groups.setdefault(edges[item.sandbox], []).append(numbered)
        tasks = [asyncio.create_task(self._exec_at(principal, some, lines)) for some in groups.values()]
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

    async def _exec_at(self, principal: Principal, items: list[ExecItem], lines: asyncio.Queue[bytes]) -> None:
        """One edge's part; attached to again after a cut, for every command has a key."""
        waiting = {item.index: item for item in items}
        while waiting:
            try:
                member = await self._moves.find(items[0].sandbox)
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
                self._fail(waiting, self._upstream.unreachable(member, error), lines)
            except DsecError as error:
                self._fail(waiting, error, lines)

    @staticmethod
    def _fail(waiting: dict[int | None, ExecItem], error: DsecError, lines: asyncio.Queue[bytes]) -> None:
        for index in waiting:
            lines.put_nowait(_encode(ExecResult(index or 0, error=error.body())) + b"\n")
        waiting.clear()

    async def whole(
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

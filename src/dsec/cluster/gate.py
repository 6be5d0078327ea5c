"""In front of an edge's API: creations that an apiserver orders, and the edge's veto.

Invariant: a key whose order was refused is refused for as long as a copy of that order could still arrive, so that an
apiserver which went elsewhere with it never has it in two places.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import parse_qs

import msgspec

from dsec.api.exchange import Exchange, Message, Receive, Scope, Send
from dsec.api.metrics import ServerMetrics
from dsec.api.quick import ShortWay
from dsec.api.serve import App, Hosts
from dsec.cluster.member import Carried, Membership
from dsec.cluster.wire import BEARER, ORDER_S, REFUSED, RUN, RunNews
from dsec.errors import DsecError, InvalidRequest, Unavailable

_ORDERS = {b"/v1/sandboxes", b"/v1/sandboxes:batch"}
COUNT = b"x-dsec-count"
REFUSING = frozenset({404, 422, 429, 502})
"""What a creation is answered with where nothing was made and another node may do better: no such environment here, no
such feature, the queue is full, the creation failed."""
QUEUE_FACTOR = 16
"""So many times `max_starting` may wait here; beyond it the apiserver has better choices."""


class Gate:
    """ASGI application around an edge's API."""

    def __init__(self, api: App, edge: Carried) -> None:
        self.member: Membership | None = None
        """Set before the first order can come: nobody knows of this edge before it has joined."""
        self._api = api
        self._edge = edge
        self._refused: dict[str, float] = {}

    @property
    def metrics(self) -> ServerMetrics:
        return self._api.metrics

    @property
    def lanes(self) -> Mapping[bytes, ShortWay]:
        return self._api.lanes

    @property
    def ports(self) -> Hosts:
        return self._api.ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["raw_path"] in _ORDERS:
            x = Exchange(scope, receive, send)
            if x.bearer().startswith(BEARER):
                await self._order(x, scope, receive, send)
                return
        await self._api(scope, receive, send)

    async def _order(self, x: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        member = self.member
        try:
            if member is None:
                raise Unavailable("this node is starting", remedy="Try again in a moment.")
            asserted = member.check(x.bearer())
            holder = asserted.holder
            headers = dict(scope["headers"])
            key = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
            key = key and f"{asserted.principal.project}\0{key}"
            count = int(headers.get(COUNT, b"1"))
            news = headers.get(RUN.encode())
            if news is not None:
                run = msgspec.json.decode(news, type=RunNews)
                self._edge.hear_run(run.project, run.run)
        except (ValueError, msgspec.MsgspecError) as error:
            await x.fail(InvalidRequest(f"this order can't be read: {error}"))
            return
        except DsecError as error:
            await x.fail(error)
            return
        if key in self._refused or self._full(member, count):
            self._remember(key)
            await x.drain()
            full = Unavailable("this node takes no more now", remedy="Ask another.")
            await x.answer(503, full.body(), (REFUSED.encode(), b"1"))
            return
        taken = member.taken
        taken[holder] = taken.get(holder, 0) + count

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in REFUSING:
                self._remember(key)
                taken[holder] -= count
                message["headers"] = [*message["headers"], (REFUSED.encode(), b"1")]
            await send(message)

        await self._api(scope, receive, answer)

    def _full(self, member: Membership, count: int) -> bool:
        node = self._edge.node()
        return (
            member.draining
            or node.queued + node.starting + count > QUEUE_FACTOR * node.max_starting
            or node.live + node.queued + count > node.max_live
        )

    def _remember(self, key: str) -> None:
        now = time.monotonic()
        if key:
            self._refused[key] = now + 2 * ORDER_S
        while self._refused:
            first = next(iter(self._refused))
            if self._refused[first] > now:
                return
            del self._refused[first]

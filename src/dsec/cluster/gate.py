"""In front of an edge's API: creations that an apiserver orders, and the edge's veto.

Invariant: a key whose order was refused is refused for as long as a copy of that order could still arrive, so that an
apiserver which went elsewhere with it never has it in two places.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import parse_qs

import msgspec

from dsec.api.exchange import ClientGone, Exchange, Message, Receive, Scope, Send
from dsec.api.metrics import ServerMetrics
from dsec.api.quick import ShortWay
from dsec.api.serve import App, Hosts
from dsec.cluster.handing import PATH, Handing
from dsec.cluster.member import Carried, Membership
from dsec.cluster.routes import sandbox_of
from dsec.cluster.sockets import refuse
from dsec.cluster.upstream import ABSENT
from dsec.cluster.wire import BEARER, ORDER_S, REFUSED, RUN, RunNews
from dsec.errors import DsecError, InvalidRequest, Unavailable
from dsec.spec.ids import ID_CHARACTERS

_FOREIGN = {b"/v2/sandboxes", b"/sandboxes"}
_ORDERS = {b"/v1/sandboxes", b"/v1/sandboxes:batch", *_FOREIGN}
COUNT = b"x-dsec-count"
REFUSING = frozenset({404, 422, 429, 502})
"""What a creation is answered with where nothing was made and another node may do better: no such environment here, no
such feature, the queue is full, the creation failed."""
_MOVES = PATH.encode()
QUEUE_FACTOR = 16
"""So many times `max_starting` may wait here; beyond it the apiserver has better choices."""


class Gate:
    """ASGI application around an edge's API."""

    def __init__(self, api: App, edge: Carried) -> None:
        self.member: Membership | None = None
        """Set before the first order can come: nobody knows of this edge before it has joined."""
        self.handing: Handing | None = None
        """As `member`."""
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
        if scope["type"] == "http" and scope["raw_path"].startswith(_MOVES):
            await self._move(Exchange(scope, receive, send))
            return
        named = sandbox_of(scope) if self.handing is not None and scope["type"] in ("http", "websocket") else None
        if self.handing is not None and named is not None and len(named) == ID_CHARACTERS:
            try:
                self.handing.check(named)
            except Unavailable as error:
                await _refuse(scope, receive, send, error)
                return
            if self.handing.absent(named):
                send = _absent(send)
        await self._api(scope, receive, send)

    async def _move(self, x: Exchange) -> None:
        try:
            if self.member is None or self.handing is None:
                raise Unavailable("this node is starting", remedy="Try again in a moment.")
            asserted = self.member.check(x.bearer())
            self._hear_run(x.scope)
            await self.handing(x, x.scope["raw_path"].decode("ascii", "replace"), asserted.principal)
        except (ValueError, msgspec.MsgspecError) as error:
            await x.fail(InvalidRequest(f"this order can't be read: {error}"))
        except DsecError as error:
            await x.fail(error)
        except ClientGone:
            pass

    def _hear_run(self, scope: Scope) -> None:
        """Raises `MsgspecError`."""
        news = dict(scope["headers"]).get(RUN.encode())
        if news is not None:
            run = msgspec.json.decode(news, type=RunNews)
            self._edge.hear_run(run.project, run.run)

    async def _order(self, x: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        member = self.member
        try:
            if member is None:
                raise Unavailable("this node is starting", remedy="Try again in a moment.")
            asserted = member.check(x.bearer())
            holder = asserted.holder
            headers = dict(scope["headers"])
            key = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
            if scope["raw_path"] in _FOREIGN:
                key = headers.get(b"idempotency-key", b"").decode("latin-1")
            key = key and f"{asserted.principal.project}\0{key}"
            count = int(headers.get(COUNT, b"1"))
            self._hear_run(scope)
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


def _absent(send: Send) -> Send:
    """Answers say that another node may have what is asked for."""

    async def stamped(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            message["headers"] = [*message["headers"], (ABSENT.encode(), b"1")]
        await send(message)

    return stamped


async def _refuse(scope: Scope, receive: Receive, send: Send, error: DsecError) -> None:
    if scope["type"] == "websocket":
        await receive()  # "connect"
        await refuse(send, error)
        return
    await Exchange(scope, receive, send).fail(error)

"""HTTP from an apiserver to an edge: requests passed on as they are, bodies and answers streamed both ways.

Invariants: what can't have reached the edge is answered as `unavailable`, which callers repeat; what may have reached
it and has no answer is cut, as if this connection were the edge's own, so that the caller decides by its idempotency
key; an answer that breaks is cut, never ended as if it were whole; when the caller goes, the edge's connection goes.
No exchange outlives its node: one that vanished is noticed by the kernel (`sockets.py`), and when a node is declared
lost whatever is under way there ends, though its machine may go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import aiohttp
from msgspec import Struct
from multidict import CIMultiDict
from yarl import URL

from dsec.api.exchange import ClientGone, Exchange, Headers
from dsec.cluster.nodes import Nodes
from dsec.cluster.wire import ORDER_S, REFUSED, Member, sign
from dsec.edge.client import Principal
from dsec.errors import DsecError, InvalidRequest, SandboxLost, Unavailable
from dsec.sdk._http import ConnectFailed, Pool
from dsec.sockets import CLUSTER_SILENCE_S, watched
from dsec.tasks import ended

CONNECT_S = 3.0
PORT_KEY = "x-dsec-token"
"""Where a credential of ours stands in a request for a port."""
ABSENT = "x-dsec-absent"
"""In an edge's answer: it doesn't have the sandbox that the request names, and another may."""
_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-authorization"}
)
_OURS = frozenset(b"content-length authorization x-dsec-run expect x-dsec-run-info x-dsec-count x-request-id".split())


class NotSent(Exception):
    """The edge can't have seen it."""


class Called(Struct, frozen=True):
    """An edge's answer, whole."""

    status: int
    body: bytes
    refused: bool
    """It took nothing of the order, and never will."""


class Upstream:
    """The way to all edges."""

    def __init__(self, nodes: Nodes, holder: str) -> None:
        """`holder`: this apiserver's process."""
        self._nodes = nodes
        self._holder = holder
        self._session: aiohttp.ClientSession | None = None
        self._pools: dict[int, tuple[tuple[str, str], Pool]] = {}
        """By edge, for short exchanges: where it is and what it shows there, and the connections."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: dict[int, set[asyncio.Timeout]] = {}
        """By edge: what ends with it."""

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, socket_factory=node_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._nodes.arrived = self._arrived
        self._nodes.lost = self._lost

    async def close(self) -> None:
        """Idempotent."""
        await ended(self._tasks)
        for _, pool in self._pools.values():
            await pool.close()
        if self._session is not None:
            await self._session.close()

    def _arrived(self, member: Member) -> None:
        self._go_on(self._connect(member))

    def _go_on(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, member: Member) -> None:
        """Have a connection ready for the first creation that comes: to make one costs as much as that."""
        if not member.claim.lost:
            with contextlib.suppress(NotSent, OSError):
                await self.call(member, "GET", "/healthz", {})

    async def call(
        self, member: Member, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Called:
        """A short exchange, its request at hand: a third of `ask`'s CPU time. Raises `InvalidRequest` for what no
        header can hold, `NotSent`, and OSError for what may have arrived."""
        where = (member.url, member.certificate)
        known = self._pools.get(member.claim.edge)
        if known is not None and known[0] == where:
            pool = known[1]
        else:
            url, certificate = URL(member.url), member.certificate
            pool = Pool(url, certificate=certificate, silence_s=CLUSTER_SILENCE_S, connect_s=CONNECT_S)
            self._pools[member.claim.edge] = (where, pool)
            if known is not None:
                self._go_on(known[1].close())
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
            raise InvalidRequest("a header can't hold this", remedy="Leave line ends out of keys.")
        head = f"{method} {target} HTTP/1.1\r\n{pool.head('')}{lines}Content-Length: {len(body)}\r\n\r\n"
        async with self.while_there(member):
            try:
                answer = await pool.ask(head.encode() + body)
            except ConnectFailed as error:
                raise NotSent(str(error)) from error
            try:
                return Called(answer.status, await answer.read(), answer.header(REFUSED) is not None)
            finally:
                answer.close()

    def _lost(self, edge: int) -> None:
        for bound in self._under_way.get(edge, ()):
            bound.reschedule(0)

    @asynccontextmanager
    async def while_there(self, member: Member) -> AsyncIterator[None]:
        """For what goes on with an edge. Raises TimeoutError, also in the middle, when its node is lost."""
        edge, bound = member.claim.edge, asyncio.timeout(None)
        others = self._under_way.setdefault(edge, set())
        others.add(bound)
        try:
            async with bound:
                yield
        finally:
            others.discard(bound)

    def bearer(self, member: Member, principal: Principal) -> str:
        """This caller's, for that edge."""
        return sign(
            principal,
            secret=member.secret,
            incarnation=member.claim.incarnation,
            until=self._nodes.now_at(member.claim.edge) + ORDER_S,
            holder=self._holder,
        )

    @asynccontextmanager
    async def ask(
        self,
        member: Member,
        method: str,
        target: str,
        *,
        headers: CIMultiDict[str],
        data: bytes | AsyncIterator[bytes] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One exchange. Raises `NotSent`, and aiohttp's errors or OSError for what may have arrived."""
        assert self._session is not None
        async with self.while_there(member):
            try:
                response = await self._session.request(
                    method,
                    URL(member.url + target, encoded=True),
                    headers=headers,
                    data=data,
                    allow_redirects=False,
                    ssl=trust_of(member),
                )
            except (
                aiohttp.ClientConnectorError,
                aiohttp.ConnectionTimeoutError,
                aiohttp.ServerFingerprintMismatch,
            ) as error:
                raise NotSent(str(error)) from error
            try:
                yield response
            except BaseException:
                response.close()
                raise
            response.release()

    async def json(
        self, member: Member, method: str, target: str, principal: Principal, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """A short exchange of ours, whole. Raises `Unavailable`."""
        headers = CIMultiDict({"authorization": f"Bearer {self.bearer(member, principal)}"})
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            async with self.ask(member, method, target, headers=headers, data=body) as response:
                if response.status == 401:
                    raise joined_again(member)
                return response.status, await response.read()
        except (NotSent, aiohttp.ClientError, OSError) as error:
            raise self.unreachable(member, error) from error

    def unreachable(self, member: Member, error: object) -> DsecError:
        """What a caller is told whose edge doesn't answer."""
        edge = member.claim.edge
        claim = self._nodes.scheduler.claim(edge)
        if claim is not None and claim.lost:
            return SandboxLost(f"edge {edge} was lost", remedy="Create it again; this was the platform's fault.")
        return Unavailable(f"edge {edge} can't be reached now: {str(error)[:200]}", remedy="Try again in a moment.")

    async def status(self, member: Member, target: str) -> int:
        """What a GET without credentials is answered with; the rest isn't read. Raises `Unavailable`."""
        try:
            async with self.ask(member, "GET", target, headers=CIMultiDict()) as response:
                response.close()
                return response.status
        except (NotSent, aiohttp.ClientError, OSError) as error:
            raise self.unreachable(member, error) from error

    async def forward(
        self,
        x: Exchange,
        member: Member,
        principal: Principal | None,
        *,
        key_header: str = "authorization",
        body: bytes | None = None,
        elsewhere: Callable[[], Awaitable[bool]] | None = None,
    ) -> int:
        """Pass a whole request on, and its answer back; returns its status, 0 where it was cut. Raises `Unavailable`
        where the edge can't have taken it. `principal` None: the caller's own credentials are the edge's
        to look at; else our word for it goes in `key_header`. `body`: where it was read already. `elsewhere`: asked
        where the edge doesn't have what is asked of; if it says so the caller is told to come again (`Unavailable`)."""
        scope = x.scope
        target = scope["raw_path"].decode("ascii")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        taken = asyncio.Event()
        data: bytes | AsyncIterator[bytes] | None = body
        if body is not None or scope["method"] in ("GET", "HEAD") or x.content_length == 0:
            taken.set()
        else:
            data = _body(x, taken)
        headers = self.headers(x, member, principal, key_header)
        try:
            async with self.ask(member, scope["method"], target, headers=headers, data=data) as response:
                if response.status == 401 and principal is not None:
                    raise joined_again(member)
                if elsewhere is not None and ABSENT in response.headers and await elsewhere():
                    raise Unavailable("this sandbox has just moved to another node", remedy="Try again at once.")
                await _answer(x, response, taken)
                return response.status
        except NotSent as error:
            raise self.unreachable(member, error) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__ or error.__context__, ClientGone):
                raise ClientGone from error
            told = self.unreachable(member, error)
            if isinstance(told, SandboxLost) and not x.began:
                raise told from error
            await x.cut()
            return 0

    def port_headers(self, x: Exchange, member: Member, principal: Principal | None) -> CIMultiDict[str]:
        """Of a request for a port by host name."""
        return self.headers(x, member, principal, PORT_KEY)

    def headers(self, x: Exchange, member: Member, principal: Principal | None, key_header: str) -> CIMultiDict[str]:
        """Of a request as it is passed on."""
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in x.scope["headers"]:
            if name in _HOP or name in _OURS or (principal is not None and value.startswith(b"dsk_")):
                continue
            headers.add(name.decode("latin-1"), value.decode("latin-1"))
        headers["x-request-id"] = x.request_id.decode("latin-1")
        if x.authorization and (principal is None or key_header != "authorization"):
            headers["authorization"] = x.authorization.decode("latin-1")
        if principal is not None:
            word = self.bearer(member, principal)
            headers[key_header] = f"Bearer {word}" if key_header == "authorization" else word
            if key_header != "authorization" and x.bearer().startswith("dsk_"):
                del headers["authorization"]
        if x.content_length is not None:
            headers["content-length"] = str(x.content_length)
        return headers


def node_socket(address: tuple[Any, ...]) -> socket.socket:
    """For a connection to a node."""
    return watched(address, CLUSTER_SILENCE_S)


def trust_of(member: Member) -> aiohttp.Fingerprint | bool:
    """The one certificate that an edge may show: the one that it named when it joined."""
    return _fingerprint(member.certificate) if member.certificate else True


@lru_cache(maxsize=4096)
def _fingerprint(certificate: str) -> aiohttp.Fingerprint:
    """The same object each time: connections are kept for it, and another one, even if equal, gets none of them."""
    return aiohttp.Fingerprint(bytes.fromhex(certificate))


def joined_again(member: Member) -> Unavailable:
    """The edge doesn't know our word: it has joined again, and its record is on its way here."""
    return Unavailable(f"edge {member.claim.edge} has just joined again", remedy="Try again in a moment.")


async def _body(x: Exchange, taken: asyncio.Event) -> AsyncIterator[bytes]:
    async for chunk in x.chunks():
        yield chunk
    taken.set()


async def _answer(x: Exchange, response: aiohttp.ClientResponse, taken: asyncio.Event) -> None:
    headers: Headers = [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower() not in _HOP and name.lower() not in (b"date", b"server")
    ]
    x.began = True
    x.cork()
    await x.send({"type": "http.response.start", "status": response.status, "headers": headers})
    gone = asyncio.create_task(_until_gone(x, taken))
    reading = asyncio.create_task(_pass(x, response))
    try:
        await asyncio.wait((gone, reading), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            await reading
        else:
            raise ClientGone
    finally:
        for task in (gone, reading):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _pass(x: Exchange, response: aiohttp.ClientResponse) -> None:
    async for chunk in response.content.iter_any():
        await x.more(chunk)
    await x.finish()


async def _until_gone(x: Exchange, taken: asyncio.Event) -> None:
    """`taken`: the request's body is read by nobody else any more."""
    await taken.wait()
    while (await x.receive())["type"] != "http.disconnect":
        pass

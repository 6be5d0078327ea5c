"""Short commands by a short way: the request that the SDK's `run` sends, read and answered without a task.

Half of what a command costs the server is one HTTP request's way through parser, ASGI and tasks. Most commands end
within milliseconds, so `Lane` recognises their requests as they come from the socket, whole in one piece, begins the
command in the same step, and answers from the call that reports its end. It is a short cut, never a second meaning:
what doesn't fit `_REQUEST` to the byte, or isn't answered soon, goes the ordinary way, where the command's key attaches
it to what was begun here.

Invariants: a request is authenticated and authorised before anything is done for it, as `dsec.api.app` does; an answer
leaves here whole or not at all; nothing is held for longer than the second that its caller allows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Protocol

import msgspec

from dsec.api.exchange import run_of
from dsec.api.exec import MAX_RELEASES, MEDIA, Started
from dsec.api.metrics import ServerMetrics
from dsec.edge.client import EdgeClient, Principal, Quick, QuickEdge
from dsec.edge.context import REQUEST_ID
from dsec.errors import DsecError
from dsec.spec.sandbox import ExecSpec
from dsec.wire.exec_stream import ServerKind, encode

COMMANDS = b"POST /v1/sandboxes/"
_HELD = b"/exec?hold_ms=1000 HTTP/1.1\r\n"
_NOT_HELD = b"/exec?hold_ms=0 HTTP/1.1\r\n"
_REQUEST = re.compile(
    rb"POST /v1/sandboxes/([0-9a-v]{24})" + re.escape(_HELD) + rb"Host: ([!-~]{1,300})\r\n"
    rb"Authorization: Bearer ([!-~]{1,300})\r\n"
    rb"Content-Type: application/json\r\n"
    rb"(?:X-Dsec-Release: ([!-~]{1,32768})\r\n)?"
    rb"(?:X-Dsec-Run: ([ -~]{1,1024})\r\n)?"
    rb"X-Request-Id: ([!-~]{1,128})\r\n"
    rb"Content-Length: ([1-9][0-9]{0,4})\r\n"
    rb"\r\n"
)
"""A header that isn't here, comes twice or in another order makes it an ordinary request."""
MAX_REQUEST = 64 << 10
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: " + MEDIA + b"\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n"
SOON_S = 0.75
"""A command that runs for longer goes the ordinary way; with LOOK_S it is less than the second that may be held."""
LOOK_S = 0.2
_decode = msgspec.json.Decoder(ExecSpec).decode
_json = msgspec.json.Encoder().encode


class Held(Protocol):
    """A request on a short way, whose answer comes later."""

    def let_go(self) -> None:
        """Nobody waits for it. Idempotent."""
        ...


class ShortWay(Protocol):
    """Takes requests as they come from the socket, before anybody reads them as HTTP."""

    def begin(self, request: bytes, answered: Callable[[bytes, bool], None]) -> Held | None:
        """Begin a request that has come in one piece; None: it is for the ordinary way. `answered` is called once,
        later: with the answer and True, or with the request that the ordinary way takes and False."""
        ...


class Door:
    """Who may come in by the short ways."""

    def __init__(self, edge: EdgeClient, is_port: Callable[[bytes], object]) -> None:
        """`is_port`: something, or an error, for a host name that is a sandbox's port."""
        self._edge = edge
        self._is_port = is_port
        self._host = b""
        """The API's own name, as clients said it last."""

    def admit(self, host: bytes, bearer: bytes, run: bytes | None) -> Principal | None:
        """Who asks; None: this isn't for the API. Raises as the ordinary way does."""
        if host != self._host:
            if self._is_port(host) is not None:
                return None
            self._host = host
        principal = self._edge.authenticate(bearer.decode("ascii"))
        if run is not None:
            self._edge.check_run(principal.project, *run_of(run))
        return principal


class Waiting:
    """A request whose command runs."""

    __slots__ = ("_answered", "_lane", "_request", "_request_id", "began", "quick")

    def __init__(
        self, lane: Lane, request: bytes, request_id: bytes, answered: Callable[[bytes, bool], None], began: float
    ) -> None:
        self._lane = lane
        self._request = request
        self._request_id = request_id
        self._answered = answered
        self.began = began
        self.quick: Quick | None = None

    def told(self) -> None:
        """Something happened to the command."""
        quick = self.quick
        if quick is None:
            return
        status = quick.status
        if status is None:
            if not quick.quick:
                self.give_up()
            return
        output = quick.output()
        if output is None:
            self.give_up()
            return
        parts = [encode(ServerKind.STARTED, _json(Started(key=quick.key, pid=quick.pid)))]
        for kind, data in zip((ServerKind.STDOUT, ServerKind.STDERR), output, strict=True):
            if data:
                parts.append(encode(kind, data))
        parts.append(encode(ServerKind.END, _json(status)))
        body = b"".join(parts)
        self.let_go()
        metrics = self._lane.metrics
        metrics.requests += 1
        metrics.quick += 1
        self._answered(_HEAD % (self._request_id, len(body)) + body, True)

    def give_up(self) -> None:
        """It goes the ordinary way from here, where nothing of it is held back any more."""
        self.let_go()
        self._answered(self._request.replace(_HELD, _NOT_HELD, 1), False)

    def let_go(self) -> None:
        """Nobody waits here. Idempotent."""
        quick, self.quick = self.quick, None
        if quick is not None:
            quick.let_go()
            self._lane.forget(self)


class Lane:
    """The short way of commands into one edge: a `ShortWay`. For the event loop."""

    def __init__(self, edge: EdgeClient, quick: QuickEdge, door: Door, metrics: ServerMetrics) -> None:
        self._edge = edge
        self._quick = quick
        self._door = door
        self.metrics = metrics
        self._waiting: dict[Waiting, None] = {}
        """Oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request: bytes, answered: Callable[[bytes, bool], None]) -> Waiting | None:
        """See `ShortWay`."""
        found = _REQUEST.match(request) if len(request) <= MAX_REQUEST else None
        if found is None or found.end() + int(found[7]) != len(request):
            return None
        raw_id, host, bearer, release, run, request_id, _ = found.groups()
        sandbox_id = raw_id.decode("ascii")
        loop = asyncio.get_running_loop()
        waiting = Waiting(self, request, request_id, answered, loop.time())
        try:
            principal = self._door.admit(host, bearer, run)
            if principal is None:
                return None
            self._edge.authorize(principal, sandbox_id)
            spec = _decode(request[found.end() :])
            keys = release.decode("ascii").split(",")[:MAX_RELEASES] if release else ()
            token = REQUEST_ID.set(request_id.decode("ascii"))
            try:
                quick = self._quick.exec_quick(sandbox_id, spec, keys, waiting.told)
            finally:
                REQUEST_ID.reset(token)
        except (DsecError, msgspec.MsgspecError, UnicodeDecodeError):
            return None  # the ordinary way says what is the matter
        if quick is None:
            return None
        waiting.quick = quick
        self._waiting[waiting] = None
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)
        return waiting

    def forget(self, waiting: Waiting) -> None:
        """It waits no more."""
        self._waiting.pop(waiting, None)

    def _look(self) -> None:
        """Those that took long."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = []
        for waiting in self._waiting:
            if now - waiting.began < SOON_S:
                break
            late.append(waiting)
        for waiting in late:
            waiting.give_up()
        if self._waiting:
            self._timer = loop.call_later(LOOK_S, self._look)

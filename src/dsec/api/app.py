"""The ASGI application: who calls, which handler, and one form for every error.

A host name that is a sandbox's port goes to the port proxy, whatever its path. Hot calls (exec, files, batches) go to
raw handlers, control calls to Litestar. A request is authenticated here, and authorised for the sandbox in its path,
before any of them sees it. Paths are split before they are decoded, so that a name or key may hold `/` as %2F.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from urllib.parse import unquote

from litestar import Litestar

from dsec.api import (
    batch,
    builds,
    control,
    exec,
    files,
    functions,
    grading,
    lives,
    openapi,
    seeing,
    sessions,
    streams,
    trajectory,
)
from dsec.api.control import EnvironmentInfo
from dsec.api.e2b import E2b, E2bConfig
from dsec.api.exchange import ClientGone, Exchange, Message, Receive, Scope, Send
from dsec.api.layers import Layers
from dsec.api.metrics import ServerMetrics
from dsec.api.ports import PortProxy
from dsec.api.quick import COMMANDS, Door, Lane, ShortWay
from dsec.api.quick_calls import CALLS, CallLane
from dsec.api.sandboxfusion import Fusion, FusionConfig
from dsec.api.swerex import Swerex
from dsec.builder.service import BuildService
from dsec.edge.client import EdgeClient, QuickEdge
from dsec.edge.context import REQUEST_ID, SANDBOX_ID
from dsec.edge.sessions import Sessions
from dsec.errors import DsecError, Internal, InvalidRequest, NotFound
from dsec.grading.judge import Judge
from dsec.grading.verifier import Verifier
from dsec.ports import FunctionHost
from dsec.store.service import LayerService

_SANDBOXES = "/v1/sandboxes/"
_log = logging.getLogger("dsec.api")


class Api:
    """ASGI application over an `EdgeClient`."""

    def __init__(
        self,
        edge: EdgeClient,
        *,
        environments: Callable[[str], Sequence[EnvironmentInfo]] = lambda project: (),
        version: str = "0",
        e2b: E2bConfig | None = None,
        layers: LayerService | None = None,
        builder: BuildService | None = None,
        verifier: Verifier | None = None,
        judge: Judge | None = None,
        fusion: FusionConfig | None = None,
        functions: FunctionHost | None = None,
    ) -> None:
        self._edge = edge
        domain = None if e2b is None else e2b.domain
        self._control: Litestar = control.build(edge, environments, version, domain)
        self._layers = Layers(layers) if layers is not None else None
        self._builds = builder
        self._verifier = verifier
        self._judge = judge
        self._fusion = Fusion(edge, judge, fusion) if judge is not None else None
        self._functions = functions
        self._openapi = openapi.Document(self._control)
        self.metrics = ServerMetrics(version)
        self.ports = PortProxy(edge, domain, self._note)
        self.lanes: dict[bytes, ShortWay] = {}
        """Short ways for short requests, by what these begin with, for who reads requests off the sockets."""
        door = Door(edge, self.ports.target)
        if isinstance(edge, QuickEdge):
            self.lanes[COMMANDS] = Lane(edge, edge, door, self.metrics)
        if functions is not None:
            self.lanes[CALLS] = CallLane(functions, door, self.metrics)
        self._e2b = E2b(edge, environments=environments, config=e2b, builder=builder)
        self._sessions = Sessions(edge)
        self._swerex = Swerex(edge, self._sessions)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await streams.websocket(self._edge, scope, receive, send)
                return
            await self._control(scope, receive, send)  # type: ignore[arg-type]
            return
        x = Exchange(scope, receive, send)
        self.metrics.requests += 1
        REQUEST_ID.set(x.request_id.decode("latin-1"))
        try:
            await self._route(x)
        except DsecError as error:
            self._note(x, error)
            await x.fail(error)
        except ClientGone:
            pass
        except Exception:  # noqa: BLE001 (the last resort: answered, logged, counted as ours)
            await x.fail(self._bug(x))

    def _bug(self, x: Exchange) -> Internal:
        """The exception that is being handled, counted, logged, and as what the caller is told."""
        request_id = x.request_id.decode("latin-1")
        self.metrics.errors[Internal.code] += 1
        _log.exception("request %s: %s %s failed", request_id, x.scope["method"], x.scope["path"])
        return Internal("a bug in the server", remedy=f"report it with the server's log of request {request_id}")

    def _note(self, x: Exchange, error: DsecError) -> None:
        """Errors are counted; those of the platform are in the log too."""
        self.metrics.errors[error.code] += 1
        _log.log(
            logging.WARNING if error.infra else logging.DEBUG,
            "request %s: %s %s: %s",
            x.request_id.decode("latin-1"),
            x.scope["method"],
            x.scope["path"],
            error,
        )

    async def _route(self, x: Exchange) -> None:
        scope = x.scope
        port = self.ports.target(x.host)
        if port is not None:
            await self.ports(x, port)
            return
        raw: str = scope["raw_path"].decode("ascii")
        edge = self._edge
        if self._fusion is not None and self._fusion.claims(raw):
            await self._foreign(self._fusion, x, raw)
            return
        if raw.startswith("/v1/"):
            x.principal = edge.authenticate(x.bearer())
            if (speaks_for := x.run()) is not None:
                edge.check_run(x.principal.project, *speaks_for)
            if raw.startswith(_SANDBOXES):
                sandbox_id, _, rest = raw[len(_SANDBOXES) :].partition("/")
                edge.authorize(x.principal, sandbox_id)
                SANDBOX_ID.set(sandbox_id)
                if await self._sandbox(sandbox_id, rest, x):
                    return
            elif raw == "/v1/layers:packages" and self._layers is not None and self._builds is not None:
                await builds.packages(self._builds, self._layers, x)
                return
            elif await self._batch(raw, x) or (self._layers is not None and await self._layer(self._layers, raw, x)):
                return
            elif raw == "/v1/judge" and self._judge is not None:
                await grading.judge(self._judge, x)
                return
            elif raw == "/v1/functions" and self._functions is not None:
                await functions.call(self._functions, x)
                return
            elif raw == "/v1/builds" and self._builds is not None:
                await builds.build(self._builds, x)
                return
        elif self._e2b.claims(raw):
            await self._foreign(self._e2b, x, raw)
            return
        elif self._swerex.claims(raw):
            await self._foreign(self._swerex, x, raw)
            return
        elif raw == "/openapi.json":
            x.only("GET")
            await x.answer(200, await self._openapi.get())
            return
        elif raw == "/readyz":
            x.only("GET")
            await seeing.ready(edge, x)
            return
        elif raw == "/metrics":
            x.only("GET")
            x.principal = edge.authenticate(x.bearer())
            await seeing.metrics(edge, self.metrics, x)
            return
        elif raw != "/healthz":
            raise NotFound(f"no such path: {raw}", remedy="GET /openapi.json lists them")
        control.only(self._control, x)
        scope[control.EXCHANGE] = x
        await self._control(scope, x.next_message, _stamped(x))  # type: ignore[arg-type]
        if x.failed is not None:
            self._note(x, x.failed)

    async def _foreign(self, family: E2b | Swerex | Fusion, x: Exchange, raw: str) -> None:
        """A call of another's client, whose bugs of ours have that family's form too."""
        try:
            await family(x, raw)
        except (DsecError, ClientGone):
            raise
        except Exception:  # noqa: BLE001 (as in `__call__`)
            await family.fail(x, raw, self._bug(x))

    async def _sandbox(self, sandbox_id: str, rest: str, x: Exchange) -> bool:
        """Calls on one sandbox; False: not a hot one."""
        edge, method = self._edge, x.scope["method"]
        if not rest:
            x.only("DELETE", "GET")
            await (lives.inspect if method == "GET" else lives.end)(edge, sandbox_id, x)
            return True
        if rest == "exec":
            x.only("POST", "GET")
            await (exec.start if method == "POST" else exec.processes)(edge, sandbox_id, x)
            return True
        if rest == "verify" and self._verifier is not None:
            x.only("POST")
            await grading.verify(self._verifier, sandbox_id, x)
            return True
        if rest == "snapshot" and self._layers is not None:
            x.only("POST")
            await self._layers.snapshot(edge, sandbox_id, x)
            return True
        if rest == "events":
            x.only("GET")
            await seeing.events(edge, sandbox_id, x)
            return True
        if rest == "trajectory":
            x.only("GET")
            await trajectory.read(edge, sandbox_id, x)
            return True
        if rest == "exec:release":
            x.only("POST")
            await exec.release_many(edge, sandbox_id, x)
            return True
        if rest == "files":
            x.only("GET", "PUT")
            await (files.read if method == "GET" else files.write)(edge, sandbox_id, x)
            return True
        head, _, tail = rest.partition("/")
        if head == "exec":
            await self._command(sandbox_id, tail, x)
            return True
        if head == "sessions":
            await self._session(sandbox_id, tail, x)
            return True
        if head == "files" and tail in _FILES:
            allowed, handler = _FILES[tail]
            x.only(allowed)
            await handler(edge, sandbox_id, x)
            return True
        return False

    async def _session(self, sandbox_id: str, tail: str, x: Exchange) -> None:
        quoted, _, verb = tail.partition("/")
        name = unquote(quoted)
        if not name and not verb:
            x.only("GET", "POST")
            await sessions.collection(self._sessions, sandbox_id, x)
        elif name and not verb:
            x.only("DELETE", "GET")
            await sessions.one(self._sessions, sandbox_id, name, x)
        elif name and verb in sessions.VERBS:
            allowed, handler = sessions.VERBS[verb]
            x.only(allowed)
            await handler(self._sessions, sandbox_id, name, x)
        else:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")

    async def _command(self, sandbox_id: str, tail: str, x: Exchange) -> None:
        edge = self._edge
        quoted, _, verb = tail.partition("/")
        key = unquote(quoted)
        if not key:
            raise InvalidRequest("the command's key is empty")
        if not verb:
            x.only("DELETE", "GET")
            await (exec.attach if x.scope["method"] == "GET" else exec.release)(edge, sandbox_id, key, x)
        elif verb in _COMMANDS:
            x.only("POST")
            await _COMMANDS[verb](edge, sandbox_id, key, x)
        else:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")

    @staticmethod
    async def _layer(layers: Layers, raw: str, x: Exchange) -> bool:
        verbs = {"import": layers.load, "upload": layers.upload, "merge": layers.merge, "gc": layers.collect}
        _, _, kind, *rest = raw.split("/")
        if kind == "layers" and not rest:
            await layers.layers(x)
        elif kind == "layers" and len(rest) <= 2:
            await layers.one(x, unquote(rest[0]), rest[1] if len(rest) == 2 else "")
        elif kind.startswith("layers:") and kind[7:] in verbs and not rest:
            await verbs[kind[7:]](x)
        elif kind == "environments" and len(rest) == 1:
            await layers.environment(x, unquote(rest[0]))
        elif kind == "environments" and not rest and x.scope["method"] != "GET":
            await layers.create_environment(x)
        else:
            return False
        return True

    async def _batch(self, raw: str, x: Exchange) -> bool:
        if raw == "/v1/sandboxes":
            x.only("GET", "POST")
            if x.scope["method"] == "GET":
                return False
            await lives.create(self._edge, x)
            return True
        if raw == "/v1/sandboxes:batch":
            x.only("POST")
            await batch.create_many(self._edge, x)
            return True
        if raw == "/v1/sandboxes:delete":
            x.only("POST")
            await batch.delete_many(self._edge, x)
            return True
        if raw in ("/v1/sandboxes:pause", "/v1/sandboxes:resume"):
            x.only("POST")
            await batch.pause_many(self._edge, x, resume=raw.endswith("resume"))
            return True
        if raw == "/v1/sandboxes:rebuild":
            x.only("POST")
            await trajectory.rebuild(self._edge, x)
            return True
        if raw == "/v1/exec:batch":
            x.only("POST")
            await batch.exec_many(self._edge, x)
            return True
        parts = raw.split("/")
        if len(parts) == 5 and parts[2] == "named":
            x.only("GET")
            await batch.find_named(self._edge, unquote(parts[3]), unquote(parts[4]), x)
            return True
        return False


_FILES = {
    "stat": ("GET", files.stat),
    "list": ("GET", files.listing),
    "move": ("POST", files.move),
    "mkdir": ("POST", files.mkdir),
    "remove": ("POST", files.remove),
    "watch": ("GET", streams.watch),
}
_COMMANDS = {"stdin": exec.stdin, "signal": exec.signal, "resize": exec.resize}


def _stamped(x: Exchange) -> Send:
    """Litestar's answers carry the request's id too."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                await x.drain()
            x.began = True
            x.cork()
            message["headers"] = [*message["headers"], (b"x-request-id", x.request_id)]
        await x.send(message)

    return send

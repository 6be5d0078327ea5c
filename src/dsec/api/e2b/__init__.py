"""The E2B face of the API: its REST control plane and its data plane ("envd"), for E2B's own client as it is.

`E2b.claims` says which requests are its; `docs/E2B.md` says what works and what differs. Modules: `call` (who asks, for
which sandbox), `control` and `models` (REST), `files`, `process`, `filesystem`, `watchers` (data plane), `signatures`
(URLs), `rpc` (Connect over HTTP), `users` (names and homes inside), `errors`, `config`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

from dsec.api.control import EnvironmentInfo
from dsec.api.e2b import errors, files, rpc
from dsec.api.e2b.call import Call
from dsec.api.e2b.config import E2bConfig
from dsec.api.e2b.control import Control
from dsec.api.e2b.filesystem import FilesystemService
from dsec.api.e2b.process import ProcessService
from dsec.api.e2b.signatures import Signatures
from dsec.api.e2b.snapshots import Snapshots
from dsec.api.e2b.starting import Starter
from dsec.api.e2b.templates import Templates
from dsec.api.e2b.users import Users
from dsec.api.e2b.watchers import WatcherService
from dsec.api.exchange import Exchange
from dsec.api.ports.hosts import ENVD_PORT
from dsec.builder.service import BuildService
from dsec.edge.client import EdgeClient, Principal
from dsec.errors import DsecError, InvalidRequest, NotFound, SandboxNotFound
from dsec.spec.sandbox import State
from dsec.wire.connect import Code

__all__ = ["E2b", "E2bConfig"]

_CONTROL = frozenset({"sandboxes", "templates", "snapshots", "volumes", "secrets"})
_DATA = frozenset({"files", "health", "process.Process", "filesystem.Filesystem"})
_UPLOAD = ["templates", "files"]


class E2b:
    """Answers the requests of E2B's client."""

    def __init__(
        self,
        edge: EdgeClient,
        *,
        environments: Callable[[str], Sequence[EnvironmentInfo]] = lambda project: (),
        config: E2bConfig | None = None,
        builder: BuildService | None = None,
    ) -> None:
        self._edge = edge
        self._signatures = Signatures(edge)
        config = config or E2bConfig()
        starter = Starter(edge, builder.layers) if builder is not None else None
        self._control = Control(edge, environments, config, self._signatures, starter)
        self._templates = Templates(builder, config) if builder is not None else None
        self._snapshots = Snapshots(edge, builder.layers, config) if builder is not None else None
        users = Users(edge)
        process = ProcessService(edge, users)
        filesystem = FilesystemService(edge, users)
        watchers = WatcherService(edge, users, filesystem)
        self._users = users
        self._unary: dict[str, Callable[[str, Call], Any]] = {
            **{f"process.Process/{name}": handler for name, handler in process.unary.items()},
            **{f"filesystem.Filesystem/{name}": handler for name, handler in filesystem.unary.items()},
            **{f"filesystem.Filesystem/{name}": handler for name, handler in watchers.unary.items()},
        }
        self._streams: dict[str, Callable[[str, Call], Any]] = {
            **{f"process.Process/{name}": handler for name, handler in process.streams.items()},
            **{f"filesystem.Filesystem/{name}": handler for name, handler in watchers.streams.items()},
        }

    @staticmethod
    def claims(raw: str) -> bool:
        """Whether a path (percent-encoded, not below /v1/) is E2B's."""
        first, _, rest = raw[1:].partition("/")
        if first in ("v2", "v3"):
            first = rest.partition("/")[0]
            return first in ("sandboxes", "templates")
        return first in _CONTROL or first in _DATA

    async def __call__(self, x: Exchange, raw: str) -> None:
        """Answer a request that `claims` took."""
        call = Call(x)
        first, _, rest = raw[1:].partition("/")
        if first in _DATA:
            await self._data(call, first, rest)
            return
        try:
            await self._rest(call, first, rest)
        except DsecError as error:
            await errors.fail_rest(x, error)

    async def fail(self, x: Exchange, raw: str, error: DsecError) -> None:
        """An error of a request that `claims` took, as the answer in the form that the client reads there."""
        name = raw[1:]
        if name in self._streams:
            await rpc.fail_stream(x, error)
        elif name in self._unary:
            await errors.fail_unary(x, error)
        else:
            data = name.partition("/")[0] in _DATA
            await (errors.fail_data if data else errors.fail_rest)(x, error)

    # --- control plane ---

    async def _rest(self, call: Call, first: str, rest: str) -> None:
        parts = [unquote(part) for part in ([first, *rest.split("/")] if rest else [first])]
        if parts[0] in ("v2", "v3"):
            parts = parts[1:]
        if call.method == "PUT" and self._templates is not None and len(parts) == 4 and parts[::2] == _UPLOAD:
            await self._templates.receive(call, parts[3])  # by the ticket in its URL alone: the client sends no key
            return
        principal = call.project(self._edge)
        if (
            parts[0] == "templates"
            and self._templates is not None
            and await self._template(self._templates, call, parts, principal)
        ):
            return
        control = self._control
        method = call.method
        match parts:
            case ["sandboxes"]:
                call.x.only("GET", "POST")
                await (control.list_sandboxes if method == "GET" else control.create)(call, principal)
            case ["sandboxes", "metrics"]:
                call.x.only("GET")
                await control.later(call, "metrics")
            case ["sandboxes", sandbox_id]:
                call.x.only("GET", "DELETE")
                self._edge.authorize(principal, sandbox_id)
                await (control.inspect if method == "GET" else control.kill)(call, sandbox_id)
            case ["sandboxes", sandbox_id, verb]:
                self._edge.authorize(principal, sandbox_id)
                await self._verb(call, sandbox_id, verb, principal)
            case ["snapshots"] if self._snapshots is not None:
                call.x.only("GET")
                await self._snapshots.listing(call, principal)
            case ["templates", "aliases", *name] if name:
                call.x.only("GET")
                await control.template_alias(call, "/".join(name))
            case [("templates" | "snapshots" | "volumes" | "secrets") as what, *_]:
                await control.later(call, what)
            case _:
                raise NotFound(f"no such path: {call.x.scope['path']}")

    @staticmethod
    async def _template(templates: Templates, call: Call, parts: list[str], principal: Principal) -> bool:
        method, x = call.method, call.x
        match parts:
            case ["templates"] if method != "GET":
                x.only("POST")
                await templates.request(call, principal)
            case ["templates", template, "files", digest]:
                x.only("GET", "PUT")
                await templates.link(call, template, digest, principal)
            case ["templates", _, "builds", build]:
                x.only("POST")
                await templates.start(call, build, principal)
            case ["templates", _, "builds", build, "status"]:
                x.only("GET")
                await templates.status(call, build, principal)
            case ["templates", template] if template not in ("tags", "aliases") and method not in ("GET", "PATCH"):
                x.only("DELETE")
                await templates.remove(call, template, principal)
            case _:
                return False
        return True

    async def _verb(self, call: Call, sandbox_id: str, verb: str, principal: Principal) -> None:
        control = self._control
        match verb:
            case "connect" | "resume":
                call.x.only("POST")
                await control.connect(call, sandbox_id)
            case "timeout":
                call.x.only("POST")
                await control.set_timeout(call, sandbox_id)
            case "metrics":
                call.x.only("GET")
                await control.metrics(call, sandbox_id)
            case "network":
                call.x.only("PUT")
                await control.set_network(call, sandbox_id, principal)
            case "pause":
                call.x.only("POST")
                await control.pause(call, sandbox_id)
            case "fork":
                call.x.only("POST")
                await control.fork(call, sandbox_id)
            case "snapshots" if self._snapshots is not None:
                call.x.only("POST")
                await self._snapshots.take(call, sandbox_id, principal)
            case "snapshots" | "logs":
                await control.later(call, verb)
            case _:
                raise NotFound(f"no such path: {call.x.scope['path']}")

    # --- data plane ---

    async def _data(self, call: Call, first: str, rest: str) -> None:
        x = call.x
        try:
            if rest and first in ("files", "health"):
                raise NotFound(f"no such path: {x.scope['path']}")
            if first == "files":
                await self._file(call)
                return
            x.only("GET" if first == "health" else "POST")
            sandbox_id = self._named(call)
            self._authorize(call, sandbox_id)
            if first == "health":
                if self._edge.get(sandbox_id).state is not State.RUNNING:
                    raise SandboxNotFound(f"sandbox {sandbox_id} is not running")
                await x.empty()
                return
        except DsecError as error:
            await errors.fail_data(x, error)
            return
        await self._rpc(call, sandbox_id, f"{first}/{rest}")

    async def _file(self, call: Call) -> None:
        call.x.only("GET", "POST")
        reads = call.method == "GET"
        if call.signed:
            sandbox_id = self._signatures.check(call, "read" if reads else "write", self._target(call))
        else:
            sandbox_id = self._named(call)
            self._authorize(call, sandbox_id)
        await (files.download if reads else files.upload)(self._edge, self._users, sandbox_id, call)

    async def _rpc(self, call: Call, sandbox_id: str, name: str) -> None:
        x = call.x
        stream = self._streams.get(name)
        unary = self._unary.get(name)
        try:
            if stream is not None:
                await stream(sandbox_id, call)
            elif unary is not None:
                await x.answer(200, await unary(sandbox_id, call))
            else:
                raise errors.RpcError(Code.UNIMPLEMENTED, f"no such procedure: {name[:100]}")
        except errors.GONE as error:
            await errors.fail_data(x, error)
        except (DsecError, errors.RpcError) as error:
            await (errors.fail_unary if stream is None else rpc.fail_stream)(x, error)

    def _authorize(self, call: Call, sandbox_id: str) -> None:
        token = call.authorize(self._edge, sandbox_id)
        if token.startswith(f"dst_{sandbox_id}_~"):
            self._signatures.saw(sandbox_id, token)

    def _named(self, call: Call) -> str:
        sandbox_id = self._target(call)
        if sandbox_id is None:
            raise InvalidRequest(
                "the request doesn't say which sandbox it is for",
                remedy="Send E2b-Sandbox-Id, or use the host name 49983-ID.DOMAIN.",
            )
        return sandbox_id

    def _target(self, call: Call) -> str | None:
        target = call.target()
        if target is None:
            return None
        sandbox_id, port = target
        if port != ENVD_PORT:
            raise InvalidRequest(
                f"port {port} of a sandbox is not served by headers", remedy="Use its host name: get_host(port)."
            )
        return sandbox_id

"""Sandboxes as the caller holds them, and runs: named sets of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Struct

from dsec.errors import DsecError, ErrorBody, InvalidRequest, from_body
from dsec.ports import Usage
from dsec.sdk._commands import AsyncCommands
from dsec.sdk._events import follow_events, follow_trajectory
from dsec.sdk._files import AsyncFiles
from dsec.sdk._lines import lines
from dsec.sdk._machine import AsyncCheckpoints, AsyncConsole, Screen
from dsec.sdk._network import AsyncNetworkAccess
from dsec.sdk._results import CreateResult
from dsec.sdk._sessions import AsyncSessions
from dsec.sdk._streams import AsyncPorts
from dsec.sdk._transport import Transport, default_transport
from dsec.spec.causes import Cause
from dsec.spec.events import SandboxEvent
from dsec.spec.grading import Grader, Verdict, VerifySpec
from dsec.spec.sandbox import SandboxInfo, SandboxSpec, State
from dsec.spec.screen import Click, Press, Scroll, Type
from dsec.spec.snapshots import SnapshotInfo, SnapshotRequest
from dsec.spec.trajectory import Entry
from dsec.spec.tripwires import TripwireState

if TYPE_CHECKING:
    from dsec.sdk._client import AsyncClient

Raised = type[BaseException]
_JSON = {"Content-Type": "application/json"}
_ENCODER = msgspec.json.Encoder()
_PAGE = 1000


class _Page(Struct, frozen=True):
    sandboxes: list[SandboxInfo]
    next: str | None = None


class _Deleted(Struct, frozen=True):
    id: str
    error: ErrorBody | None = None


class _Child(Struct, frozen=True):
    index: int
    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None


class _Forked(Struct, frozen=True):
    results: list[_Child]


class _Results(Struct, frozen=True):
    results: list[_Deleted]


class AsyncSandbox:
    """One sandbox. Make it with `create`, find it again with `connect`; leaving `async with` ends it.

    Nothing else ends it but `kill`, its `ttl_s` and its own doing: it outlives this object, its connection and this
    process.
    """

    def __init__(self, transport: Transport, info: SandboxInfo) -> None:
        """Not for callers: use `create`, `create_many` or `connect`."""
        self._transport = transport
        self._path = f"/v1/sandboxes/{info.id}"
        self.id: str = info.id
        self.info: SandboxInfo = info
        """As the server saw it when it was last asked (`refresh`)."""
        self.commands: AsyncCommands = AsyncCommands(transport, info.id)
        self.files: AsyncFiles = AsyncFiles(transport, info.id)
        self.sessions: AsyncSessions = AsyncSessions(transport, info.id)
        self.network: AsyncNetworkAccess = AsyncNetworkAccess(transport, info.id)
        self.ports: AsyncPorts = AsyncPorts(transport, info.id)
        self.console: AsyncConsole = AsyncConsole(transport, info.id)
        self.checkpoints: AsyncCheckpoints = AsyncCheckpoints(transport, info.id)
        self._screen = Screen(transport, info.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.info.state} {self.info.spec.environment}>"

    # --- making and finding -----------------------------------------------------------------------------------------

    @classmethod
    async def create(
        cls,
        environment: str | SandboxSpec,
        *,
        client: AsyncClient | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncSandbox:
        """Make a sandbox of an environment's name or a spec; `fields` are those of `SandboxSpec` and win over the
        spec's.

        Returns when it runs. With the field `name`: the live sandbox of this name (within `run`) is returned where
        there is one. `client`: whose server (None: the default one). `key`: idempotency key; the same key and spec
        again returns the same sandbox. `deadline_s`: how long the server waits for capacity and creation.

        Raises `EnvironmentNotFound`, `InvalidRequest`, `Unsupported`, `Conflict` (the name or key has another spec),
        `QuotaExceeded`, `AdmissionTimeout`, `CreateFailed`, `Unauthenticated`, `Unavailable`, `RequestTimeout`.
        """
        transport = client._transport if client is not None else default_transport()
        info = await transport.call(
            "POST",
            transport.url("/v1/sandboxes", deadline_s=deadline_s, key=key or transport.new_key()),
            SandboxInfo,
            body=_encoded(make_spec(environment, fields)),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )
        return cls(transport, info)

    @classmethod
    async def create_many(
        cls,
        specs: SandboxSpec | str | Iterable[SandboxSpec | str],
        *,
        count: int | None = None,
        client: AsyncClient | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[CreateResult[AsyncSandbox]]:
        """Make many sandboxes: yields a `CreateResult` for each as it is ready, with a sandbox or an error.

        `specs`: one for each, or one (spec or environment's name) and a `count`. `fields`: laid over each. `key`:
        idempotency key of the whole; the same key and specs again give the same sandboxes, so that a process that was
        restarted goes on with them. The rest: see `create`. Raises what is wrong with the request as a whole; leaving
        the loop stops nothing.
        """
        transport = client._transport if client is not None else default_transport()
        if isinstance(specs, SandboxSpec | str):
            if count is None:
                raise InvalidRequest("a single spec needs a count")
            total, request = count, {"spec": make_spec(specs, fields), "count": count}
        else:
            if count is not None:
                raise InvalidRequest("count goes with a single spec")
            each = [make_spec(spec, fields) for spec in specs]
            if not each:
                return
            total, request = len(each), {"specs": each}
        url = transport.url("/v1/sandboxes:batch", deadline_s=deadline_s, key=key or transport.new_key())
        body = _encoded(request)
        async for item in lines(transport, url, lambda _: body, total, request_timeout_s):
            sandbox = cls(transport, item.sandbox) if item.sandbox is not None else None
            error = from_body(item.error) if item.error is not None else None
            yield CreateResult(item.index, sandbox, error)

    @classmethod
    async def connect(
        cls, sandbox_id: str, *, client: AsyncClient | None = None, request_timeout_s: float | None = None
    ) -> AsyncSandbox:
        """The sandbox of an id, made by this process or another. Raises `SandboxNotFound`; an ended one says why in
        `info`."""
        transport = client._transport if client is not None else default_transport()
        url = transport.url(f"/v1/sandboxes/{quote(sandbox_id, safe='')}")
        return cls(transport, await transport.call("GET", url, SandboxInfo, request_timeout_s=request_timeout_s))

    @classmethod
    async def list(
        cls,
        *,
        states: Sequence[State | str] = (),
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        client: AsyncClient | None = None,
        request_timeout_s: float | None = None,
    ) -> list[SandboxInfo]:
        """The project's sandboxes, at most `limit` (None: all). No `states`: all but ended ones."""
        transport = client._transport if client is not None else default_transport()
        found: list[SandboxInfo] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            url = transport.url(
                "/v1/sandboxes",
                state=[str(state) for state in states],
                run=run,
                label=[f"{name}={value}" for name, value in (labels or {}).items()],
                limit=_PAGE if limit is None else min(_PAGE, limit - len(found)),
                after=after,
            )
            page = await transport.call("GET", url, _Page, request_timeout_s=request_timeout_s)
            found += page.sandboxes
            after = page.next
            if after is None:
                break
        return found

    @classmethod
    async def kill_many(
        cls,
        sandboxes: Iterable[str | AsyncSandbox | SandboxInfo],
        *,
        cause: Cause = Cause.DELETED,
        client: AsyncClient | None = None,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError]:
        """End many sandboxes; returns the errors by id, empty where all went well (an unknown one is an error, an
        ended one not)."""
        transport = client._transport if client is not None else default_transport()
        ids = [each if isinstance(each, str) else each.id for each in sandboxes]
        answer = await transport.call(
            "POST",
            transport.url("/v1/sandboxes:delete", cause=None if cause is Cause.DELETED else cause),
            _Results,
            body=_encoded({"ids": ids}),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )
        return {result.id: from_body(result.error) for result in answer.results if result.error is not None}

    # --- one sandbox ------------------------------------------------------------------------------------------------

    async def refresh(self, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Ask the server about it; updates `info`."""
        url = self._transport.url(self._path)
        self.info = await self._transport.call("GET", url, SandboxInfo, request_timeout_s=request_timeout_s)
        return self.info

    async def kill(self, *, cause: Cause = Cause.DELETED, request_timeout_s: float | None = None) -> SandboxInfo:
        """End it; returns when nothing of it is left. Again: the same answer."""
        url = self._transport.url(self._path, cause=None if cause is Cause.DELETED else cause)
        self.info = await self._transport.call("DELETE", url, SandboxInfo, request_timeout_s=request_timeout_s)
        return self.info

    async def renew(self, ttl_s: float | None, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Let it live `ttl_s` from now (None: for ever)."""
        self.info = await self._transport.call(
            "POST",
            self._transport.url(f"{self._path}/renew"),
            SandboxInfo,
            body=_encoded({"ttl_s": ttl_s}),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )
        return self.info

    async def pause(self, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Freeze it and give its memory back. Its TTLs and timeouts stand still, and any request that needs it resumes
        it. Needs an API key."""
        url = self._transport.url(f"{self._path}/pause")
        self.info = await self._transport.call("POST", url, SandboxInfo, request_timeout_s=request_timeout_s)
        return self.info

    async def resume(self, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Let it go on. Raises `Conflict` where a tripwire paused it. Needs an API key."""
        url = self._transport.url(f"{self._path}/resume")
        self.info = await self._transport.call("POST", url, SandboxInfo, request_timeout_s=request_timeout_s)
        return self.info

    async def fork(
        self, count: int = 1, *, deadline_s: float | None = None, request_timeout_s: float | None = None
    ) -> Sequence[AsyncSandbox]:
        """Children that begin with its files as they are now and with its spec (but `name` and `hostname`), all of them
        or none: each with an id, host name, machine id and tokens of its own. A container's child has new processes;
        a microVM's goes on with all that runs in its parent, its commands (`commands.attach`) too. It may be paused,
        and stays so. Not repeated where the connection breaks (`OutcomeUnknown`). Needs an API
        key."""
        answer = await self._transport.call(
            "POST",
            self._transport.url(f"{self._path}/fork", deadline_s=deadline_s),
            _Forked,
            body=_encoded({"count": count}),
            headers=_JSON,
            replay=False,
            request_timeout_s=request_timeout_s,
        )
        made = [type(self)(self._transport, each.sandbox) for each in answer.results if each.sandbox is not None]
        for each in answer.results:
            if each.error is not None:
                for child in made:
                    await child.kill()
                raise from_body(each.error)
        return made

    async def pack_diff(
        self,
        name: str,
        *,
        scrub: bool = True,
        remove: Sequence[str] = (),
        keep: Sequence[str] = (),
        description: str = "",
        readers: Sequence[str] = (),
        request_timeout_s: float | None = None,
    ) -> SnapshotInfo:
        """Make a layer, and an environment with it on top, of what it has written until now: `NAME@VERSION`. `scrub`:
        leave out histories, caches, temporary files and logs. `remove`, `keep`: globs (`*` within a name, `**` at any
        depth) of what is left out too, and of what stays all the same. The answer says what was removed and what was
        kept. It may be paused, and stays so. Raises `Conflict` where the name is taken. Needs an API key."""
        asked = SnapshotRequest(
            name=name, scrub=scrub, remove=list(remove), keep=list(keep), description=description, readers=list(readers)
        )
        return await self._transport.call(
            "POST",
            self._transport.url(f"{self._path}/snapshot"),
            SnapshotInfo,
            body=_encoded(asked),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )

    # --- full machines: their screen --------------------------------------------------------------------------------

    async def screenshot(self, *, request_timeout_s: float | None = None) -> bytes:
        """Its screen as a PNG. Raises `Unsupported` where it has none, as the following do."""
        return await self._screen.picture(request_timeout_s)

    async def click(
        self,
        x: int,
        y: int,
        *,
        button: Literal["left", "middle", "right"] = "left",
        count: int = 1,
        request_timeout_s: float | None = None,
    ) -> None:
        """Press a mouse button at a pixel of the screen; 0, 0 is the upper left. `count`: 2 for a double click, 0 to
        move there. Raises `InvalidRequest` where that is not on the screen."""
        await self._screen.send([Click(x=x, y=y, button=button, count=count)], request_timeout_s)

    async def scroll(self, x: int, y: int, lines: int, *, request_timeout_s: float | None = None) -> None:
        """Turn the mouse's wheel at a pixel of the screen; below 0: upwards. Raises as `click`."""
        await self._screen.send([Scroll(x=x, y=y, lines=lines)], request_timeout_s)

    async def type(self, text: str, *, request_timeout_s: float | None = None) -> None:
        """Type on its (US) keyboard; a newline is the enter key. Raises `InvalidRequest` for what isn't on it."""
        await self._screen.send([Type(text=text)], request_timeout_s)

    async def press(self, keys: str, *, request_timeout_s: float | None = None) -> None:
        """Press keys together: `enter`, `ctrl-l`, `alt-f4`. Raises `InvalidRequest` for one that doesn't exist."""
        await self._screen.send([Press(keys=keys)], request_timeout_s)

    async def usage(self, *, request_timeout_s: float | None = None) -> Usage:
        """Its counters now: CPU, memory, processes, disk."""
        url = self._transport.url(f"{self._path}/usage")
        return await self._transport.call("GET", url, Usage, request_timeout_s=request_timeout_s)

    async def verify(
        self,
        grader: Grader | Sequence[str],
        *,
        paths: Sequence[str],
        repeats: int = 1,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Verdict:
        """Judge what the agent has changed below `paths` so far: `grader` (a command's argv, with `fields` of `Grader`)
        runs in a fresh sandbox of the same pristine layers, without network, with hidden files that this sandbox never
        held. This one is frozen while its changes are read, and goes on. `repeats`: so many graders, each in a sandbox
        of its own; where they differ the verdict is flaky. docs/GRADING.md says what can reach a grader.

        Raises `InvalidRequest`, `TooLarge`, `SandboxEnded`, `NotFound` (a hidden layer), and what creating a sandbox
        raises. Needs an API key.
        """
        try:
            if not isinstance(grader, Grader):
                grader = msgspec.convert({"argv": list(grader), **fields}, Grader, builtin_types=(bytes,))
            elif fields:
                grader = msgspec.structs.replace(grader, **fields)
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidRequest(str(error)) from None
        return await self._transport.call(
            "POST",
            self._transport.url(f"{self._path}/verify"),
            Verdict,
            body=_encoded(VerifySpec(grader=grader, paths=list(paths), repeats=repeats)),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )

    async def tripwires(self, *, request_timeout_s: float | None = None) -> TripwireState:
        """What its tripwires are, how often each was hit, and whether one has paused it. Needs an API key."""
        url = self._transport.url(f"{self._path}/tripwires")
        return await self._transport.call("GET", url, TripwireState, request_timeout_s=request_timeout_s)

    async def resume_tripwires(self, *, request_timeout_s: float | None = None) -> TripwireState:
        """Let it go on after a tripwire paused it. Raises `Conflict` where none did. Needs an API key."""
        url = self._transport.url(f"{self._path}/tripwires/resume")
        return await self._transport.call("POST", url, TripwireState, request_timeout_s=request_timeout_s)

    async def events(self, *, after: int = 0, follow: bool = False) -> AsyncIterator[SandboxEvent]:
        """What happened to it, oldest first, from above the number `after` on: its making with the time of each phase,
        its commands and file calls, limits that were met, its end. `follow`: also what is still to happen, until it has
        ended, over as many connections as it takes. Raises `SandboxNotFound`."""
        async for event in follow_events(self._transport, f"{self._path}/events", after, follow):
            yield event

    async def trajectory(self, *, after: int = 0, follow: bool = False) -> AsyncIterator[Entry]:
        """What was done to it and what came of it, from above the number `after` on, as a chain of hashes that
        `dsec.spec.trajectory.check` checks. `follow`: also what is still to come, until it has ended, over as many
        connections as it takes. Also of an ended one, while its record is kept. Raises `SandboxNotFound`."""
        async for entry in follow_trajectory(self._transport, f"{self._path}/trajectory", after, follow):
            yield entry

    async def get_host(self, port: int) -> str:
        """The host name at which the server serves a port inside; see `ports.get_host`."""
        return await self.ports.get_host(port)

    async def url(self, port: int, *, token: bool = False) -> str:
        """The URL of a port inside; see `ports.url`."""
        return await self.ports.url(port, token=token)

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, kind: Raised | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.kill()


def make_spec(environment: str | SandboxSpec, fields: Mapping[str, Any]) -> SandboxSpec:
    """A spec of what a caller wrote. Raises `InvalidRequest` with the field's name for a value that can't be."""
    if isinstance(environment, SandboxSpec):
        if not fields:
            return environment
        values = {**msgspec.structs.asdict(environment), **fields}
    else:
        values = {"environment": environment, **fields}
    try:
        return msgspec.convert(values, SandboxSpec)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None


def _encoded(value: object) -> bytes:
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequest(f"this can't be sent as JSON: {error}") from None

"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from dsec.errors import DsecError
from dsec.ports import Usage
from dsec.sdk._portal import Wrapper, call, iterate, unwrap, unwrap_each
from dsec.sdk._results import CreateResult
from dsec.sdk._sandbox import AsyncSandbox, Raised
from dsec.sdk._sync_inside import Commands, Files, Ports
from dsec.sdk._sync_machine import Checkpoints, Console
from dsec.sdk._sync_sessions import NetworkAccess, Sessions
from dsec.spec.causes import Cause
from dsec.spec.events import SandboxEvent
from dsec.spec.grading import Grader, Verdict
from dsec.spec.sandbox import SandboxInfo, SandboxSpec, State
from dsec.spec.snapshots import SnapshotInfo
from dsec.spec.trajectory import Entry
from dsec.spec.tripwires import TripwireState

if TYPE_CHECKING:
    from dsec.sdk._sync import Client


class Sandbox(Wrapper):
    """One sandbox. Make it with `create`, find it again with `connect`; leaving `with` ends it.

    Nothing else ends it but `kill`, its `ttl_s` and its own doing: it outlives this object, its connection and this
    process.
    """

    _async: AsyncSandbox

    def __init__(self, inner: AsyncSandbox) -> None:
        """Not for callers."""
        self._async = inner

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def info(self) -> SandboxInfo:
        """As the server saw it when it was last asked (`refresh`)."""
        return self._async.info

    @property
    def commands(self) -> Commands:
        return Commands(self._async.commands)

    @property
    def files(self) -> Files:
        return Files(self._async.files)

    @property
    def sessions(self) -> Sessions:
        return Sessions(self._async.sessions)

    @property
    def network(self) -> NetworkAccess:
        return NetworkAccess(self._async.network)

    @property
    def ports(self) -> Ports:
        return Ports(self._async.ports)

    @property
    def console(self) -> Console:
        return Console(self._async.console)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self._async.checkpoints)

    def __repr__(self) -> str:
        return repr(self._async).replace("Async", "", 1)

    @classmethod
    def create(
        cls,
        environment: str | SandboxSpec,
        *,
        client: Client | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Sandbox:
        """Make a sandbox of an environment's name or a spec; `fields` are those of `SandboxSpec` and win over the
        spec's.

        Returns when it runs. With the field `name`: the live sandbox of this name (within `run`) is returned where
        there is one. `client`: whose server (None: the default one). `key`: idempotency key; the same key and spec
        again returns the same sandbox. `deadline_s`: how long the server waits for capacity and creation.

        Raises `EnvironmentNotFound`, `InvalidRequest`, `Unsupported`, `Conflict` (the name or key has another spec),
        `QuotaExceeded`, `AdmissionTimeout`, `CreateFailed`, `Unauthenticated`, `Unavailable`, `RequestTimeout`.
        """
        return Sandbox(
            call(
                AsyncSandbox.create(
                    environment,
                    client=unwrap(client),
                    key=key,
                    deadline_s=deadline_s,
                    request_timeout_s=request_timeout_s,
                    **fields,
                )
            )
        )

    @classmethod
    def create_many(
        cls,
        specs: SandboxSpec | str | Iterable[SandboxSpec | str],
        *,
        count: int | None = None,
        client: Client | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Iterator[CreateResult[Sandbox]]:
        """Make many sandboxes: yields a `CreateResult` for each as it is ready, with a sandbox or an error.

        `specs`: one for each, or one (spec or environment's name) and a `count`. `fields`: laid over each. `key`:
        idempotency key of the whole; the same key and specs again give the same sandboxes, so that a process that was
        restarted goes on with them. The rest: see `create`. Raises what is wrong with the request as a whole; leaving
        the loop stops nothing.
        """
        for item in iterate(
            AsyncSandbox.create_many(
                specs,
                count=count,
                client=unwrap(client),
                key=key,
                deadline_s=deadline_s,
                request_timeout_s=request_timeout_s,
                **fields,
            )
        ):
            sandbox = Sandbox(item.sandbox) if item.sandbox is not None else None
            yield CreateResult(item.index, sandbox, item.error)

    @classmethod
    def connect(
        cls, sandbox_id: str, *, client: Client | None = None, request_timeout_s: float | None = None
    ) -> Sandbox:
        """The sandbox of an id, made by this process or another. Raises `SandboxNotFound`; an ended one says why in
        `info`."""
        return Sandbox(
            call(AsyncSandbox.connect(sandbox_id, client=unwrap(client), request_timeout_s=request_timeout_s))
        )

    @classmethod
    def list(
        cls,
        *,
        states: Sequence[State | str] = (),
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        client: Client | None = None,
        request_timeout_s: float | None = None,
    ) -> list[SandboxInfo]:
        """The project's sandboxes, at most `limit` (None: all). No `states`: all but ended ones."""
        return call(
            AsyncSandbox.list(
                states=states,
                run=run,
                labels=labels,
                limit=limit,
                client=unwrap(client),
                request_timeout_s=request_timeout_s,
            )
        )

    @classmethod
    def kill_many(
        cls,
        sandboxes: Iterable[str | Sandbox | SandboxInfo],
        *,
        cause: Cause = Cause.DELETED,
        client: Client | None = None,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError]:
        """End many sandboxes; returns the errors by id, empty where all went well (an unknown one is an error, an
        ended one not)."""
        return call(
            AsyncSandbox.kill_many(
                unwrap_each(sandboxes), cause=cause, client=unwrap(client), request_timeout_s=request_timeout_s
            )
        )

    def refresh(self, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Ask the server about it; updates `info`."""
        return call(self._async.refresh(request_timeout_s=request_timeout_s))

    def kill(self, *, cause: Cause = Cause.DELETED, request_timeout_s: float | None = None) -> SandboxInfo:
        """End it; returns when nothing of it is left. Again: the same answer."""
        return call(self._async.kill(cause=cause, request_timeout_s=request_timeout_s))

    def renew(self, ttl_s: float | None, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Let it live `ttl_s` from now (None: for ever)."""
        return call(self._async.renew(ttl_s, request_timeout_s=request_timeout_s))

    def pause(self, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Freeze it and give its memory back. Its TTLs and timeouts stand still, and any request that needs it resumes
        it. Needs an API key."""
        return call(self._async.pause(request_timeout_s=request_timeout_s))

    def resume(self, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Let it go on. Raises `Conflict` where a tripwire paused it. Needs an API key."""
        return call(self._async.resume(request_timeout_s=request_timeout_s))

    def fork(
        self, count: int = 1, *, deadline_s: float | None = None, request_timeout_s: float | None = None
    ) -> Sequence[Sandbox]:
        """Children that begin with its files as they are now and with its spec (but `name` and `hostname`), all of them
        or none: each with an id, host name, machine id and tokens of its own. A container's child has new processes;
        a microVM's goes on with all that runs in its parent, its commands (`commands.attach`) too. It may be paused,
        and stays so. Not repeated where the connection breaks (`OutcomeUnknown`). Needs an API
        key."""
        return [
            Sandbox(each)
            for each in call(self._async.fork(count, deadline_s=deadline_s, request_timeout_s=request_timeout_s))
        ]

    def pack_diff(
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
        return call(
            self._async.pack_diff(
                name,
                scrub=scrub,
                remove=remove,
                keep=keep,
                description=description,
                readers=readers,
                request_timeout_s=request_timeout_s,
            )
        )

    def screenshot(self, *, request_timeout_s: float | None = None) -> bytes:
        """Its screen as a PNG. Raises `Unsupported` where it has none, as the following do."""
        return call(self._async.screenshot(request_timeout_s=request_timeout_s))

    def click(
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
        return call(self._async.click(x, y, button=button, count=count, request_timeout_s=request_timeout_s))

    def scroll(self, x: int, y: int, lines: int, *, request_timeout_s: float | None = None) -> None:
        """Turn the mouse's wheel at a pixel of the screen; below 0: upwards. Raises as `click`."""
        return call(self._async.scroll(x, y, lines, request_timeout_s=request_timeout_s))

    def type(self, text: str, *, request_timeout_s: float | None = None) -> None:
        """Type on its (US) keyboard; a newline is the enter key. Raises `InvalidRequest` for what isn't on it."""
        return call(self._async.type(text, request_timeout_s=request_timeout_s))

    def press(self, keys: str, *, request_timeout_s: float | None = None) -> None:
        """Press keys together: `enter`, `ctrl-l`, `alt-f4`. Raises `InvalidRequest` for one that doesn't exist."""
        return call(self._async.press(keys, request_timeout_s=request_timeout_s))

    def usage(self, *, request_timeout_s: float | None = None) -> Usage:
        """Its counters now: CPU, memory, processes, disk."""
        return call(self._async.usage(request_timeout_s=request_timeout_s))

    def verify(
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
        return call(
            self._async.verify(grader, paths=paths, repeats=repeats, request_timeout_s=request_timeout_s, **fields)
        )

    def tripwires(self, *, request_timeout_s: float | None = None) -> TripwireState:
        """What its tripwires are, how often each was hit, and whether one has paused it. Needs an API key."""
        return call(self._async.tripwires(request_timeout_s=request_timeout_s))

    def resume_tripwires(self, *, request_timeout_s: float | None = None) -> TripwireState:
        """Let it go on after a tripwire paused it. Raises `Conflict` where none did. Needs an API key."""
        return call(self._async.resume_tripwires(request_timeout_s=request_timeout_s))

    def events(self, *, after: int = 0, follow: bool = False) -> Iterator[SandboxEvent]:
        """What happened to it, oldest first, from above the number `after` on: its making with the time of each phase,
        its commands and file calls, limits that were met, its end. `follow`: also what is still to happen, until it has
        ended, over as many connections as it takes. Raises `SandboxNotFound`."""
        return iterate(self._async.events(after=after, follow=follow))

    def trajectory(self, *, after: int = 0, follow: bool = False) -> Iterator[Entry]:
        """What was done to it and what came of it, from above the number `after` on, as a chain of hashes that
        `dsec.spec.trajectory.check` checks. `follow`: also what is still to come, until it has ended, over as many
        connections as it takes. Also of an ended one, while its record is kept. Raises `SandboxNotFound`."""
        return iterate(self._async.trajectory(after=after, follow=follow))

    def get_host(self, port: int) -> str:
        """The host name at which the server serves a port inside; see `ports.get_host`."""
        return call(self._async.get_host(port))

    def url(self, port: int, *, token: bool = False) -> str:
        """The URL of a port inside; see `ports.url`."""
        return call(self._async.url(port, token=token))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: Raised | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return call(self._async.__aexit__(kind, error, trace))

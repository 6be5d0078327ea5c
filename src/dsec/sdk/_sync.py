"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from dsec.errors import DsecError
from dsec.ports import Usage
from dsec.sdk._client import AsyncClient, Keys, Layers
from dsec.sdk._portal import Wrapper, call, iterate, unwrap, unwrap_each
from dsec.sdk._results import CreateResult, RunResult
from dsec.sdk._sandbox import AsyncRun, AsyncSandbox
from dsec.sdk._sync_catalog import Catalog
from dsec.sdk._sync_inside import Commands, Files, Ports
from dsec.sdk._sync_sessions import NetworkAccess, Sessions
from dsec.sdk._transport import RETRY_S
from dsec.spec.causes import Cause
from dsec.spec.events import SandboxEvent
from dsec.spec.network import KeyPolicy
from dsec.spec.sandbox import ExecSpec, SandboxInfo, SandboxSpec, State
from dsec.spec.tripwires import TripwireState


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

    def usage(self, *, request_timeout_s: float | None = None) -> Usage:
        """Its counters now: CPU, memory, processes, disk."""
        return call(self._async.usage(request_timeout_s=request_timeout_s))

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

    def get_host(self, port: int) -> str:
        """The host name at which the server serves a port inside; see `ports.get_host`."""
        return call(self._async.get_host(port))

    def url(self, port: int, *, token: bool = False) -> str:
        """The URL of a port inside; see `ports.url`."""
        return call(self._async.url(port, token=token))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return call(self._async.__aexit__(kind, error, trace))


class Run(Wrapper):
    """A training or evaluation job: sandboxes that are found again by name, by any process."""

    _async: AsyncRun

    def __init__(self, inner: AsyncRun) -> None:
        """Not for callers."""
        self._async = inner

    @property
    def name(self) -> str:
        return self._async.name

    def sandbox(
        self,
        name: str,
        environment: str | SandboxSpec,
        *,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Sandbox:
        """The live sandbox of this name in this run, or a new one. Raises `Conflict` where it exists with another
        spec; else as `Sandbox.create`."""
        return Sandbox(
            call(
                self._async.sandbox(
                    name, environment, deadline_s=deadline_s, request_timeout_s=request_timeout_s, **fields
                )
            )
        )

    def list(
        self,
        *,
        states: Sequence[State | str] = (),
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        request_timeout_s: float | None = None,
    ) -> list[SandboxInfo]:
        """The run's sandboxes; see `Sandbox.list`."""
        return call(self._async.list(states=states, labels=labels, limit=limit, request_timeout_s=request_timeout_s))

    def kill(self, *, request_timeout_s: float | None = None) -> dict[str, DsecError]:
        """End all of the run's sandboxes; returns the errors by id."""
        return call(self._async.kill(request_timeout_s=request_timeout_s))


class Client(Wrapper):
    """A dsec server. Cheap to keep, to be shared by all threads; connections are pooled without a limit.

    `url`, `api_key`: None: from DSEC_URL and DSEC_API_KEY, else the `client.json` that `dsec serve` wrote on this
    machine. `retry_s`: for how long broken connections, overload and a restarting server are retried, always with the
    same idempotency key; the first request to a server that isn't there fails at once.
    """

    _async: AsyncClient

    def __init__(self, url: str | None = None, api_key: str | None = None, *, retry_s: float = RETRY_S) -> None:
        self._async = AsyncClient(url, api_key, retry_s=retry_s)

    @property
    def catalog(self) -> Catalog:
        """Layers and environments."""
        return Catalog(self._async.catalog)

    @property
    def url(self) -> str:
        """The server's."""
        return self._async.url

    def create(
        self,
        environment: str | SandboxSpec,
        *,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Sandbox:
        """Make a sandbox; see `Sandbox.create`."""
        return Sandbox(
            call(
                self._async.create(
                    environment, key=key, deadline_s=deadline_s, request_timeout_s=request_timeout_s, **fields
                )
            )
        )

    def create_many(
        self,
        specs: SandboxSpec | str | Iterable[SandboxSpec | str],
        *,
        count: int | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Iterator[CreateResult[Sandbox]]:
        """Make many sandboxes, yielding each as it is ready; see `Sandbox.create_many`."""
        for item in iterate(
            self._async.create_many(
                specs, count=count, key=key, deadline_s=deadline_s, request_timeout_s=request_timeout_s, **fields
            )
        ):
            sandbox = Sandbox(item.sandbox) if item.sandbox is not None else None
            yield CreateResult(item.index, sandbox, item.error)

    def connect(self, sandbox_id: str, *, request_timeout_s: float | None = None) -> Sandbox:
        """The sandbox of an id; see `Sandbox.connect`."""
        return Sandbox(call(self._async.connect(sandbox_id, request_timeout_s=request_timeout_s)))

    def find(self, name: str, *, run: str | None = None, request_timeout_s: float | None = None) -> Sandbox:
        """The live sandbox of a name. Raises `SandboxNotFound`."""
        return Sandbox(call(self._async.find(name, run=run, request_timeout_s=request_timeout_s)))

    def run(self, name: str) -> Run:
        """A run by its name: its sandboxes are made and found by names of their own. Asks the server nothing."""
        return Run(self._async.run(name))

    def list(
        self,
        *,
        states: Sequence[State | str] = (),
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        request_timeout_s: float | None = None,
    ) -> list[SandboxInfo]:
        """The project's sandboxes; see `Sandbox.list`."""
        return call(
            self._async.list(states=states, run=run, labels=labels, limit=limit, request_timeout_s=request_timeout_s)
        )

    def kill(self, sandbox_id: str, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """End a sandbox; again: the same answer. Raises `SandboxNotFound`."""
        return call(self._async.kill(sandbox_id, request_timeout_s=request_timeout_s))

    def kill_many(
        self,
        sandboxes: Iterable[str | Sandbox | SandboxInfo],
        *,
        cause: Cause = Cause.DELETED,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError]:
        """End many sandboxes; returns the errors by id; see `Sandbox.kill_many`."""
        return call(self._async.kill_many(unwrap_each(sandboxes), cause=cause, request_timeout_s=request_timeout_s))

    def pause_many(
        self,
        sandboxes: Iterable[str | Sandbox | SandboxInfo] = (),
        *,
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError | None]:
        """Pause many sandboxes in one call: those given, or all running ones of a run and with these labels. Returns
        what became of each: None, or why it could not be paused."""
        return call(
            self._async.pause_many(unwrap_each(sandboxes), run=run, labels=labels, request_timeout_s=request_timeout_s)
        )

    def resume_many(
        self,
        sandboxes: Iterable[str | Sandbox | SandboxInfo] = (),
        *,
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError | None]:
        """Let many paused sandboxes go on; as `pause_many`."""
        return call(
            self._async.resume_many(unwrap_each(sandboxes), run=run, labels=labels, request_timeout_s=request_timeout_s)
        )

    def run_many(
        self,
        commands: Iterable[tuple[Sandbox, str | Sequence[str] | ExecSpec]],
        *,
        request_timeout_s: float | None = None,
    ) -> Iterator[RunResult]:
        """Run a command in each of many sandboxes, by one request: yields a `RunResult` for each as it ends, with a
        result or an error.

        A command is argv, a str for the shell, or an `ExecSpec` (without `stdin`) whose `key`, if it has one, is an
        idempotency key as in `commands.run`. A connection that breaks is made again, and nothing runs twice. Leaving
        the loop stops nothing. Raises what is wrong with the request as a whole.
        """
        return iterate(self._async.run_many(unwrap_each(commands), request_timeout_s=request_timeout_s))

    def environments(self, *, request_timeout_s: float | None = None) -> dict[str, Layers]:
        """Environments that sandboxes can be made of, with their layers, top first."""
        return call(self._async.environments(request_timeout_s=request_timeout_s))

    def node(self, *, request_timeout_s: float | None = None) -> dict[str, Any]:
        """Facts and counts of the server's node."""
        return call(self._async.node(request_timeout_s=request_timeout_s))

    def create_key(
        self, label: str = "", *, policy: KeyPolicy | None = None, request_timeout_s: float | None = None
    ) -> str:
        """A further API key of this project; it is not shown again. `policy`: what it may grant sandboxes to reach, at
        most what this client's key may (None: the same). Not repeated where the connection breaks
        (`OutcomeUnknown`)."""
        return call(self._async.create_key(label, policy=policy, request_timeout_s=request_timeout_s))

    def list_keys(self, *, request_timeout_s: float | None = None) -> Keys:
        """The project's API keys: `id`, `label`, `created_at`, `revoked_at`; not the keys themselves."""
        return call(self._async.list_keys(request_timeout_s=request_timeout_s))

    def revoke_key(self, key_id: str, *, request_timeout_s: float | None = None) -> None:
        """Revoke an API key by its id. Raises `NotFound`."""
        return call(self._async.revoke_key(key_id, request_timeout_s=request_timeout_s))

    def close(self) -> None:
        """Close the connections; sandboxes and commands go on. Idempotent. Connections of a client that nobody closed
        are closed when the event loop ends."""
        return call(self._async.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return call(self._async.__aexit__(kind, error, trace))

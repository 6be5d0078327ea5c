"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from dsec.errors import DsecError
from dsec.sdk._client import AsyncClient, Keys, Layers
from dsec.sdk._judging import Cases, JudgeResult, OnCase
from dsec.sdk._portal import Wrapper, call, iterate, unwrap_each
from dsec.sdk._results import CreateResult, RunResult
from dsec.sdk._run import AsyncRun
from dsec.sdk._sync_catalog import Catalog, Function, Nodes, Rights
from dsec.sdk._sync_sandbox import Sandbox
from dsec.sdk._transport import RETRY_S
from dsec.spec.causes import Cause
from dsec.spec.functions import FunctionSpec
from dsec.spec.judging import CaseVerdict, Judged, JudgeSpec, JudgeVerdict
from dsec.spec.network import KeyPolicy
from dsec.spec.runs import OnLapse, RunInfo
from dsec.spec.sandbox import ExecSpec, SandboxInfo, SandboxSpec, State
from dsec.spec.trajectory import Rebuilt


class Run(Wrapper):
    """A training or evaluation job: sandboxes that are found again by name, by any process.

    With a lease (`lease_s`), opened by `with`, `open` or the first call: the server applies `on_lapse` to all of
    the run's sandboxes when nobody has renewed the lease for so long. This object renews it in the background, and what
    is asked through it and its sandboxes is refused (`RunFenced`) once another process has opened the run. Leaving
    `with` ends the renewals and nothing else.
    """

    _async: AsyncRun

    def __init__(self, inner: AsyncRun) -> None:
        """Not for callers."""
        self._async = inner

    @property
    def name(self) -> str:
        return self._async.name

    @property
    def info(self) -> RunInfo | None:
        """As the server last said; None: without a lease, or not open yet."""
        return self._async.info

    @property
    def epoch(self) -> int | None:
        """Of this client; None: without a lease, or not open yet."""
        return self._async.epoch

    def open(self, *, request_timeout_s: float | None = None) -> RunInfo | None:
        """Begin a new epoch of the run (once) and renew its lease from now on; None for a run without a lease."""
        return call(self._async.open(request_timeout_s=request_timeout_s))

    def renew(self, *, request_timeout_s: float | None = None) -> RunInfo:
        """Renew the lease now. Raises `RunFenced`, and `NotFound` where the run has no lease."""
        return call(self._async.renew(request_timeout_s=request_timeout_s))

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
        spec, `RunFenced`; else as `Sandbox.create`."""
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

    def pause(self, *, request_timeout_s: float | None = None) -> dict[str, DsecError | None]:
        """Pause all of the run's running sandboxes; see `client.pause_many`."""
        return call(self._async.pause(request_timeout_s=request_timeout_s))

    def kill(self, *, request_timeout_s: float | None = None) -> dict[str, DsecError]:
        """End all of the run's sandboxes; returns the errors by id."""
        return call(self._async.kill(request_timeout_s=request_timeout_s))

    def close(self) -> None:
        """Renew the lease no more: without another client of this epoch it lapses. Idempotent."""
        return call(self._async.close())

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return call(self._async.__aexit__(kind, error, trace))


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
    def rights(self) -> Rights:
        """Projects, roles and keys of a cluster."""
        return Rights(self._async.rights)

    @property
    def nodes(self) -> Nodes:
        """A cluster's nodes."""
        return Nodes(self._async.nodes)

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

    def run(self, name: str, *, lease_s: float | None = None, on_lapse: OnLapse = "pause") -> Run:
        """A run by its name: its sandboxes are made and found by names of their own.

        `lease_s`: it has a lease, renewed in the background by this process; it is opened, which begins a new epoch and
        fences off the clients of earlier ones, by `with` or the first call. `on_lapse`: what becomes of all its
        sandboxes when nobody renews it: `pause`, `stop` or `keep`."""
        return Run(self._async.run(name, lease_s=lease_s, on_lapse=on_lapse))

    def attach_run(self, name: str, *, request_timeout_s: float | None = None) -> Run:
        """A run that has a lease, as one more client of its current epoch: its sandboxes are found again, and its lease
        is renewed. Raises `NotFound`."""
        return Run(call(self._async.attach_run(name, request_timeout_s=request_timeout_s)))

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

    def rebuild(
        self,
        sandbox_id: str,
        *,
        upto: int | None = None,
        stop: bool = False,
        from_start: bool = False,
        request_timeout_s: float | None = None,
    ) -> Rebuilt:
        """Make a sandbox again, under another id, from its trajectory: what its callers did is done again (entries up
        to the number `upto`) and compared; `diverged` says where outcomes first differ. `stop`: end there. It
        begins from the last snapshot that was taken of everything (`scrub=False`) while nothing ran inside, unless
        `from_start`. Connect to `rebuilt.sandbox.id`; keys of commands have their results there too. Not repeated where
        the connection breaks (`OutcomeUnknown`)."""
        return call(
            self._async.rebuild(
                sandbox_id, upto=upto, stop=stop, from_start=from_start, request_timeout_s=request_timeout_s
            )
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

    def function(self, target: Callable[..., Any] | str | FunctionSpec, name: str = "", **fields: Any) -> Function:
        """A function to be called on the server's side, each call in a fresh, jailed process.

        `target`: a function, of which its source is taken (it sees none of the names around it here); a source, with
        the `name` in it that is called, or without one a program that each call runs; or `module:name` of the
        environment's own. `fields` are those of `FunctionSpec`: `environment`, `imports` (modules that are there
        already when a call begins), `language`, `files`, `take`, `limits` and so on. Raises `InvalidRequest`.
        """
        return Function(self._async.function(target, name, **fields))

    def judge(
        self,
        source: str | JudgeSpec,
        cases: Cases = (),
        *,
        on_case: OnCase | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Judged:
        """Judge a program by test cases: `Case`s, or pairs of stdin and what is expected. `fields` are those of
        `JudgeSpec`: `language`, `environment`, `checker`, `limits`, `stop_early` and so on; or pass a whole one.

        Safe to repeat: a connection that breaks is made again and the submission judged again. Cancelling it ends what
        runs. Raises `InvalidRequest`, `EnvironmentNotFound`, `Unsupported` (no such toolchain there)."""
        return call(self._async.judge(source, cases, on_case=on_case, request_timeout_s=request_timeout_s, **fields))

    def judge_stream(
        self, source: str | JudgeSpec, cases: Cases = (), **fields: Any
    ) -> Iterator[CaseVerdict | JudgeVerdict]:
        """As `judge`: the cases' verdicts as they come, the submission's last. Leaving the loop ends what runs."""
        return iterate(self._async.judge_stream(source, cases, **fields))

    def judge_many(self, specs: Iterable[JudgeSpec], *, at_once: int = 16) -> Iterator[JudgeResult]:
        """Judge many submissions, `at_once` at a time; yields a `JudgeResult` for each as it ends, with its verdicts or
        an error. Leaving the loop ends what runs."""
        return iterate(self._async.judge_many(specs, at_once=at_once))

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

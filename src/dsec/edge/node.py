"""The edge of one node: `EdgeClient` in process, put together from the parts of this package.

Owns nothing but the composition and the order of opening and closing. Make one with `Edge.open`, end it with `close`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

from dsec.channel import streams
from dsec.edge.access import Access, no_sandbox
from dsec.edge.client import ApiKey, Created, DeleteItem, NodeInfo, Page, Principal
from dsec.edge.clustered import Clustered
from dsec.edge.commands import Commands, RunningCommand
from dsec.edge.config import Capacity, EdgeConfig, HostCapacity, SystemClock
from dsec.edge.events import Events
from dsec.edge.filing import FileCalls
from dsec.edge.forks import Forks
from dsec.edge.kept import BatchItem
from dsec.edge.kept_calls import KeptCalls
from dsec.edge.listing import list_page
from dsec.edge.lives import Lives
from dsec.edge.naming import Naming
from dsec.edge.network import Networks
from dsec.edge.notes import Notes
from dsec.edge.observed import Readiness
from dsec.edge.observer import Observer
from dsec.edge.pauses import Pauses
from dsec.edge.quick import QuickCommand
from dsec.edge.rebuild import Replay, chain_of, networks_of, starts_of
from dsec.edge.recorded import RecordedCommand
from dsec.edge.recording import Recording
from dsec.edge.removal import delete_each
from dsec.edge.requests import scope_of
from dsec.edge.runs import Runs
from dsec.edge.sandbox import info_of
from dsec.edge.screens import ScreenCalls
from dsec.edge.settling import end_all, settle
from dsec.edge.silent import Silent
from dsec.edge.specs import resolve
from dsec.edge.stillness import Stillness
from dsec.edge.streams import HeldStream, HeldWatch, hold_stream, hold_watch
from dsec.edge.tally import Family
from dsec.edge.tasks import Tasks, log
from dsec.edge.trajectory import Trajectories
from dsec.edge.tripwires import Tripwires
from dsec.egress.node import Egress
from dsec.errors import InvalidRequest, NotFound, OutcomeUnknown, SandboxEnded, SandboxLost, Unavailable, Unsupported
from dsec.journal.event_store import EventStore
from dsec.journal.records import Journal
from dsec.journal.run_store import RunStore
from dsec.journal.state_dir import StateDir
from dsec.journal.trajectory import TrajectoryStore
from dsec.plan.permissions import BUILT_IN
from dsec.ports import Backend, Clock, GuestChannel, Usage
from dsec.spec.causes import Cause
from dsec.spec.events import SandboxEvent
from dsec.spec.network import KeyPolicy, Network, NetworkInfo
from dsec.spec.sandbox import ExecSpec, ProcessInfo, SandboxInfo, SandboxSpec, State
from dsec.spec.trajectory import RebuildRequest, Rebuilt
from dsec.spec.tripwires import TripwireState

BACKEND_API = 1
_END_CAUSES = frozenset({Cause.DELETED, Cause.SHUTDOWN, Cause.LEASE_LAPSED, Cause.PLATFORM_KILLED})


class Edge(KeptCalls, FileCalls, ScreenCalls, Clustered):
    """One node's agent. Every method is described in `dsec.edge.client.EdgeClient`."""

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        state: StateDir,
        journal: Journal,
        events: Events,
        trajectories: Trajectories,
        clock: Clock,
        config: EdgeConfig,
        capacity: Capacity,
        tasks: Tasks,
        egress: Egress,
        key_policy: KeyPolicy,
    ) -> None:
        """Use `open`."""
        self._backends = dict(backends)
        self._state = state
        self._journal = journal
        self._clock = clock
        self._config = config
        self._tasks = tasks
        self._events = events
        self._notes = Notes(events, trajectories)
        self._trajectories = trajectories
        self.egress = egress
        self._networks = Networks(egress=egress, journal=journal, notes=self._notes, connect=self._connect_named)
        self._tripwires = Tripwires(events, state.key)
        self._lives = Lives(
            backends=self._backends,
            journal=journal,
            clock=clock,
            config=config,
            capacity=capacity,
            tasks=tasks,
            tenant=state.tenant,
            notes=self._notes,
            networks=self._networks,
            tripwires=self._tripwires,
        )
        self._pauses = Pauses(lives=self._lives, journal=journal, clock=clock, tasks=tasks)
        self._runs = Runs(
            store=RunStore(state.path / "runs.db"), lives=self._lives, pauses=self._pauses, clock=clock, tasks=tasks
        )
        self._tripwires.serve(
            self._lives.sandboxes, end=self._lives.end, pause=self._pauses.pause, resume=self._pauses.resume
        )
        self.used_layers = self._lives.used_layers
        self.still = Stillness(self._live).hold
        self._naming = Naming(
            lives=self._lives,
            backends=self._backends,
            journal=journal,
            state=state,
            clock=clock,
            config=config,
            tasks=tasks,
        )
        recording = Recording(trajectories, config)
        self._commands = Commands(lives=self._lives, clock=clock, config=config, tasks=tasks, recording=recording)
        self._forks = Forks(lives=self._lives, naming=self._naming, tasks=tasks, adopt=self._commands.adopt)
        self._observer = Observer(lives=self._lives, backends=self._backends)
        self._access = Access(journal, clock, self._record, state.key, registry=egress.registry, policy=key_policy)
        self._started_at = clock.now()
        self._open = False

    @classmethod
    async def open(
        cls,
        backends: Mapping[str, Backend],
        state_dir: Path | StateDir,
        *,
        clock: Clock | None = None,
        config: EdgeConfig | None = None,
        capacity: Capacity | None = None,
        edge_number: int | None = None,
        egress: Egress | None = None,
        key_policy: KeyPolicy | None = None,
    ) -> Edge:
        """Lock the state (unless it is handed in locked), recover what is on record, serve. `backends`: by the name
        that specs use. `egress`: the sandboxes' way out, closed with the edge (None: without gateways).
        `key_policy`: of API keys that have none of their own.

        Raises `Unavailable` where another server has the state, `Internal` where it is damaged or of a newer version,
        and what the backends' `open` raises.
        """
        for backend in backends.values():
            if backend.api_version != BACKEND_API:
                raise Unsupported(
                    f"the backend {backend.name!r} has API version {backend.api_version}, this edge speaks "
                    f"{BACKEND_API}"
                )
        async with AsyncExitStack() as undo:
            state = state_dir if isinstance(state_dir, StateDir) else StateDir(state_dir, edge=edge_number)
            undo.callback(state.close)
            config = config or EdgeConfig()
            journal = Journal(state.path / "edge.db", keep_s=config.keep_ended_s, lasting=config.lasting_records)
            undo.push_async_callback(journal.close)
            clock = clock or SystemClock()
            events = Events(EventStore(state.path / "events.db"), clock)
            undo.callback(events.close)
            trajectories = Trajectories(TrajectoryStore(state.path / "trajectory"), clock, config)
            undo.push_async_callback(trajectories.close)
            tasks = Tasks()
            undo.push_async_callback(tasks.close)
            edge = cls(
                backends=backends,
                state=state,
                journal=journal,
                events=events,
                trajectories=trajectories,
                clock=clock,
                config=config,
                capacity=capacity or HostCapacity(state.path),
                tasks=tasks,
                egress=egress or Egress(definitions=BUILT_IN),
                key_policy=key_policy or KeyPolicy(),
            )
            undo.push_async_callback(edge._networks.close)
            for sandbox in await edge._lives.recover():
                edge._commands.adopt(sandbox)
                await edge._networks.adopt(sandbox)
                await edge._tripwires.adopt(sandbox)
            edge._runs.start()
            tasks.spawn(Silent(lives=edge._lives, clock=clock, config=config, tasks=tasks).watch())
            edge._open = True
            undo.pop_all()
        return edge

    async def close(self, *, keep: bool) -> None:
        """Stop serving. `keep`: sandboxes go on for the next incarnation; else all are ended (`shutdown`).
        Idempotent."""
        if not self._open:
            return
        self._open = False
        async with AsyncExitStack() as stack:  # reverse order; each step runs even if one before it failed
            stack.callback(self._state.close)
            stack.push_async_callback(self._journal.close)
            stack.callback(self._events.close)
            stack.callback(self._runs.close)
            stack.push_async_callback(self._trajectories.close)
            for backend in self._backends.values():
                stack.push_async_callback(backend.close, keep=keep)
            stack.push_async_callback(self._tasks.close)
            stack.push_async_callback(self._networks.close)
            stack.callback(self._tripwires.close)
            await settle(self._lives, self._config.create_timeout_s)
            if keep:
                for sandbox in self._lives.sandboxes.values():
                    if sandbox.instance is not None:
                        await sandbox.instance.channel.close()
            elif not await end_all(self._lives, Cause.SHUTDOWN, self._config.shutdown_timeout_s):
                log.warning("%d sandboxes were still there at shutdown", len(self._lives.sandboxes))

    # --- who ---

    def authenticate(self, bearer: str) -> Principal:
        return self._access.authenticate(bearer)

    def authorize(self, principal: Principal, sandbox_id: str) -> None:
        self._access.authorize(principal, sandbox_id)

    def access_token(self, sandbox_id: str) -> str:
        if self._record(sandbox_id) is None:
            raise no_sandbox(sandbox_id)
        return self._access.access_token(sandbox_id)

    def traffic_token(self, sandbox_id: str) -> str:
        if self._record(sandbox_id) is None:
            raise no_sandbox(sandbox_id)
        return self._access.traffic_token(sandbox_id)

    def check_grants(self, principal: Principal, network: Network | None) -> None:
        self._access.check_grants(principal, network)

    async def create_key(
        self, project: str, label: str = "", policy: KeyPolicy | None = None, *, by: Principal | None = None
    ) -> str:
        return await self._access.create_key(project, label, policy, by)

    async def revoke_key(self, key_id: str) -> None:
        await self._access.revoke_key(key_id)

    def list_keys(self, project: str | None = None) -> list[ApiKey]:
        return self._access.list_keys(project)

    # --- sandboxes ---

    async def create(
        self, spec: SandboxSpec, *, project: str, deadline_s: float | None = None, key: str | None = None
    ) -> Created:
        self._check_open()
        return await self._naming.create(spec, project, deadline_s, key)

    async def create_many(
        self, specs: Sequence[SandboxSpec], *, project: str, deadline_s: float | None = None, key: str | None = None
    ) -> AsyncGenerator[BatchItem, None]:
        self._check_open()
        async with aclosing(self._naming.create_many(specs, project, deadline_s, key)) as items:
            async for item in items:
                yield item

    def get(self, sandbox_id: str) -> SandboxInfo:
        record = self._record(sandbox_id)
        if record is None:
            raise no_sandbox(sandbox_id)
        return info_of(record)

    def find_named(self, project: str, run: str | None, name: str) -> SandboxInfo:
        sandbox = self._lives.names.get((project, run or "", name))
        if sandbox is None or sandbox.state in (State.ENDING, State.ENDED):
            raise no_sandbox(f"named {name!r}")
        return sandbox.info()

    async def list_sandboxes(
        self,
        project: str,
        *,
        states: Sequence[State] = (),
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        return await list_page(
            self._lives, self._journal, project, states=states, run=run, labels=labels or {}, limit=limit, after=after
        )

    async def renew(self, sandbox_id: str, ttl_s: float | None) -> SandboxInfo:
        if ttl_s is not None and not 0 < ttl_s <= 366 * 86400:
            raise InvalidRequest("ttl_s is more than 0 and at most 366 days", field="ttl_s")
        sandbox = self._live(sandbox_id)
        durable = self._lives.renew(sandbox, ttl_s)
        info = sandbox.info()
        await durable
        return info

    async def delete(self, sandbox_id: str, cause: Cause = Cause.DELETED, message: str = "") -> SandboxInfo:
        if cause not in _END_CAUSES:
            raise InvalidRequest(
                f"{cause.value!r} is not a cause for a deletion",
                remedy=f"Use one of: {', '.join(sorted(_END_CAUSES))}.",
                field="cause",
            )
        sandbox = self._lives.sandboxes.get(sandbox_id)
        if sandbox is None:
            return self.get(sandbox_id)
        self._check_open()
        return await asyncio.shield(self._lives.end(sandbox, cause, message[:1000]))

    async def delete_many(
        self, sandbox_ids: Sequence[str], *, project: str, cause: Cause = Cause.DELETED
    ) -> list[DeleteItem]:
        async def one(sandbox_id: str) -> None:
            self.authorize(Principal(project), sandbox_id)
            await self.delete(sandbox_id, cause)

        return await asyncio.shield(self._tasks.spawn(delete_each(list(sandbox_ids), one)))

    def usage(self, sandbox_id: str) -> Usage:
        return self._live(sandbox_id).here().usage()

    def promise(self, change_bytes: int) -> None:
        """Memory for what is no sandbox: more, or less than before. Raises `Unsupported` for what can never fit."""
        self._lives.gate.promise(change_bytes)

    def node(self) -> NodeInfo:
        gate, lives = self._lives.gate, self._lives
        return NodeInfo(
            edge=self._state.edge,
            backends={name: backend.epoch for name, backend in self._backends.items()},
            live=gate.live,
            starting=gate.starting,
            queued=gate.queued,
            ending=lives.removals.pending,
            max_live=gate.limits.max_live,
            max_starting=gate.limits.max_starting,
            memory_committed_bytes=gate.committed_bytes,
            memory_capacity_bytes=gate.limits.memory_capacity_bytes,
            disk_free_bytes=gate.capacity.disk_free_bytes(),
            started_at=self._started_at,
            created_total=lives.created_total,
            failed_total=lives.failed_total,
            stuck=lives.stuck,
            features=sorted(self._config.features),
        )

    # --- network ---

    def network(self, sandbox_id: str) -> NetworkInfo:
        return self._networks.info(self._live(sandbox_id))

    async def set_network(self, sandbox_id: str, network: Network, *, merge: bool = False) -> NetworkInfo:
        self._check_open()
        return await asyncio.shield(
            self._tasks.spawn(self._networks.change(self._live(sandbox_id), network, merge=merge))
        )

    async def _connect_named(self, project: str, run: str, name: str, port: int) -> HeldStream:
        return await self.connect(self.find_named(project, run or None, name).id, port)

    # --- seeing inside ---

    def metrics(self) -> list[Family]:
        return self._observer.metrics(self.node())

    async def ready(self) -> Readiness:
        return await self._observer.ready(serving=self._open)

    def events(self, sandbox_id: str, after: int = 0) -> list[SandboxEvent]:
        self.get(sandbox_id)
        return self._events.read(sandbox_id, after)

    async def follow_events(self, sandbox_id: str, after: int = 0) -> AsyncGenerator[SandboxEvent, None]:
        self.get(sandbox_id)
        async with aclosing(self._events.follow(sandbox_id, after)) as events:
            async for event in events:
                yield event

    def trajectory(self, sandbox_id: str, after: int = 0) -> Iterator[bytes]:
        self.get(sandbox_id)
        return self._trajectories.read(sandbox_id, after)

    async def follow_trajectory(self, sandbox_id: str, after: int = 0) -> AsyncGenerator[bytes, None]:
        self.get(sandbox_id)
        async with aclosing(self._trajectories.follow(sandbox_id, after)) as lines:
            async for line in lines:
                yield line

    async def rebuild(self, request: RebuildRequest, principal: Principal) -> Rebuilt:
        self._check_open()
        entries = chain_of(list(self.trajectory(request.sandbox)), request.sandbox)
        for network in networks_of(entries):
            self.check_grants(principal, network)
        blob = functools.partial(self._trajectories.store.blob, request.sandbox)
        restore = functools.partial(self._trajectories.restore, blob)
        keep = self._config.trajectory_output_bytes

        async def make(spec: SandboxSpec) -> str:
            return (await self.create(spec, project=principal.project)).sandbox.id

        for base in starts_of(entries, request):
            replay = Replay(self, entries, request, blob=blob, keep=keep, restore=restore, base=base)
            try:
                resolve(replay.spec(), principal.project, self._backends)
            except (NotFound, Unsupported):  # the snapshot is gone, or not this project's to use
                if base is None:
                    raise
            else:
                break
        return await replay.run(make)

    def tripwires(self, sandbox_id: str) -> TripwireState:
        return self._tripwires.state(self._live(sandbox_id))

    def resume_tripwires(self, sandbox_id: str) -> TripwireState:
        return self._tripwires.resume(self._live(sandbox_id))

    # --- commands ---

    async def exec(self, sandbox_id: str, spec: ExecSpec, *, patient: bool = False) -> RunningCommand | RecordedCommand:
        try:
            return await self._commands.exec(self._usable(sandbox_id), spec, patient)
        except (SandboxEnded, SandboxLost) as error:
            return self._commands.recording.after_end(sandbox_id, error, spec.key, spec)

    def exec_quick(
        self, sandbox_id: str, spec: ExecSpec, release: Sequence[str], told: Callable[[], None]
    ) -> QuickCommand | None:
        return self._commands.quick(self._usable(sandbox_id), spec, release, told)

    async def attach(self, sandbox_id: str, key: str) -> RunningCommand | RecordedCommand:
        try:
            return await self._commands.attach(self._live(sandbox_id), key)
        except (SandboxEnded, SandboxLost) as error:
            return self._commands.recording.after_end(sandbox_id, error, key)

    async def attach_pid(self, sandbox_id: str, pid: int) -> RunningCommand:
        return await self._commands.attach_pid(self._live(sandbox_id), pid)

    def processes(self, sandbox_id: str) -> list[ProcessInfo]:
        return self._commands.processes(self._live(sandbox_id))

    async def resize(self, sandbox_id: str, key: str, cols: int, rows: int) -> None:
        await self._commands.resize(self._live(sandbox_id), key, cols, rows)

    async def signal(self, sandbox_id: str, key: str, signal: int, scope: str = "leader") -> None:
        await self._commands.signal(self._live(sandbox_id), key, signal, scope_of(scope, signal))

    async def release(self, sandbox_id: str, key: str) -> None:
        await self._commands.release(self._live(sandbox_id), key)

    # --- files, besides those of `FileCalls` ---

    async def watch(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, recursive: bool = False
    ) -> HeldWatch:
        sandbox = self._usable(sandbox_id)
        user = user or sandbox.record.spec.user
        opening = streams.watch(sandbox.running().channel, path, user=user, recursive=recursive)
        return await hold_watch(self._lives, self._commands, sandbox, opening)

    # --- ports ---

    async def connect(self, sandbox_id: str, port: int | bytes) -> HeldStream:
        sandbox = self._usable(sandbox_id)
        opening = streams.connect(sandbox.running().channel, port, user=sandbox.record.spec.user)
        return await hold_stream(self._lives, self._commands, sandbox, opening)

    @asynccontextmanager
    async def _channel(self, sandbox_id: str, *paths: bytes) -> AsyncIterator[tuple[GuestChannel, str]]:
        """A sandbox's channel for one file call, and its default user. A guest that is gone is explained as for
        commands."""
        sandbox = self._usable(sandbox_id)
        channel = sandbox.running().channel
        self._lives.use(sandbox)
        try:
            with self._tripwires.file_call(sandbox_id, *paths):
                yield channel, sandbox.record.spec.user
        except (OutcomeUnknown, Unavailable) as error:
            raise await self._commands.explain(sandbox, error) from error
        finally:
            self._lives.unuse(sandbox)

    def _syncs(self, sandbox_id: str) -> bool:
        return self._live(sandbox_id).record.spec.sync == "always"

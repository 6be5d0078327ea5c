"""`ports.Backend` over the zygote: what exists of a container sandbox, in the order it is made and removed.

Owns on the host, per sandbox: a cgroup slot (from the pool, named in the handle), a subvolume and a spool directory
(named by the sandbox's id), and a clone in the zygote (by id). Invariants:

- All names are in the handle or follow from the id, so `destroy` works on what a dead server left half-made.
- A slot goes back to the pool only when no process can be attached to it any more: after the spawn is answered and
  pid 1 is gone.
- The zygote outlives this object; when the zygote dies, so do its sandboxes, and a new one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from dsec.backends.container.host import Host
from dsec.backends.container.instance import ContainerInstance
from dsec.backends.container.native import build_native, missing_for_network
from dsec.backends.container.zygote import Spawned, SpawnRequest, ZygoteClient, ZygoteState, start_zygote
from dsec.channel import SocketChannel, Spool
from dsec.errors import CreateFailed, DsecError, InvalidRequest, Unavailable, Unsupported
from dsec.kernel.cgroups import Shape, Slot
from dsec.ports import Captured, Clock, Handle, InstanceEnd
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec
from dsec.store.layers import ID_COUNT
from dsec.store.views import remove_dev

log = logging.getLogger(__name__)

ID_BASE = 1 << 20
"""Of the first project; each has a range of ID_COUNT user and group ids of its own."""
OOM_SCORE_ADJ = 500
"""Before the host's own processes, when the host itself runs out of memory."""
_EXIT_WAIT_S = 10.0
_SWEEP_EVERY = 64
_NOBODY = "0" * 24
"""An id that no sandbox has."""


class ContainerBackend:
    """Container sandboxes of one node."""

    name: ClassVar[str] = "container"
    api_version: ClassVar[int] = 1

    def __init__(self, host: Host, clock: Clock) -> None:
        self.host = host
        self._clock = clock
        self._instances: dict[str, ContainerInstance] = {}
        self._spawning: dict[str, asyncio.Task[Spawned]] = {}
        self._exits: dict[str, asyncio.Future[int]] = {}
        self._cpus: dict[str, tuple[int, ...]] = {}
        self._views: set[str] = set()
        self._zygote: ZygoteClient | None = None
        self._same_version = False
        self._network_missing = "the zygote is being started"
        self._epoch = 0
        self._fresh = False
        """The zygote was started by this object: what ran in an earlier one is gone."""
        self._removed = 0
        self._restart: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def gauges(self) -> dict[str, dict[str, float]]:
        """As in `edge.observer.Inspectable`."""
        return {"cgroups": dict(self.host.pool.counts()), "zygote": {"spawning": len(self._spawning)}}

    async def check_ready(self) -> None:
        """As in `edge.observer.Inspectable`: the zygote answers, and the volume has room."""
        if self._zygote is None:
            raise Unavailable("the zygote is being started again")
        await self._zygote.forget(_NOBODY)
        self.host.volume.check_space()

    def pid(self, sandbox_id: str) -> int:
        """The host's number of a running sandbox's pid 1. Raises KeyError."""
        return self._instances[sandbox_id].pid

    # --- opening and closing ---

    async def open(self, known: dict[str, Handle]) -> dict[str, ContainerInstance | InstanceEnd]:
        state = await self._connect()
        trusted = await self.host.open_lazy(await asyncio.to_thread(build_native, self.host.state) / "holder")
        slots = await asyncio.to_thread(
            self.host.pool.open, {handle["slot"]: sandbox_id for sandbox_id, handle in known.items() if handle}
        )
        # The pool has killed everything that isn't known; what the zygote still counts as live is on its way out.
        alive = {i: known[i] for i in known if i in state.live and known[i] and known[i]["slot"] in slots}
        for sandbox_id in state.live:
            self._exits[sandbox_id] = asyncio.get_running_loop().create_future()
        found: dict[str, ContainerInstance | InstanceEnd] = {}
        if self._fresh:
            found = dict.fromkeys(known, InstanceEnd(Cause.NODE_LOST, "the zygote was gone when the server came back"))
        for sandbox_id, handle in alive.items():
            if handle.get("lazy") and not trusted:
                found[sandbox_id] = InstanceEnd(Cause.INFRA_IMAGE, "what filled its files was gone for a while")
                continue
            try:
                found[sandbox_id] = await self._adopt(sandbox_id, handle, slots[handle["slot"]])
            except DsecError as error:
                log.warning("sandbox %s cannot be adopted: %s", sandbox_id, error)
        for sandbox_id, (_, status) in state.ended.items():
            slot = slots.get(known[sandbox_id]["slot"]) if known.get(sandbox_id) else None
            if slot is not None:
                found[sandbox_id] = _why(slot, status)
        strays = (
            state.live.keys() | state.ended.keys() | known.keys() | self.host.volume.list()
        ) - self._instances.keys()
        for sandbox_id in strays:
            await self.destroy(sandbox_id, known.get(sandbox_id, {}))
        return found

    async def _connect(self) -> ZygoteState:
        """Connect to the zygote that runs, or start one. One of another version goes when nothing lives in it."""
        programs = await asyncio.to_thread(build_native, self.host.state)
        path, note = self.host.run / "zygote.sock", self.host.run / "zygote.version"
        client = ZygoteClient(on_exit=self._on_exit, on_lost=self._on_lost)
        try:
            state = await client.connect(path)
            if not state.live and note.read_text() != programs.name:
                await client.shutdown()
                raise Unavailable("the zygote was of another version")
        except (Unavailable, FileNotFoundError):
            self._fresh = True
            await start_zygote(programs, path, unit=f"dsec-zygote-{self.host.run.name}")
            note.write_text(programs.name)
            state = await client.connect(path)
        self._zygote = client
        self._same_version = await asyncio.to_thread(note.read_text) == programs.name
        self._network_missing = await asyncio.to_thread(missing_for_network, programs)
        self._epoch = state.epoch & 0xFFFFFF
        return state

    async def close(self, *, keep: bool) -> None:
        if self._restart is not None:
            self._restart.cancel()
        for instance in self._instances.values():
            instance.forget()
            await instance.channel.close()
        self._instances.clear()
        if self._zygote is not None:
            if keep:
                self._zygote.close()
            else:
                with contextlib.suppress(Unavailable):
                    await self._zygote.shutdown()
        await asyncio.to_thread(self.host.pool.close, keep=keep)
        await asyncio.to_thread(self.host.volume.close, keep=keep)
        if not keep:
            await asyncio.to_thread(self.host.layers.unmount_all)
        await self.host.close_lazy(keep=keep)
        if not keep:
            self.host.views.remove()
            remove_dev(self.host.run)
            for name in ("zygote.sock", "zygote.version"):
                (self.host.run / name).unlink(missing_ok=True)

    # --- making ---

    def check(self, spec: SandboxSpec) -> None:
        if spec.gpus is not None:
            raise Unsupported("gpus is not available in this version", remedy="Leave it out.", field="gpus")
        if spec.require_kvm:
            raise Unsupported("a container needs no KVM", remedy="Leave require_kvm out.", field="require_kvm")
        if spec.network:
            self._need_network()
        if (spec.workdir and not spec.workdir.startswith("/")) or "\0" in spec.workdir:
            raise InvalidRequest("workdir is an absolute path", field="workdir")
        if not spec.layers:
            self.host.environments.get(spec.environment)

    def resolve(self, spec: SandboxSpec, project: str) -> SandboxSpec:
        """As `ports.EnvironmentHost`."""
        return self.host.environments.resolve(spec, project)

    def knows(self, spec: SandboxSpec, project: str) -> bool:
        """As in `ports.EnvironmentHost`."""
        return self.host.remote is None or self.host.remote.knows(spec, project)

    async def learn(self, spec: SandboxSpec, project: str) -> None:
        """As in `ports.EnvironmentHost`."""
        if self.host.remote is not None:
            await self.host.remote.learn(spec, project)

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        cpus = self._cpus[sandbox_id] = self.host.picker.pick(spec.cpus)
        return {
            "slot": self.host.pool.reserve(_shape(spec)),
            "disk_bytes": spec.disk_bytes,
            "memory_bytes": spec.memory_bytes,
            "cpus": spec.cpus,
            "affinity": cpus,
            "id_base": ID_BASE + tenant * ID_COUNT,
            "lazy": [digest for digest in spec.layers if self.host.environments.layers.is_lazy(digest)],
            "capture": capture,
        }

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> ContainerInstance:
        try:
            return await self._create(sandbox_id, spec, handle)
        except BaseException as error:
            await asyncio.shield(self.destroy(sandbox_id, handle))
            if isinstance(error, OSError):
                raise CreateFailed(f"the host refused a step: {error}", remedy="See `dsec doctor`.") from error
            raise

    async def _create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> ContainerInstance:
        host, zygote = self.host, await self._serving()
        begun = self._clock.monotonic()
        layers = spec.layers or host.environments.get(spec.environment).layers
        id_base = handle["id_base"]
        lowers = tuple(str(host.layers.path(digest, id_base)) for digest in layers)
        host.volume.check_space()
        slot = host.pool.take(handle["slot"], _shape(spec), sandbox_id, id_base)
        capture = handle.get("capture", "")
        make = partial(host.volume.make, sandbox_id, spec.disk_bytes, id_base, capture)
        upper, work = await asyncio.to_thread(make) if capture else make()
        view = host.views.acquire(spec.cpus, spec.memory_bytes)
        self._views.add(sandbox_id)
        request = SpawnRequest(
            sandbox=sandbox_id,
            lowers=lowers,
            upper=upper,
            work=work,
            id_base=id_base,
            id_count=ID_COUNT,
            cgroup2=slot.v2,
            cgroups=slot.v1,
            dev=str(host.dev),
            view=str(view),
            hostname=spec.hostname,
            cpus=tuple(handle["affinity"]),
            oom_score_adj=OOM_SCORE_ADJ,
            no_new_privs=spec.no_new_privs,
            network=bool(spec.network),
        )
        self._exits[sandbox_id] = asyncio.get_running_loop().create_future()
        prepared = self._clock.monotonic()
        spawning = self._spawning[sandbox_id] = asyncio.create_task(self._spawn(zygote, request))
        spawned = await asyncio.shield(spawning)
        del self._spawning[sandbox_id]
        answered = self._clock.monotonic()
        instance = await self._serve(sandbox_id, spawned, slot, spec.disk_bytes, handle["lazy"], fresh=True)
        if self._zygote is not zygote:  # `_on_lost` did not know of this one yet
            raise Unavailable("the zygote died while the sandbox was made")
        instance.phases_s = {
            "prepare": prepared - begun,
            "spawn": answered - prepared,
            "mount": spawned.mount_ns / 1e9,
            "clone": spawned.clone_ns / 1e9,
            "setup": spawned.setup_ns / 1e9,
            "hello": self._clock.monotonic() - answered,
        }
        return instance

    async def spawn_cells(self, request: SpawnRequest) -> Spawned:
        """A jail for function calls, which is no sandbox on any record; `destroy` ends it. Raises as `create`."""
        await self._serving()
        zygote = self._zygote_for("function calls")
        self._exits[request.sandbox] = asyncio.get_running_loop().create_future()
        return await self._spawn(zygote, request)

    async def _spawn(self, zygote: ZygoteClient, request: SpawnRequest) -> Spawned:
        try:
            return await zygote.spawn(request)
        except CreateFailed:
            self._exits.pop(request.sandbox, None)  # nothing runs, so nothing will end
            raise

    async def _serving(self) -> ZygoteClient:
        """The zygote, the next one where it has just died."""
        while self._zygote is None:
            if self._restart is None:
                raise Unavailable("no zygote serves")
            await asyncio.wait([self._restart])
            if self._restart.cancelled():
                raise Unavailable("the server is stopping")
        return self._zygote

    async def _serve(
        self,
        sandbox_id: str,
        spawned: Spawned,
        slot: Slot,
        disk_bytes: int,
        layers: Sequence[str],
        *,
        fresh: bool = False,
    ) -> ContainerInstance:
        if spawned.pidfd >= 0:
            os.close(spawned.pidfd)  # cgroups and the zygote's word do better
        channel = await SocketChannel.open(
            spawned.channel,
            clock=self._clock,
            spool=Spool(self.host.volume.spool_path(sandbox_id), fresh=fresh),
            on_broken=partial(log.warning, "sandbox %s: its guest broke the protocol: %s", sandbox_id),
        )
        instance = ContainerInstance(
            sandbox_id,
            channel,
            slot,
            pid=spawned.pid,
            exited=self._exits[sandbox_id],
            disk_used=self.host.volume.used_bytes,
            disk_limit_bytes=disk_bytes,
            network_sockets=self._network_sockets,
            image_failures=self.host.image_failures(layers),
            make_swap=self.host.make_swap,
        )
        self._instances[sandbox_id] = instance
        return instance

    async def _adopt(self, sandbox_id: str, handle: Handle, slot: Slot) -> ContainerInstance:
        assert self._zygote is not None
        spawned = await self._zygote.attach(sandbox_id)
        self._cpus[sandbox_id] = tuple(handle["affinity"])
        self.host.picker.adopt(self._cpus[sandbox_id], handle["cpus"])
        self.host.views.acquire(handle["cpus"], handle["memory_bytes"])
        self._views.add(sandbox_id)
        frozen = slot.frozen
        if frozen:  # its guest has to answer once
            slot.thaw()
        instance = await self._serve(sandbox_id, spawned, slot, handle["disk_bytes"], handle.get("lazy", []))
        if frozen:
            instance.freeze(True)
        return instance

    async def _network_sockets(self, sandbox_id: str) -> tuple[socket.socket, socket.socket]:
        self._need_network()
        return await self._zygote_for("networks").network(sandbox_id)

    def _zygote_for(self, what: str) -> ZygoteClient:
        if self._zygote is None:
            raise Unavailable("the zygote is being started again")
        if not self._same_version:  # it would break off over a request that it doesn't know
            raise Unsupported(
                f"this sandbox is older than the server's last upgrade: {what} can't be made in it",
                remedy="Create a new sandbox once those of before the upgrade are gone.",
            )
        return self._zygote

    def _need_network(self) -> None:
        if self._network_missing:
            raise Unsupported(
                f"this host can give sandboxes no network: {self._network_missing}",
                remedy="Leave network out, or see what `dsec doctor` says.",
                field="network",
            )

    async def capture(self, sandbox_id: str, handle: Handle) -> Captured:
        """As in `ports.CaptureHost`."""
        instance, name = self._instances.get(sandbox_id), os.urandom(8).hex()
        if instance is None:
            raise Unavailable(f"sandbox {sandbox_id} does not run")
        await asyncio.shield(asyncio.to_thread(self._capture, instance, name))
        return Captured(name, self.host.volume.capture_path(name) / "upper", handle["id_base"])

    def _capture(self, instance: ContainerInstance, name: str) -> None:
        with instance.still():
            self.host.volume.capture(instance.sandbox_id, name)

    async def drop(self, name: str) -> None:
        """As in `ports.CaptureHost`."""
        await asyncio.to_thread(self.host.volume.drop_capture, name)

    # --- ending ---

    def _on_exit(self, sandbox_id: str, pid: int, status: int) -> None:
        exited = self._exits.get(sandbox_id)
        if exited is not None and not exited.done():
            exited.set_result(status)
        instance = self._instances.get(sandbox_id)
        if instance is not None:
            instance.note_end(_why(instance.slot, status))

    def _on_lost(self) -> None:
        """The zygote died; its guests die with it."""
        if self._zygote is None:
            return  # it is being connected to: whoever does that hears of it
        self._zygote = None
        for exited in self._exits.values():
            if not exited.done():
                exited.set_result(signal.SIGKILL)
        for instance in list(self._instances.values()):
            instance.slot.kill()
            instance.note_end(InstanceEnd(Cause.NODE_LOST, "the zygote died"))
        self._restart = asyncio.create_task(self._start_again(), name="zygote restart")

    async def _start_again(self) -> None:
        delay_s = 0.1
        while True:
            try:
                await self._connect()
                return
            except DsecError as error:
                log.error("the zygote cannot be started again: %s", error)
            await self._clock.sleep(delay_s)
            delay_s = min(30.0, delay_s * 2)

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        instance = self._instances.pop(sandbox_id, None)
        if instance is not None:
            instance.forget()
        slot = self.host.pool.find(handle["slot"], sandbox_id) if handle else None
        spawning = self._spawning.pop(sandbox_id, None)
        if spawning is not None:
            await self._abandon(spawning, slot)
        if slot is not None:
            slot.kill()
            if instance is None or instance.frozen:
                slot.thaw()
            if instance is not None:
                instance.frozen = False  # a thread that pages it out stops
        exited = self._exits.get(sandbox_id)
        if exited is not None and not exited.done():
            await asyncio.wait((exited,), timeout=_EXIT_WAIT_S)
        self._exits.pop(sandbox_id, None)
        if instance is not None:
            await instance.channel.close()
        if (cpus := self._cpus.pop(sandbox_id, None)) is not None:
            self.host.picker.release(cpus, handle["cpus"])
        if sandbox_id in self._views:
            self._views.discard(sandbox_id)
            self.host.views.release(handle["cpus"], handle["memory_bytes"])
        self.host.volume.remove(sandbox_id)
        self.host.volume.remove_spool(sandbox_id)
        self._removed += 1
        if self._removed % _SWEEP_EVERY == 0:
            self.host.volume.sweep()
        if slot is not None:  # after the files: emptying a slot would write out what is about to be deleted
            self.host.pool.give_back(slot)
        elif handle:
            self.host.pool.cancel(handle["slot"])
        if self._zygote is not None:
            self._zygote.forget_soon(sandbox_id)

    @staticmethod
    async def _abandon(spawning: asyncio.Task[Spawned], slot: Slot | None) -> None:
        """A spawn whose creator went away: it may still put a process into the slot, so wait for the answer."""
        try:
            spawned = await spawning
        except DsecError:
            return
        spawned.channel.close()
        if spawned.pidfd >= 0:
            os.close(spawned.pidfd)
        if slot is not None:
            slot.kill()


def _shape(spec: SandboxSpec) -> Shape:
    return Shape(spec.memory_bytes, spec.cpus, spec.pids, spec.cpu_class == "batch")


def _why(slot: Slot, status: int) -> InstanceEnd:
    """Nothing inside can send pid 1 a signal that it doesn't handle, so a SIGKILL came from outside, or from the kernel
    for memory."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL and slot.usage().oom_kills:
            return InstanceEnd(Cause.MEMORY_LIMIT, "the kernel ended the whole sandbox for its memory limit")
        if number == signal.SIGKILL:
            return InstanceEnd(Cause.PLATFORM_KILLED, "pid 1 inside was killed from outside")
        return InstanceEnd(Cause.GUEST_EXITED, f"pid 1 inside ended by signal {number}")
    return InstanceEnd(Cause.GUEST_EXITED, f"pid 1 inside ended with code {os.WEXITSTATUS(status)}")

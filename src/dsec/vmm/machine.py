"""Virtual machines that run: a VMM each, in its cgroups, with its disk and its two sockets.

Owns on the host, per machine NAME: a cgroup slot with the group `vm` in it, the disk NAME, `<run>/vm/NAME/{channel,
control}` (sockets that the VMM listens on; only root can connect), and a VMM that the launcher started as NAME. What a
dead server left half-made is removed by `end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dsec.errors import CreateFailed, Unavailable
from dsec.kernel.cgroup_pool import CgroupPool
from dsec.kernel.cgroups import Shape as GroupShape
from dsec.kernel.cgroups import Slot
from dsec.store.layers import LayerStore
from dsec.vmm.disks import Disks
from dsec.vmm.driver import Command, LayerDisks, VmmControl, VmmDriver
from dsec.vmm.kept import Kept
from dsec.vmm.launcher import UID_BASE, UIDS
from dsec.vmm.launching import Ended, LauncherClient
from dsec.vmm.sockets import connect, listen, short

OOM_SCORE_ADJ = 500
SOCKETS = ("control", "channel")
"""Of every machine; full ones have their `console` too."""
THREADS = 256
"""Of a VMM: virtual CPUs, and those that read and write disks."""
_EXIT_WAIT_S = 10.0
_LAST_WORDS_S = 1.0
_LOOK_S = 0.002

_READ = os.O_RDONLY | os.O_CLOEXEC


class StartLost(CreateFailed):
    """What a machine was to begin from, a stem or a spare one, had ended by itself. It can begin once more: `clear`."""


class Machine:
    """One that runs."""

    def __init__(
        self,
        name: str,
        slot: Slot,
        control: VmmControl,
        directory: Path,
        pid: int,
        *,
        driver: VmmDriver,
        connected: Mapping[str, socket.socket] | None = None,
        layers: Sequence[str] = (),
    ) -> None:
        """`connected`: connections to its sockets that are there already. `layers`: those that its VMM was started
        with."""
        self.name = name
        self.slot = slot
        self.control = control
        self.directory = directory
        self.pid = pid
        """The host's number of its VMM."""
        self.layers = tuple(layers)
        self._driver = driver
        self._connected = dict(connected or {})

    @property
    def copies_whole(self) -> bool:
        """As in `VmmDriver`."""
        return self._driver.copies_whole

    def close(self) -> None:
        """Let go of its VMM. Idempotent."""
        self.control.close()
        for sock in self._connected.values():
            sock.close()
        self._connected.clear()

    def keep(self, port: socket.socket) -> None:
        """Have the connection back that `port` gave."""
        self._connected["channel"] = port

    def connect(self, name: str = "channel") -> socket.socket:
        """To its port, or its `console`, where it was handed these; one at a time is served. Raises `Unavailable`."""
        return self._connected.pop(name, None) or connect(self.directory, name)

    async def port(self) -> socket.socket:
        """To its port, whatever its VMM makes of it. Raises `Unavailable`."""
        return self._connected.pop("channel", None) or await self._driver.connect(self.directory)


class Machines:
    """All machines of a server."""

    def __init__(self, root: Path, driver: VmmDriver, disks: Disks, pool: CgroupPool, layers: LayerStore) -> None:
        """`root`: where the machines' sockets are, `<run>/vm` for microVMs."""
        self.root = root
        self.driver = driver
        self.disks = disks
        self.pool = pool
        self._layers = layers
        self.kept = Kept()
        self.launcher: LauncherClient | None = None
        self._exits: dict[str, asyncio.Future[Ended]] = {}
        self._pids: dict[str, int] = {}

    # --- what the launcher says ---

    def expect(self, pids: Mapping[str, int]) -> None:
        """These run, the launcher says."""
        self._pids.update(pids)
        for name in pids:
            self._exits[name] = asyncio.get_running_loop().create_future()

    def on_exit(self, name: str, end: Ended) -> None:
        """As in `LauncherClient`."""
        exited = self._exits.get(name)
        if exited is not None and not exited.done():
            exited.set_result(end)

    def lose_all(self) -> None:
        """The launcher died: every VMM did."""
        for name in list(self._exits):
            self.on_exit(name, Ended(signal.SIGKILL, "the launcher died"))

    def exited(self, name: str) -> asyncio.Future[Ended]:
        """Resolves when its VMM is gone; shared."""
        return self._exits[name]

    async def early_end(self, name: str) -> Ended | None:
        """How its VMM ended, where it did or is just about to; None where it lives on, or never began to."""
        exited = self._exits.get(name)
        if exited is None:
            return None
        await asyncio.wait((exited,), timeout=_LAST_WORDS_S)
        return exited.result() if exited.done() else None

    # --- making ---

    def group_shape(self, memory_bytes: int, cpus: float) -> GroupShape:
        """The limits of a VMM for such a machine. Twice its memory: where a page is written for the first time that the
        template never touched, the kernel makes one of the template's too, on the account of who came first."""
        return GroupShape(2 * memory_bytes + self.driver.overhead_bytes, cpus, THREADS)

    async def start(
        self,
        name: str,
        reservation: str,
        shape: GroupShape,
        *,
        disk: Callable[[], int],
        disk_bytes: int,
        layers: Sequence[str],
        make: Callable[[int, int, int, tuple[LayerDisks, ...]], Command],
        console: Callable[[int], None] | None = None,
        slot: Slot | None = None,
        library: int | None = None,
        stem: bool = False,
    ) -> Machine:
        """Start a VMM; returns when it answers. `disk` makes its disk, in a thread; `make(channel, control, disk,
        layers)` says which VMM, of descriptors. `console` is told a third socket before that, for its serial line.
        `slot`: where it ran before, and goes on. `library`, `stem`: as in `LauncherClient.spawn`.
        What it made is removed by `end`, also where this fails. Raises `CreateFailed`, `Unavailable`, OSError."""
        launcher = self._serving()
        slot = slot or self._slot(name, reservation, shape)
        directory = self._place(name)
        with contextlib.ExitStack() as stack:
            opened = _Opened(stack)
            own = opened.keep(await asyncio.to_thread(disk))
            uid = uid_of(name)
            if self.driver.listens:
                channel = control = opened(self._own_directory(directory, uid), os.O_PATH | os.O_CLOEXEC)
                os.fchown(own, uid, uid)  # it opens what it is handed once more, as itself
            else:
                sockets = (stack.enter_context(listen(directory, each)) for each in ("channel", "control"))
                channel, control = (each.fileno() for each in sockets)
            if console is not None:
                console(stack.enter_context(listen(directory, "console")).fileno())
            files = [self._layers.files(digest) for digest in layers]
            disks = tuple(LayerDisks(opened(each.image), opened(each.data) if each.data else None) for each in files)
            command = make(channel, control, own, disks)
            groups = _enter_groups(slot, opened)
            with self._expecting(name):
                pid = await launcher.spawn(
                    name,
                    command.argv,
                    groups=groups,
                    fds=command.fds,
                    uid=uid,
                    file_bytes=max(disk_bytes, command.file_bytes),
                    oom_score_adj=OOM_SCORE_ADJ,
                    library=library,
                    stem=stem,
                )
            found = await self._control(name)
            if command.begin is not None:
                try:
                    await command.begin(found)
                except BaseException:
                    found.close()
                    raise
        return Machine(name, slot, found, directory, pid, driver=self.driver, layers=layers)

    async def branch(
        self,
        name: str,
        reservation: str,
        shape: GroupShape,
        stem: Machine,
        control: Callable[[socket.socket], VmmControl],
        *,
        disk: Callable[[], int] | None = None,
        files: Sequence[tuple[os.stat_result, int]] = (),
        sockets: Sequence[str] = SOCKETS,
        slot: Slot | None = None,
        also: bool = False,
        layer: int = -1,
    ) -> Machine:
        """A copy of a machine that was started as a stem and stands still. `control`: of a VMM by a connection that is
        in use. `disk`: as in `start`; else a copy of the stem's. `files`: other files of the stem's, and what takes
        their places. `sockets`: those that it has, in stem.c's order. `also`: it is a stem, too. `layer`: a file whose
        data lies over that of the memory. Otherwise as `start`."""
        launcher = self._serving()
        slot = slot or self._slot(name, reservation, shape)
        directory = self._place(name)
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as undo:
            opened = _Opened(stack)
            source = self.disks.path(stem.name)
            own = opened.keep(await asyncio.to_thread(disk or partial(self.disks.copy, name, source)))
            ends, theirs = dict[str, socket.socket](), list[tuple[int, int]]()
            for each in sockets:
                listens = stack.enter_context(listen(directory, each))
                ends[each] = undo.enter_context(connect(directory, each))
                theirs.append((listens.fileno(), stack.enter_context(listens.accept()[0]).fileno()))
            groups = _enter_groups(slot, opened)
            with self._expecting(name):
                pid = await launcher.branch(
                    name,
                    stem.name,
                    groups=groups,
                    files=[(source.stat(), own), *files],
                    sockets=theirs,
                    uid=uid_of(name),
                    also=also,
                    layer=layer,
                )
            undo.pop_all()
        found = control(ends.pop("control"))
        return Machine(name, slot, found, directory, pid, driver=self.driver, connected=ends, layers=stem.layers)

    def _serving(self) -> LauncherClient:
        if self.launcher is None:
            raise Unavailable("the launcher of virtual machines is being started again")
        return self.launcher

    def _slot(self, name: str, reservation: str, shape: GroupShape) -> Slot:
        """The one that it left when it began before (`clear`), else the one that is reserved."""
        return self.pool.find(reservation, name) or self.pool.take(reservation, shape, name, 0)

    def _place(self, name: str) -> Path:
        directory = self.root / name
        directory.mkdir(mode=0o700)
        return directory

    @contextmanager
    def _expecting(self, name: str) -> Iterator[None]:
        """Its end will be heard of, if it comes to be."""
        self._exits[name] = asyncio.get_running_loop().create_future()
        try:
            yield
        except CreateFailed:
            del self._exits[name]
            raise

    @staticmethod
    def _own_directory(directory: Path, uid: int) -> Path:
        """Where a VMM may make its sockets."""
        own = directory / "own"
        own.mkdir(mode=0o700)
        os.chown(own, uid, uid)
        return own

    async def _control(self, name: str) -> VmmControl:
        """Raises `CreateFailed` with its last words where the VMM ends instead of answering."""
        exited = self._exits[name]
        with short(self.root / name) as directory:
            connecting = asyncio.ensure_future(self.driver.control(Path(directory, "control")))
            await asyncio.wait((connecting, exited), return_when=asyncio.FIRST_COMPLETED)
            if connecting.done() and connecting.exception():  # most likely because it ended
                await asyncio.wait((exited,), timeout=_LAST_WORDS_S)
            if not connecting.done() or (exited.done() and connecting.exception()):
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
                raise CreateFailed(f"the virtual machine's monitor ended: {exited.result().said.strip()[-1000:]}")
            return await connecting

    async def adopt(self, name: str, slot: Slot) -> Machine:
        """One that an earlier server started. Raises `Unavailable`, `CreateFailed`."""
        return Machine(name, slot, await self._control(name), self.root / name, self._pids[name], driver=self.driver)

    # --- ending ---

    async def stop(self, machine: Machine) -> None:
        """End its VMM alone: disk and cgroups stay, for `start` with its `slot`."""
        name = machine.name
        machine.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(machine.pid, signal.SIGKILL)
        await asyncio.wait((self._exits[name],), timeout=_EXIT_WAIT_S)
        self._exits.pop(name, None)
        self._pids.pop(name, None)
        if self.launcher is not None:
            await self.launcher.forget(name)
        shutil.rmtree(self.root / name, ignore_errors=True)
        Path(machine.slot.v2, "vm").rmdir()  # noqa: ASYNC240 (microseconds)

    async def end(self, name: str, reservation: str, machine: Machine | None = None) -> None:
        """End it, and remove every trace. Idempotent; works on half-made ones."""
        if machine is not None:
            machine.close()
        slot = await self._end(name, reservation)
        self.disks.remove(name)
        if slot is not None:
            self.pool.give_back(slot)
        elif reservation:
            self.pool.cancel(reservation)
        if self.launcher is not None:
            with contextlib.suppress(Unavailable):
                await self.launcher.forget(name)

    async def clear(self, name: str, reservation: str, *, disk: bool = True) -> None:
        """End it, and remove every trace but its cgroups: it may begin once more, under the same names. Not `disk`: its
        disk stays, too. Raises `Unavailable`, OSError."""
        slot = await self._end(name, reservation)
        if disk:
            self.disks.remove(name)
        if slot is not None:
            async with asyncio.timeout(_EXIT_WAIT_S):
                while slot.populated:  # noqa: ASYNC110 (milliseconds)
                    await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(FileNotFoundError):
                Path(slot.v2, "vm").rmdir()  # noqa: ASYNC240 (microseconds)
        if self.launcher is not None:
            await self.launcher.forget(name)

    async def _end(self, name: str, reservation: str) -> Slot | None:
        """Its cgroups, where it has some."""
        slot = self.pool.find(reservation, name) if reservation else None
        if slot is not None:
            slot.kill()
            slot.thaw()
        exited = self._exits.get(name)
        if exited is not None and not exited.done():
            await asyncio.wait((exited,), timeout=_EXIT_WAIT_S)
        self._exits.pop(name, None)
        self._pids.pop(name, None)
        shutil.rmtree(self.root / name, ignore_errors=True)
        return slot

    def names(self) -> set[str]:
        """Of machines that left anything behind."""
        left = {path.name for path in self.root.iterdir()} if self.root.is_dir() else set()
        return left | self.disks.list()


async def restored(machine: Machine) -> Machine:
    """It has read its state; else let go of it. Raises `Unavailable`."""
    try:
        await machine.control.restored()
    except BaseException:
        machine.close()
        raise
    return machine


class _Opened:
    """Descriptors that are closed with a stack."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def __call__(self, path: Path | str, flags: int = _READ) -> int:
        return self.keep(os.open(path, flags))

    def keep(self, fd: int) -> int:
        self._stack.callback(os.close, fd)
        return fd


def _enter_groups(slot: Slot, opened: _Opened) -> list[int]:
    """Files to enter its cgroups by."""
    group = Path(slot.v2, "vm")  # a group that was ever killed kills what comes into it later (Linux to 6.18)
    group.mkdir()
    return [opened(f"{each}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for each in (group, *slot.v1)]


def uid_of(name: str) -> int:
    """The user that a machine's VMM runs as."""
    return UID_BASE + zlib.crc32(name.encode()) % UIDS

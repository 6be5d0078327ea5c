"""The bare zygote, as the limit of `dsec bench create`: fully isolated sandboxes without an edge, records, HTTP or a
client.

A sandbox here has what the server's have (all namespaces, id-mapped layer, cgroups with limits, capabilities, the
seccomp filter, the guest as pid 1), with its writable layer on a tmpfs; `/bin/true` goes through the guest, then the
sandbox is killed and its traces removed. Each lane has a slot of cgroups that it uses again, as the server's pool does.

Owns what it makes below `work` and the cgroups `dsec-bench`; leaves neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import stat
import struct
import time
from pathlib import Path
from types import TracebackType

from dsec.backends.container.native import build_native
from dsec.backends.container.zygote import SpawnRequest, ZygoteClient, start_zygote
from dsec.bench.rounds import Turn
from dsec.kernel import mounts
from dsec.kernel.cgroups import CgroupRoot, Shape, Slot
from dsec.kernel.idmap import place_clone
from dsec.kernel.mounts import TmpfsMount
from dsec.spec.operations import EndKind, ExecFlag, OpRequest
from dsec.spec.sandbox import SandboxSpec
from dsec.wire.frames import MAX_FRAME, PROTOCOL_VERSION, FrameType, decode_all, encode
from dsec.wire.messages import decode_exit, encode_request

CGROUP = "dsec-bench"
_ID_BASE, _ID_COUNT = 1 << 20, 1 << 16
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_TIMEOUT_S = 30.0


class BareZygote:
    """A zygote of our own over the mounted root file system `base`."""

    def __init__(self, base: Path, work: Path, state: Path, lanes: int) -> None:
        """`work`: an empty directory; `state`: where compiled programs are kept; `lanes`: sandboxes at the same
        time."""
        self._base = base
        self._work = work
        self._state = state
        self._lanes = lanes
        self._numbers = itertools.count()
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._client = ZygoteClient(on_exit=self._exited)
        self._slots: list[Slot] = []
        self._root: CgroupRoot | None = None
        limits = SandboxSpec(environment="defaults")
        self._shape = Shape(memory_bytes=limits.memory_bytes, cpus=limits.cpus, pids=limits.pids)
        hello = encode(FrameType.HELLO, 0, struct.pack("<HHIQ", PROTOCOL_VERSION, 0, 0, 1))
        self._greeting = (
            hello,
            encode(FrameType.START, 1, encode_request(OpRequest(argv=(b"/bin/true",), flags=ExecFlag.PATIENT))),
        )

    async def __aenter__(self) -> BareZygote:
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def turn(self, count: int) -> Turn:
        """Create, run `true`, destroy: `count` times in all."""
        tickets, problems = itertools.count(), list[str]()

        async def lane(slot: Slot) -> None:
            while next(tickets) < count:
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        await self._cycle(slot)
                except (OSError, TimeoutError, RuntimeError) as error:
                    problems.append(f"{type(error).__name__}: {error}")

        began = time.perf_counter()
        await asyncio.gather(*(lane(slot) for slot in self._slots))
        return Turn(count, time.perf_counter() - began, len(problems), problems[0] if problems else "")

    async def _cycle(self, slot: Slot) -> None:
        name = f"bare{next(self._numbers)}"
        directory = self._work / "tmpfs" / name
        upper, work = directory / "upper", directory / "work"
        for path in (directory, upper, work):
            path.mkdir()
        os.chown(upper, _ID_BASE, _ID_BASE)
        slot.assign(name, _ID_BASE)
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        spawned = await self._client.spawn(
            SpawnRequest(
                sandbox=name,
                lowers=(str(self._work / "layer"),),
                upper=str(upper),
                work=str(work),
                id_base=_ID_BASE,
                id_count=_ID_COUNT,
                cgroup2=slot.v2,
                cgroups=slot.v1,
                dev=str(self._work / "dev"),
            )
        )
        try:
            await self._true(spawned.channel.fileno())
        finally:
            # Not by cgroup.kill: Linux 6.18 then kills whatever is cloned into the group later.
            signal.pidfd_send_signal(spawned.pidfd, signal.SIGKILL)
            spawned.channel.close()
            os.close(spawned.pidfd)
        await ended
        await self._client.forget(name)
        shutil.rmtree(directory)

    async def _true(self, channel: int) -> None:
        loop = asyncio.get_running_loop()
        for packet in self._greeting:
            os.write(channel, packet)
        done: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            try:
                while not done.done():
                    for frame in decode_all(os.read(channel, MAX_FRAME)):
                        if frame.type is not FrameType.EXIT:
                            continue
                        end = decode_exit(frame.payload)
                        if end.kind is EndKind.EXITED and end.code == 0:
                            done.set_result(None)
                        else:
                            done.set_exception(
                                RuntimeError(f"`true` ended as {end.kind.name} {end.code} {end.message}")
                            )
            except BlockingIOError:
                return
            except OSError as error:
                done.set_exception(error)

        loop.add_reader(channel, readable)
        try:
            await done
        finally:
            loop.remove_reader(channel)

    def _exited(self, sandbox: str, _pid: int, _status: int) -> None:
        future = self._ended.pop(sandbox, None)
        if future is not None and not future.done():
            future.set_result(None)

    async def _open(self) -> None:
        programs = await asyncio.to_thread(build_native, self._state)
        self._prepare()
        socket = self._work / "zygote.sock"
        await start_zygote(programs, socket, unit=f"{CGROUP}-zygote", net_pool=self._lanes * 2)
        await self._client.connect(socket)

    def _prepare(self) -> None:
        for name in ("tmpfs", "dev", "layer"):
            (self._work / name).mkdir()
        TmpfsMount(self._work / "tmpfs", size_bytes=1 << 28).mount()
        TmpfsMount(self._work / "dev", devices=True).mount()
        for name, (major, minor) in _DEVICES.items():
            path = self._work / "dev" / name
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            path.chmod(0o666)
        (self._work / "dev" / "pts").mkdir()
        place_clone(self._base, self._work / "layer", _ID_BASE, _ID_COUNT)
        self._root = CgroupRoot.detect(CGROUP)
        self._root.prepare()
        for index in range(self._lanes):
            slot = Slot(self._root, f"s{index}")
            slot.make(self._shape)
            self._slots.append(slot)

    async def _close(self) -> None:
        with contextlib.suppress(Exception):  # not connected: nothing to end
            await self._client.shutdown()
        self._client.close()
        for slot in self._slots:
            slot.close()
            slot.remove()
        if self._root is not None:
            self._root.remove()
        for name in ("layer", "dev", "tmpfs"):
            mounts.unmount_under(self._work / name)

"""Real sandboxes for the attack suite: a zygote, a minimal root file system of static programs, and `Box.run`.

Owns: one `Nursery` a test session (a tmpfs with the layer, /dev and views; the zygote; a thread with the event loop)
and the boxes made in it. Everything it makes is removed by `close`. Tests see `Box` and `Result` only, so that the
suite can be pointed at another way of making sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from dsec.backends.container.zygote import Spawned, SpawnRequest, ZygoteClient, start_zygote
from dsec.channel import GuestOperation, SocketChannel
from dsec.edge.config import SystemClock
from dsec.kernel import mounts, syscalls
from dsec.kernel.cgroups import CgroupRoot, Shape, Slot
from dsec.spec.operations import Chunk, ExecFlag, Kind, OpEnd, OpRequest

ID_BASE, ID_COUNT = 10 * 65536, 65536
MIB = 1 << 20
PATIENCE_S = 120.0
HERE = Path(__file__).parent
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": "/tmp",
    "ptmx": "pts/ptmx",
}
PASSWD = "root:x:0:0:root:/root:/bin/attack\nalice:x:1000:1000::/home/alice:/bin/attack\n"
GROUP = "root:x:0:\nalice:x:1000:\n"

T = TypeVar("T")


@cache
def _attack() -> bytes:
    """The attack program, compiled once."""
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "attack"
        command = ["cc", "-O2", "-static", "-o", str(program), str(HERE / "attack.c")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return program.read_bytes()


class Result(Struct, frozen=True):
    """How a command inside ended. `exit` is negative for a signal."""

    exit: int
    out: str
    err: str
    end: OpEnd

    def calls(self) -> list[tuple[int, int]]:
        """What `attack call` printed: (result, errno) for each call."""
        return [(int(r), int(e)) for r, e in re.findall(r"^(-?\d+) (\d+)\r?$", self.out, re.MULTILINE)]


class Box:
    """One running sandbox."""

    def __init__(self, nursery: Nursery, sandbox: str, slot: Slot, spawned: Spawned, channel: SocketChannel) -> None:
        self.nursery = nursery
        self.sandbox = sandbox
        self.slot = slot
        self.spawned = spawned
        self.channel = channel
        self._upload: GuestOperation | None = None
        self.upper = nursery.root / "boxes" / sandbox / "upper"

    def run(
        self,
        *argv: str,
        user: str = "root",
        cwd: str = "/",
        timeout_s: float = 90.0,
        flags: ExecFlag = ExecFlag.KILL_LEFTOVERS,
    ) -> Result:
        """Run a program inside to its end."""
        request = OpRequest(
            argv=tuple(os.fsencode(word) for word in argv),
            user=user.encode(),
            cwd=cwd.encode(),
            timeout_ms=int(timeout_s * 1000),
            output_cap=32 * MIB,
            flags=flags,
        )
        return self.nursery.wait(self._run(request))

    def attack(self, *words: str | int, user: str = "root", **options: Any) -> Result:
        """Run the attack program."""
        return self.run("/bin/attack", *(str(word) for word in words), user=user, **options)

    def call(self, name: str, *args: str | int, user: str = "root") -> tuple[int, int]:
        """One system call inside: (result, errno)."""
        result = self.attack("call", name, *args, user=user)
        assert result.exit == 0, (name, result)
        return result.calls()[0]

    def calls(self, *calls: Sequence[str | int], user: str = "root") -> list[tuple[int, int]]:
        """System calls in one process inside."""
        words: list[str | int] = []
        for call in calls:
            words += [*call, "--"]
        result = self.attack("call", *words[:-1], user=user)
        assert result.exit == 0, result
        return result.calls()

    async def _run(self, request: OpRequest) -> Result:
        operation = await self.channel.start(request)
        streams = [bytearray(), bytearray()]
        end: OpEnd | None = None
        async for piece in operation.read():
            if isinstance(piece, Chunk):
                streams[piece.stderr] += piece.data
            else:
                end = piece
        await operation.release()
        assert end is not None
        out, err = (bytes(s).decode(errors="replace") for s in streams)
        return Result(-end.code if end.kind.name == "SIGNALED" else end.code, out, err, end)

    async def hold_terminal(self) -> GuestOperation:
        """A program that waits on a terminal, in the background."""
        request = OpRequest(argv=(b"/bin/attack", b"sleep", b"600"), flags=ExecFlag.PTY)
        operation = await self.channel.start(request)
        assert await operation.started() is not None
        return operation

    def begin_upload(self, path: str, user: str) -> int:
        """Start writing a file and leave it unfinished: the pid of the guest's child that waits for more."""

        async def begin() -> int:
            request = OpRequest(kind=Kind.WRITE, path=path.encode(), user=user.encode(), mode=0o644)
            self._upload = await self.channel.start(request)
            pid = await self._upload.started()
            assert pid is not None
            await self._upload.write(b"uploaded")
            return pid

        return self.nursery.wait(begin())

    def end_upload(self) -> None:
        """Finish what `begin_upload` began."""

        async def finish() -> None:
            assert self._upload is not None
            await self._upload.close_stdin()
            async for piece in self._upload.read():
                assert not isinstance(piece, OpEnd) or piece.code == 0, piece
            await self._upload.release()

        self.nursery.wait(finish())

    @property
    def alive(self) -> bool:
        """Whether pid 1 inside runs and answers."""
        return self.sandbox not in self.nursery.ended and self.nursery.wait(self.channel.ping()) >= 0

    def wait_end(self) -> int:
        """The wait status of pid 1."""
        return self.nursery.wait(self.nursery.end_of(self.sandbox))

    def close(self) -> None:
        """End it and remove every trace. Idempotent."""
        self.nursery.wait(self.nursery.remove(self))


class Nursery:
    """Where boxes come from."""

    def __init__(self, root: Path, name: str, native: Path) -> None:
        """`native`: where the compiled programs are."""
        self.root = root
        self.native = native
        self.ended: dict[str, int] = {}
        self._futures: dict[str, asyncio.Future[int]] = {}
        self.boxes: dict[str, Box] = {}
        self._count = 0
        self.gone = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._stop_loop)
        try:
            self._build(name)
        except BaseException:
            self._undo.close()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the nursery's loop."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(PATIENCE_S)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The same without waiting."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _stop_loop(self) -> None:
        self.wait(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _build(self, name: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._undo.callback(self.root.rmdir)
        syscalls.mount("tmpfs", self.root, "tmpfs", data="size=512m,mode=0755")  # dev and suid work: ours must refuse
        self._undo.callback(mounts.unmount, self.root)
        self.attack_program = self.root / "attack"
        self.attack_program.write_bytes(_attack())
        self.attack_program.chmod(0o755)
        self.layer = self._make_layer()
        self.dev = make_dev(self.root / "dev")
        self.view = make_view(self.root / "view")
        (self.root / "boxes").mkdir()
        self.cgroups = CgroupRoot.detect(name)
        self.cgroups.prepare()
        self._undo.callback(self.cgroups.remove)
        self.socket = self.root / "zygote.sock"
        self.wait(start_zygote(self.native, self.socket, unit=name))
        self._undo.callback(lambda: self.wait(self._end_zygote()))
        self.client = ZygoteClient(on_exit=self.exited)
        self.zygote = self.wait(self.client.connect(self.socket))

    def _make_layer(self) -> Path:
        layer = self.root / "layer"
        for directory in ("bin", "etc", "proc", "sys", "dev", "tmp", "root", "home/alice", "lower"):
            (layer / directory).mkdir(parents=True)
        shutil.copy(self.attack_program, layer / "bin" / "attack")
        shutil.copy(self.attack_program, layer / "bin" / "suid")
        shutil.copy(self.attack_program, layer / "bin" / "suid-host")
        (layer / "etc" / "passwd").write_text(PASSWD)
        (layer / "etc" / "group").write_text(GROUP)
        (layer / "lower" / "file").write_text("from the layer\n")
        for path in (layer, *layer.rglob("*")):
            os.chown(path, ID_BASE, ID_BASE)
        os.chown(layer / "bin" / "suid-host", 0, 0)  # as a careless build of a layer would leave it
        for name in ("suid", "suid-host"):
            (layer / "bin" / name).chmod(0o4755)
        for path, uid in ((layer / "home" / "alice", 1000), (layer / "tmp", 0)):
            os.chown(path, ID_BASE + uid, ID_BASE + uid)
        (layer / "tmp").chmod(0o1777)
        # A device of the host's, in a layer whose builder was root: the mount has to keep it shut.
        os.mknod(layer / "lower" / "kmsg", 0o666 | stat.S_IFCHR, os.makedev(1, 11))
        (layer / "lower" / "kmsg").chmod(0o666)
        return layer

    def make(self, *, pids: int = 256, memory_bytes: int = 256 * MIB, slot: Slot | None = None, **options: Any) -> Box:
        """A new sandbox; in the cgroups of an ended one if asked for."""
        return self.wait(self._make(Shape(memory_bytes, 1.0, pids), slot, options))

    async def _make(self, shape: Shape, slot: Slot | None, options: dict[str, Any]) -> Box:
        self._count += 1
        name = f"box{self._count}"
        home = self.root / "boxes" / name
        for directory in (home, home / "upper", home / "work"):
            directory.mkdir()
            os.chown(directory, ID_BASE, ID_BASE)
        if slot is None:
            slot = Slot(self.cgroups, f"s{self._count}")
            slot.make(shape)
        request = {
            "sandbox": name,
            "lowers": (str(self.layer),),
            "upper": str(home / "upper"),
            "work": str(home / "work"),
            "id_base": ID_BASE,
            "id_count": ID_COUNT,
            "cgroup2": slot.v2,
            "cgroups": slot.v1,
            "dev": str(self.dev),
            "view": str(self.view),
        }
        try:
            spawned = await self.client.spawn(SpawnRequest(**{**request, **options}))
        except BaseException:
            slot.remove()
            shutil.rmtree(home)
            raise
        channel = await SocketChannel.open(spawned.channel, clock=SystemClock())
        box = self.boxes[name] = Box(self, name, slot, spawned, channel)
        return box

    async def remove(self, box: Box) -> None:
        """End a box and remove its traces. Idempotent."""
        if self.boxes.pop(box.sandbox, None) is None:
            return
        box.slot.kill()
        await self.end_of(box.sandbox)
        await box.channel.close()
        os.close(box.spawned.pidfd)
        await self.client.forget(box.sandbox)
        if all(other.slot is not box.slot for other in self.boxes.values()):
            assert await asyncio.to_thread(box.slot.remove, 110.0), "its cgroups can't be emptied"
        shutil.rmtree(self.root / "boxes" / box.sandbox)

    def exited(self, sandbox: str, pid: int, status: int) -> None:
        """The zygote's word that a box's pid 1 has ended."""
        self.ended[sandbox] = status
        if sandbox in self._futures:
            self._futures.pop(sandbox).set_result(status)

    async def end_of(self, sandbox: str) -> int:
        """The wait status of a box's pid 1, when it has ended."""
        if sandbox in self.ended:
            return self.ended[sandbox]
        future = self._futures.setdefault(sandbox, self._loop.create_future())
        return await asyncio.shield(future)

    async def _end_zygote(self) -> None:
        try:
            if not self.gone:
                await self.client.shutdown()
        finally:
            self.client.close()

    def abandon(self) -> None:
        """Clean up after the zygote was killed: there is nobody to ask."""
        self.gone = True
        for box in self.boxes.values():
            self.wait(box.channel.close())
            os.close(box.spawned.pidfd)
            assert box.slot.remove(110.0), "its cgroups can't be emptied"
            shutil.rmtree(self.root / "boxes" / box.sandbox)
        self.boxes.clear()
        self._undo.close()

    def close(self) -> None:
        """End all boxes and the zygote, and remove everything."""
        try:
            for box in list(self.boxes.values()):
                box.close()
        finally:
            self._undo.close()


def make_dev(path: Path) -> Path:
    """The shared /dev tree."""
    path.mkdir()
    for name, (major, minor) in DEVICES.items():
        os.mknod(path / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (path / name).chmod(0o666)
    for name, target in LINKS.items():
        (path / name).symlink_to(target)
    (path / "pts").mkdir()
    return path


def make_view(path: Path) -> Path:
    """Generated files, told apart from the host's by what they say."""
    (path / "proc").mkdir(parents=True)
    (path / "sys" / "devices").mkdir(parents=True)
    for name in ("meminfo", "cpuinfo", "stat", "loadavg", "uptime"):
        (path / "proc" / name).write_text(f"generated {name}\n")
    (path / "sys" / "devices" / "generated").write_text("generated\n")
    return path

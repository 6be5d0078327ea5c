"""What function calls are measured against: a bare fork of a warm interpreter, and fresh interpreters."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from dsec.bench.rounds import Turn
from dsec.errors import Unsupported
from dsec.kernel import mounts, syscalls
from dsec.kernel.mounts import ErofsMount
from dsec.store.environments import EnvironmentStore

FRESH = 6
"""Interpreters of a turn, two at a time."""
_USE = "import numpy\nassert numpy.add(1, 1) == 2"
_BARE = """
import gc, marshal, os, sys, time
import numpy
def f(x):
    return x + 1
gc.collect()
gc.freeze()
print("up", flush=True)
for line in sys.stdin:
    count, depth = map(int, line.split())
    began = time.perf_counter()
    running = []
    def finish():
        pid, end, sent = running.pop(0)
        data = b""
        while part := os.read(end, 65536):
            data += part
        os.close(end)
        os.waitpid(pid, 0)
        assert marshal.loads(data) == sent + 1
    for number in range(count):
        end, other = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(end)
            os.write(other, marshal.dumps(f(number)))
            os._exit(0)
        os.close(other)
        running.append((pid, end, number))
        if len(running) >= depth:
            finish()
    while running:
        finish()
    print(time.perf_counter() - began, flush=True)
"""


class BareFork:
    """A warm interpreter that forks for each call, and nothing else."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(cls, root: Path) -> AsyncIterator[BareFork]:
        """In the root file system. Raises `Unsupported` where it has no numpy."""
        process = await asyncio.create_subprocess_exec(
            *_python(root, _BARE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            if await process.stdout.readline() != b"up\n":
                raise Unsupported("the interpreter can't import numpy")
            yield cls(process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def turn(self, count: int, depth: int) -> Turn:
        """`count` calls, `depth` at a time."""
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: PT018
        self._process.stdin.write(f"{count} {depth}\n".encode())
        line = await self._process.stdout.readline()
        return Turn(count, float(line))


async def fresh(root: Path, *, jailed: bool) -> Turn:
    """Interpreters that begin, import numpy, use it and end."""
    inside = ("--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
    bwrap = (shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", *inside, "python3", "-c", _USE)
    argv = bwrap if jailed else _python(root, _USE)

    async def some() -> int:
        failed = 0
        for _ in range(FRESH // 2):
            process = await asyncio.create_subprocess_exec(*argv)
            failed += await process.wait() != 0
        return failed

    began = time.perf_counter()
    failures = sum(await asyncio.gather(some(), some()))
    return Turn(FRESH, time.perf_counter() - began, failures)


def _python(root: Path, code: str) -> tuple[str, ...]:
    variables = ("PATH=/usr/bin:/usr/sbin", "OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1")
    return ("env", "-i", *variables, "chroot", str(root), "python3", "-c", code)


@contextmanager
def mounted_root(state: Path, environment: str) -> Iterator[Path]:
    """The layers of an environment as one read-only root, owners as on disk."""
    store = EnvironmentStore(state)
    layers = [digest for digest in store.get(environment).layers if digest != store.runtime()]
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as work:
        places = [Path(work) / f"layer{number}" for number in range(len(layers))]
        root = Path(work) / "root"
        try:
            for digest, place in zip(layers, places, strict=True):
                place.mkdir()
                image, data = store.layers.files(digest)
                ErofsMount(image, place, data=data).mount()
            if len(places) > 1:
                root.mkdir()
                lower = ":".join(map(str, places))
                syscalls.mount("overlay", root, "overlay", syscalls.MS_RDONLY, f"lowerdir={lower}")
            yield root if len(places) > 1 else places[0]
        finally:
            mounts.unmount_under(work)

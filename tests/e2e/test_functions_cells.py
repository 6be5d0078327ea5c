"""The cells of a function environment: more while calls follow one another, few when nobody calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path

import pytest

from dsec.app import open_edge
from dsec.backends.fncall.jail import AHEAD
from dsec.backends.fncall.pool import Jails
from dsec.backends.fncall.service import FunctionService
from dsec.configuration import read_config
from dsec.errors import Unsupported
from dsec.spec.functions import FunctionBatch, FunctionCall, FunctionSpec

pytestmark = pytest.mark.root


async def test_cells_rest_when_nobody_calls(debian_state: Path) -> None:
    found: list[Jails] = []
    async with open_edge(read_config(debian_state), keep=False, on_jails=found.append):
        (jails,) = found
        service = FunctionService(jails)
        spec = FunctionSpec(environment="debian", source="def f(x): return x", name="f")
        batch = FunctionBatch(function=spec, calls=[FunctionCall(args=[n]) for n in range(100)], ordered=True)
        for _ in range(2):
            assert [result.ok async for result in service.stream("p", batch)] == [True] * 100
            jail = await jails.use(jails.key("p", "debian", []))
            while jail.preparing_lanes:  # noqa: ASYNC110 (its messages are read meanwhile)
                await asyncio.sleep(0.01)
            assert jail.ready_lanes > AHEAD
            jail.rest()
            assert jail.ready_lanes == AHEAD
            jails.left(jail)
        lanes = [await jail.take() for _ in range(2 * AHEAD)]  # those that rested are as good as others
        for lane in lanes:
            jail.give(lane)


async def test_no_descriptors_to_be_had(debian_state: Path) -> None:
    """Calls that end then lose their lanes' next cells, and nothing else: all is well when there are some again."""
    found: list[Jails] = []
    async with open_edge(read_config(debian_state), keep=False, on_jails=found.append):
        service = FunctionService(found[0])
        spec = FunctionSpec(environment="debian", source="def f(x): return x", name="f")
        batch = FunctionBatch(function=spec, calls=[FunctionCall(args=[n]) for n in range(20)])
        assert all([result.ok async for result in service.stream("p", batch)])
        jail = await found[0].use(found[0].key("p", "debian", []))
        while jail.preparing_lanes:  # noqa: ASYNC110 (its messages are read meanwhile)
            await asyncio.sleep(0.01)
        taken = [await jail.take() for _ in range(jail.ready_lanes)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(map(int, await asyncio.to_thread(os.listdir, "/proc/self/fd"))) + 1
        filling: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            with contextlib.suppress(OSError):
                while True:
                    filling.append(os.dup(0))
            for lane in taken:
                jail.give(lane)  # the first needs more descriptors than it gives back
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in filling:
                os.close(fd)
        found[0].left(jail)
        assert jail.broken is None
        assert jail.preparing_lanes < len(taken)
        assert all([result.ok async for result in service.stream("p", batch)])


def _warm_parent(module: str) -> tuple[int, int] | None:
    """The one that imports this module, and the warden of its jail: in one mount namespace."""
    wardens: dict[Path, int] = {}
    parents: dict[Path, int] = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid, words = int(process.name), (process / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"dsec-cells" or module.encode() in words:
                found = wardens if words[0] == b"dsec-cells" else parents
                found[(process / "ns/mnt").readlink()] = pid
    return next(((pid, wardens[space]) for space, pid in parents.items() if space in wardens), None)


async def test_why_imports_failed_is_said_by_a_warden_that_was_late(debian_state: Path) -> None:
    """It found both at once, the parent's reason and its end, and told the end first."""
    found: list[Jails] = []
    slow = ("asyncio", "http.server", "unittest", "xml.etree.ElementTree", "sqlite3", "multiprocessing")
    async with open_edge(read_config(debian_state), keep=False, on_jails=found.append):
        (jails,) = found
        asked = asyncio.create_task(jails.use(jails.key("p", "debian", [*slow, "no_such_module"])))
        while (both := await asyncio.to_thread(_warm_parent, "no_such_module")) is None:
            assert not asked.done(), "it was too quick to be found"
            await asyncio.sleep(0.001)
        parent, warden = both
        os.kill(warden, signal.SIGSTOP)
        while await asyncio.to_thread(Path(f"/proc/{parent}").exists):  # noqa: ASYNC110 (not ours to hear of)
            await asyncio.sleep(0.01)
        os.kill(warden, signal.SIGCONT)
        with pytest.raises(Unsupported, match="no_such_module"):
            await asked

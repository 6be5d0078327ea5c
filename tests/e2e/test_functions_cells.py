"""The cells of a function environment: more while calls follow one another, few when nobody calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from pathlib import Path

import pytest

from dsec.app import open_edge
from dsec.backends.fncall.jail import AHEAD
from dsec.backends.fncall.pool import Jails
from dsec.backends.fncall.service import FunctionService
from dsec.configuration import read_config
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

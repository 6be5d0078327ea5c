"""What a pause gives back and what a resume costs: a Python with numpy loaded, paused and asked again; and a crowd that
is paused at once while others go on.

`paged_out`: the share of its resident memory that left, at the first pause of a fresh sandbox; `net_given_back`: the
same less what compressed swap grew by. `resume_extra_ms`: by how much the median of the first answer after a pause is
above that of a sandbox that runs. All of it in process, without HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from statistics import median
from typing import Any, cast

from msgspec import Struct

from dsec.app import open_environments
from dsec.bench.output import say
from dsec.bench.rounds import percentile
from dsec.configuration import Config
from dsec.edge.client import Execution
from dsec.edge.node import Edge
from dsec.errors import EnvironmentNotFound
from dsec.spec.events import EventType
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import MIB, ExecSpec, ExecStatus, SandboxSpec
from dsec.store.build import BASE_PACKAGES, build_debian_layer
from dsec.store.environments import PATH

ENVIRONMENT = "bench-numpy"
PROJECT = "bench"
_ANSWERS = "import numpy, sys\nprint('up', flush=True)\nfor line in sys.stdin: print(line.strip(), flush=True)"
_CYCLES = 3
_WAIT_S = 0.002


class Plan(Struct, frozen=True, kw_only=True):
    """How much to do."""

    sandboxes: int
    """Fresh ones with numpy, one after the other."""
    many: int
    """Small ones that are paused at once."""


def prepare(config: Config) -> None:
    """Build the environment with numpy where it is missing. Blocks for a minute or two."""
    environments = open_environments(config)
    try:
        environments.get(ENVIRONMENT)
    except EnvironmentNotFound:
        meta = build_debian_layer(environments.layers, (*BASE_PACKAGES, "python3-numpy"), progress=say)
        environments.put(ENVIRONMENT, [meta.digest], env={"PATH": PATH, "LANG": "C.UTF-8"})


class _Asked:
    """A program in a sandbox that answers lines."""

    def __init__(self, edge: Edge, box: str, events: AsyncGenerator[Chunk | ExecStatus]) -> None:
        self._edge, self.box, self._events = edge, box, events

    async def ask(self) -> float:
        """Milliseconds from a line to its answer; a paused sandbox is resumed by it."""
        began = time.perf_counter()
        command = await self._edge.attach(self.box, "asked")
        await command.write_stdin(b"line\n")
        await anext(self._events)
        return (time.perf_counter() - began) * 1e3


@asynccontextmanager
async def _answering(edge: Edge) -> AsyncIterator[_Asked]:
    box = (await edge.create(SandboxSpec(environment=ENVIRONMENT), project=PROJECT)).sandbox.id
    try:
        execution: Execution = await edge.exec(box, ExecSpec(argv=["python3", "-c", _ANSWERS], stdin=True, key="asked"))
        async with aclosing(cast("AsyncGenerator[Chunk | ExecStatus]", execution.events())) as events:
            assert isinstance(await anext(events), Chunk)
            yield _Asked(edge, box, events)
    finally:
        await edge.delete(box)


async def _paged_out(edge: Edge, box: str, times: int) -> dict[str, Any]:
    """What the pause number `times` of a sandbox gave back, waited for."""
    while True:
        found = [event.data for event in edge.events(box) if event.type == EventType.PAGED_OUT]
        if len(found) >= times:
            return found[-1]
        await asyncio.sleep(_WAIT_S)


async def measure(edge: Edge, plan: Plan) -> dict[str, Any]:
    """All figures. Raises `DsecError`."""
    out, net, running, resumed, took = list[float](), list[float](), list[float](), list[float](), list[float]()
    for _ in range(plan.sandboxes):
        async with _answering(edge) as asked:
            for cycle in range(1, _CYCLES + 1):
                running += [await asked.ask() for _ in range(5)]
                await edge.pause(asked.box)
                gave = await _paged_out(edge, asked.box, cycle)
                resumed.append(await asked.ask())
                if cycle == 1:
                    before, gone = gave["before_bytes"], gave["before_bytes"] - gave["after_bytes"]
                    out.append(gone / before)
                    net.append((gone - gave["compressed_bytes"]) / before)
                    took.append(gave["ms"])
    figures = {
        "paged_out": round(median(out), 3),
        "net_given_back": round(median(net), 3),
        "resume_extra_ms": round(median(resumed) - median(running), 3),
        "page_out_ms": round(median(took), 1),
        "first_answer_ms": {
            name: round(median(found), 3) for name, found in (("running", running), ("paused", resumed))
        },
    }
    say(f"pause: {figures['paged_out']:.0%} out, {figures['net_given_back']:.0%} net, {figures['resume_extra_ms']} ms")
    return figures | {"pause_many": await _crowd(edge, plan.many)}


async def _crowd(edge: Edge, many: int) -> dict[str, Any]:
    """Pause many at once; meanwhile one that isn't paused runs commands."""
    spec = SandboxSpec(environment=ENVIRONMENT, run="crowd", memory_bytes=64 * MIB, disk_bytes=64 * MIB, pids=16)
    other = (await edge.create(SandboxSpec(environment=ENVIRONMENT), project=PROJECT)).sandbox.id
    async for item in edge.create_many([spec] * many, project=PROJECT, deadline_s=600):
        assert item.sandbox is not None, item.error
        await edge.exec(item.sandbox.id, ExecSpec(argv=["sleep", "3600"], key="sleeps"))
    try:
        alone = [await _true(edge, other) for _ in range(100)]
        began = time.perf_counter()
        pausing = asyncio.ensure_future(edge.pause_many(PROJECT, run="crowd"))
        beside = [await _true(edge, other)]
        while not pausing.done():
            beside.append(await _true(edge, other))
        paused_ms = (time.perf_counter() - began) * 1e3
        boxes = [item.id for item in pausing.result() if item.error is None]
        paging = list[float]()
        for box in boxes:
            waiting = asyncio.ensure_future(_paged_out(edge, box, 1))
            while not waiting.done():
                paging.append(await _true(edge, other))
        all_ms = (time.perf_counter() - began) * 1e3
    finally:
        crowd = await edge.list_sandboxes(PROJECT, run="crowd", limit=1000)
        await edge.delete_many([info.id for info in crowd.sandboxes], project=PROJECT)
        await edge.delete(other)
    say(f"{many} paused in {paused_ms:.0f} ms; a command beside it {median(beside):.1f}, alone {median(alone):.1f} ms")
    return {
        "sandboxes": len(boxes),
        "paused_ms": round(paused_ms, 1),
        "paged_out_ms": round(all_ms, 1),
        "exec_ms": {
            name: {"p50": round(percentile(found, 50), 2), "max": round(max(found), 2)} if found else None
            for name, found in (("alone", alone), ("while_pausing", beside), ("while_paging_out", paging))
        },
    }


async def _true(edge: Edge, box: str) -> float:
    began = time.perf_counter()
    execution = await edge.exec(box, ExecSpec(argv=["/bin/true"]), patient=True)
    async with aclosing(execution.events()) as events:
        async for _ in events:
            pass
    return (time.perf_counter() - began) * 1e3

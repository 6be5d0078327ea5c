"""What the trajectory log costs a command: the same edge with and without it, in turns, in one run.

Commands are asked of the edge in process, without HTTP, so that the share that is found is an upper bound: a client's
and the API's work come on top of both sides. `exec_p50_percent` is of one command at a time, `throughput_percent` of
many at once; `cpu_us` is the edge's own CPU time for one command.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any

from msgspec import Struct

from dsec.bench.output import say
from dsec.edge.commands import Command
from dsec.edge.node import Edge
from dsec.edge.recorded import RecordedCommand
from dsec.edge.recording import Recording
from dsec.edge.sandbox import Sandbox
from dsec.errors import DsecError
from dsec.ports import Operation
from dsec.spec.sandbox import ExecSpec, ExecStatus, SandboxSpec

_SPEC = ExecSpec(argv=["/bin/true"])


class _Silent(Recording):
    """Writes nothing down."""

    taps = False

    def begins(self, sandbox: Sandbox, command: Command, spec: ExecSpec) -> None:
        """Nothing."""

    def watch(self, command: Command, operation: Operation, settle: Callable[[], object]) -> None:
        """Nothing."""

    def refused(self, sandbox: Sandbox, command: Command, error: BaseException) -> None:
        """Nothing."""

    def result(self, sandbox: Sandbox, command: Command, status: ExecStatus) -> None:
        """Only what its readers need."""
        command.status = status

    def find(self, sandbox: Sandbox, key: str, guest_key: bytes | None = None) -> RecordedCommand | None:
        """Never one."""
        return None


class _Turns:
    """Figures of one side."""

    def __init__(self) -> None:
        self.p50_ms: list[float] = []
        self.rates: list[float] = []
        self.cpu_us: list[float] = []


class Plan(Struct, frozen=True, kw_only=True):
    """How much to do."""

    environment: str
    rounds: int
    alone: int
    """One at a time, in each turn."""
    parallel: int
    """At once, in each turn."""


async def measure(edge: Edge, plan: Plan) -> dict[str, Any]:
    """All figures. Raises `DsecError`."""
    spec = SandboxSpec(environment=plan.environment, pids=256)
    boxes = [(await edge.create(spec, project="bench")).sandbox.id for _ in range(8)]
    recording = edge._commands.recording
    sides = {True: _Turns(), False: _Turns()}
    keys = iter(range(1 << 40))
    try:
        for turn in range(plan.rounds + 1):
            for on in (True, False) if turn % 2 else (False, True):
                edge._commands.recording = recording if on else _silent(recording)
                await _turn(edge, boxes, sides[on] if turn else _Turns(), keys, plan)
    finally:
        edge._commands.recording = recording
        for box in boxes:
            with suppress(DsecError):
                await edge.delete(box)
    with_log, without = sides[True], sides[False]
    p50 = median(with_log.p50_ms), median(without.p50_ms)
    rate = median(with_log.rates), median(without.rates)
    cpu = median(with_log.cpu_us), median(without.cpu_us)
    slower, fewer = _ratio(with_log.p50_ms, without.p50_ms) - 1, 1 - _ratio(with_log.rates, without.rates)
    say(f"the log: p50 {slower:+.1%}, throughput {-fewer:+.1%}")
    return {
        "exec_p50_percent": round(slower * 100, 1),
        "throughput_percent": round(fewer * 100, 1),
        "exec_p50_ms": {"with": round(p50[0], 3), "without": round(p50[1], 3)},
        "exec_per_s": {"with": round(rate[0], 1), "without": round(rate[1], 1)},
        "cpu_us": {"with": round(cpu[0], 1), "without": round(cpu[1], 1)},
        "rounds": plan.rounds,
    }


def _ratio(ones: list[float], others: list[float]) -> float:
    """The median of the ratios of turns that followed each other: a machine that others use changes slowly."""
    return median(one / other for one, other in zip(ones, others, strict=True))


def _silent(recording: Recording) -> Recording:
    return _Silent(recording._trajectories, recording._config)


async def _turn(edge: Edge, boxes: list[str], side: _Turns, keys: Iterator[int], plan: Plan) -> None:
    times_ms = []
    for _ in range(plan.alone):
        began = time.perf_counter()
        await _one(edge, boxes[0], next(keys))
        times_ms.append((time.perf_counter() - began) * 1e3)
    side.p50_ms.append(median(times_ms))
    queue = iter(range(plan.parallel))
    cpu, began = time.process_time(), time.perf_counter()

    async def work(box: str) -> None:
        for _ in queue:
            await _one(edge, box, next(keys))

    await asyncio.gather(*(work(boxes[each % len(boxes)]) for each in range(32)))
    side.rates.append(plan.parallel / (time.perf_counter() - began))
    side.cpu_us.append((time.process_time() - cpu) / plan.parallel * 1e6)


async def _one(edge: Edge, box: str, number: int) -> None:
    key = f"bench-{number}"
    execution = await edge.exec(box, ExecSpec(argv=_SPEC.argv, key=key), patient=True)
    async for event in execution.events():
        if isinstance(event, ExecStatus) and event.exit_code != 0:
            raise AssertionError(f"/bin/true ended with {event}")
    await edge.release(box, key)

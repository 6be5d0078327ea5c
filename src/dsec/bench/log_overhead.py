"""What the trajectory log costs a command: the same server with and without it, in turns, in one run.

Commands come through SDK and HTTP, from a client in a process of its own. `exec_p50_percent` is of one command at a
time, `throughput_percent` of many at once; `cpu_us` is the server's CPU time for one of those.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from dsec.api.app import Api
from dsec.api.serve import ApiServer
from dsec.bench.output import say
from dsec.edge.command import Command
from dsec.edge.node import Edge
from dsec.edge.recorded import RecordedCommand
from dsec.edge.recording import Recording
from dsec.edge.sandbox import Sandbox
from dsec.errors import DsecError
from dsec.spec.sandbox import ExecSpec, ExecStatus, SandboxSpec


class _Silent(Recording):
    """Writes nothing down."""

    def begins(self, sandbox: Sandbox, command: Command, spec: ExecSpec) -> None:
        """Nothing."""

    def refused(self, sandbox: Sandbox, command: Command, error: BaseException) -> None:
        """Nothing."""

    def result(self, sandbox: Sandbox, command: Command, status: ExecStatus) -> None:
        """Only what its readers need."""
        command.status = status
        command.recorder = None

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
    server = ApiServer(Api(edge), "127.0.0.1", 0)
    await server.start()
    try:
        async with _client(server.url, await edge.create_key("bench"), boxes) as client:
            for turn in range(plan.rounds + 1):
                for on in (True, False) if turn % 2 else (False, True):
                    edge._commands.recording = recording if on else _silent(recording)
                    await _turn(client, sides[on] if turn else _Turns(), plan)
    finally:
        edge._commands.recording = recording
        await server.stop()
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


@asynccontextmanager
async def _client(url: str, key: str, boxes: list[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dsec.bench.exec_worker", *boxes),
        env={**os.environ, "DSEC_URL": url, "DSEC_API_KEY": key},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield client
    finally:
        assert client.stdin is not None
        client.stdin.close()
        await client.wait()


async def _turn(client: asyncio.subprocess.Process, side: _Turns, plan: Plan) -> None:
    side.p50_ms.append((await _ask(client, "alone", plan.alone))["p50_ms"])
    cpu = time.process_time()
    side.rates.append((await _ask(client, "parallel", plan.parallel))["rate"])
    side.cpu_us.append((time.process_time() - cpu) / plan.parallel * 1e6)


async def _ask(client: asyncio.subprocess.Process, kind: str, count: int) -> dict[str, float]:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"%s %d\n" % (kind.encode(), count))
    answer = await client.stdout.readline()
    if not answer:
        raise DsecError("the client of the benchmark ended")
    return msgspec.json.decode(answer, type=dict[str, float])

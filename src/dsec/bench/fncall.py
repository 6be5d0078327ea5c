"""Function calls: their rate and latency with numpy imported, against forks and fresh interpreters.

In the same run, in turns, on the same root file system: a bare fork of a warm interpreter (the limit: fork, call,
result through a pipe, end), a fresh interpreter that imports numpy, and the same in bubblewrap. `calls_per_s` is one
batch through server and client. `ahead_p50_ms` is of single calls when a worker waits for each, client included;
`p50_ms` and `p99_ms` of calls for which a worker has yet to be made and forked, in process. `jailed_per_s` is the same
without server, HTTP and client: the jailed fork alone. Ratios are medians over the rounds. The environment, Debian
with numpy, is built by the first run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from dsec.app import open_edge, open_environments
from dsec.backends.fncall.pool import Jails
from dsec.backends.fncall.service import FunctionService
from dsec.bench import load
from dsec.bench.fncall_peers import BareFork, fresh, mounted_root
from dsec.bench.output import say, write_result
from dsec.bench.rounds import Turn, interleave, median_rate, percentile, ratio
from dsec.configuration import read_config
from dsec.errors import EnvironmentNotFound
from dsec.kernel.cgroups import CgroupRoot
from dsec.rollout.server import LocalServer, default_state, run
from dsec.spec.functions import FunctionBatch, FunctionCall, FunctionSpec
from dsec.store.build import BASE_PACKAGES, build_debian_layer

ENVIRONMENT = "bench-fncall"
SOURCE = "def f(x):\n    return x + 1\n"
WAITING = 48
"""Workers whose memory is measured."""


class Plan(Struct, frozen=True):
    """What to measure."""

    calls: int
    rounds: int
    single: int


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--calls", type=click.IntRange(10, 100_000), default=600, show_default=True, help="Of a turn.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--single", type=click.IntRange(10, 100_000), default=400, show_default=True, help="Calls one by one.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, **fields: Any) -> int:
    _, loop_factory = load.event_loop()
    result = run(measure(Plan(**fields), state or default_state()), loop_factory)
    write_result(result, as_json=as_json)
    return 1 if result["failures"] else 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench fncall", standalone_mode=False) or 0)


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `DsecError` where the server doesn't start, the environment can't be built."""
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(_need_numpy, state)
        server = await LocalServer.start(state)
        stack.push_async_callback(server.stop)
        root = stack.enter_context(mounted_root(state, ENVIRONMENT))
        bare = await stack.enter_async_context(BareFork.started(root))
        function = server.client.function(SOURCE, "f", environment=ENVIRONMENT, imports=["numpy"])
        await function.remote(1)
        lanes = 2 * (os.cpu_count() or 1)

        async def ours() -> Turn:
            began = time.perf_counter()
            right = [value async for value in function.map(range(plan.calls))] == list(range(1, plan.calls + 1))
            return Turn(plan.calls, time.perf_counter() - began, 0 if right else plan.calls)

        contestants: dict[str, Callable[[], Awaitable[Turn]]] = {
            "ours": ours,
            "bare": lambda: bare.turn(plan.calls, 1),
            "bare_many": lambda: bare.turn(plan.calls, lanes),
            "fresh": lambda: fresh(root, jailed=False),
            "bwrap": lambda: fresh(root, jailed=True),
        }
        turns = await interleave(contestants, plan.rounds, _told)
        ahead = await _ahead(function, plan.single)
        await server.stop()
        alone = await _alone(state, plan)
    limit = "bare" if median_rate(turns["bare"]) >= median_rate(turns["bare_many"]) else "bare_many"
    return {
        "calls_per_s": round(median_rate(turns["ours"]), 1),
        "p50_ms": round(percentile(alone.on_demand, 50) * 1e3, 2),
        "ahead_p50_ms": round(percentile(ahead, 50) * 1e3, 2),
        "ahead_p99_ms": round(percentile(ahead, 99) * 1e3, 2),
        "p99_ms": round(percentile(alone.on_demand, 99) * 1e3, 2),
        "vs_bare_fork": _rounded(ratio(turns, "ours", limit)),
        "vs_bare_fork_one_by_one": _rounded(ratio(turns, "ours", "bare")),
        "vs_fresh": _rounded(ratio(turns, "ours", "bwrap")),
        "vs_fresh_unjailed": _rounded(ratio(turns, "ours", "fresh")),
        "kib_per_worker": round(alone.kib_per_worker, 1),
        "jailed_per_s": round(alone.per_s, 1),
        "bare_fork_per_s": round(median_rate(turns[limit]), 1),
        "fresh_per_s": round(median_rate(turns["fresh"]), 1),
        "bwrap_per_s": round(median_rate(turns["bwrap"]), 1),
        "rounds": plan.rounds,
        "failures": sum(turn.failures for each in turns.values() for turn in each),
    }


async def _ahead(function: Any, count: int) -> list[float]:
    """Of single calls, each when a worker had time to be there."""
    times = []
    for _ in range(count):
        await asyncio.sleep(0.008)
        began = time.perf_counter()
        await function.remote(1)
        times.append(time.perf_counter() - began)
    return times


class _Alone(Struct):
    """Without a server."""

    per_s: float
    on_demand: list[float]
    kib_per_worker: float


async def _alone(state: Path, plan: Plan) -> _Alone:
    found: list[Jails] = []
    async with open_edge(read_config(state), keep=False, on_jails=found.append):
        (jails,) = found
        service = FunctionService(jails)
        spec = FunctionSpec(environment=ENVIRONMENT, source=SOURCE, name="f", imports=["numpy"])
        batch = FunctionBatch(function=spec, calls=[FunctionCall(args=[n]) for n in range(plan.calls)])
        rates = []
        for _ in range(plan.rounds):
            began = time.perf_counter()
            done = [result.ok async for result in service.stream("bench", batch)]
            rates.append(sum(done) / (time.perf_counter() - began))
        on_demand = [each async for each in _on_demand(service, jails, spec, plan.single)]
        jail = await jails.use(jails.key("bench", ENVIRONMENT, ["numpy"]))
        before = _charged(state)
        for _ in range(WAITING):
            jail.add_lane()
        taken = [await jail.take() for _ in range(WAITING)]
        await asyncio.sleep(0.2)  # they get what a call needs while they wait
        after = _charged(state)
        for lane in taken:
            jail.give(lane)
        jails.left(jail)
    return _Alone(sorted(rates)[len(rates) // 2], on_demand, (after - before) / 1024 / WAITING)


async def _on_demand(service: FunctionService, jails: Jails, spec: FunctionSpec, count: int) -> AsyncIterator[float]:
    """Of calls for which nothing is ready: from asking for a cell to the result."""
    jail = await jails.use(jails.key("bench", ENVIRONMENT, ["numpy"]))
    jail.spare = 0
    taken = []
    while jail.ready_lanes or jail.preparing_lanes:  # as if others had them
        taken.append(await jail.take())
    jail.give(taken.pop())
    for _ in range(count):
        lane = await jail.take()
        began = time.perf_counter()
        jail.give(lane)
        result = await service.call("bench", spec, FunctionCall(args=[1]))
        yield time.perf_counter() - began
        assert result.ok, result
    for lane in taken:
        jail.give(lane)
    jails.left(jail)


def _need_numpy(state: Path) -> None:
    """The environment with numpy, built where it isn't there. Blocks."""
    store = open_environments(read_config(state))
    try:
        store.get(ENVIRONMENT)
    except EnvironmentNotFound:
        layer = build_debian_layer(store.layers, (*BASE_PACKAGES, "python3-numpy"), progress=say)
        store.put(ENVIRONMENT, [layer.digest])


def _charged(state: Path) -> int:
    """What the kernel counts for all that this server runs, in bytes: memory of processes, and its own for them."""
    root = CgroupRoot.detect(f"dsec-{read_config(state).instance}")
    old = "memory" in root.v1
    place = (root.v1["memory"] if old else root.v2) / root.name
    return int((place / ("memory.usage_in_bytes" if old else "memory.current")).read_text())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _told(index: int, name: str, turn: Turn) -> None:
    say(f"round {index + 1}: {name} {turn.rate:.1f}/s")

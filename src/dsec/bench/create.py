"""Create, run `true`, destroy, through SDK and HTTP: against crun, runc, bubblewrap and the bare zygote.

Starts a server of its own and stops it. All run in turns at the same concurrency; ratios are medians over the rounds.
Then idle sandboxes are weighed. Exit code 1 where something failed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from dsec import AsyncClient
from dsec.bench import load, meter, peers
from dsec.bench.bare import BareZygote
from dsec.bench.base import mounted_base
from dsec.bench.output import say, write_result
from dsec.bench.peer_worker import Job, PeerWorker
from dsec.bench.peers import Peer
from dsec.bench.rounds import Turn, interleave, median_rate, percentile, ratio
from dsec.rollout.server import LocalServer, default_state, run
from dsec.spec.sandbox import SandboxSpec

OURS, BARE = "dsec", "zygote"
_COUNTS = {OURS: 8, BARE: 8, "crun": 3, "runc": 1, "bwrap": 4}
"""Groups of each contestant in one turn: about as long for each."""


class Plan(Struct, frozen=True):
    """What to measure."""

    environment: str
    group: int
    rounds: int
    alone: int
    live: int
    idle_s: float


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environment", default="debian", show_default=True, help="Its base layer is what the peers run on.")
@click.option("--group", type=click.IntRange(1, 256), default=16, show_default=True, help="Sandboxes at the same time.")
@click.option("--rounds", type=click.IntRange(1, 100), default=7, show_default=True, help="Turns of each contestant.")
@click.option(
    "--alone", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Creations one at a time."
)
@click.option(
    "--live", type=click.IntRange(0, 10_000), default=1000, show_default=True, help="Idle sandboxes to weigh."
)
@click.option("--idle-s", type=float, default=10.0, show_default=True, help="How long the idle edge is watched.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, **fields: Any) -> int:
    name, loop_factory = load.event_loop()
    result = run(measure(Plan(**fields), state or default_state()), loop_factory) | {"client_loop": name}
    write_result(result, as_json=as_json)
    return 1 if result["failures"] or any(peer["failures"] for peer in result["peers"].values()) else 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench create", standalone_mode=False) or 0)


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `DsecError` where the server doesn't start."""
    async with AsyncExitStack() as stack:
        work = stack.enter_context(_work())
        server = await LocalServer.start(state)
        stack.push_async_callback(server.stop)
        client, spec = server.client, SandboxSpec(environment=plan.environment)
        stack.callback(peers.remove_cgroups)
        base = stack.enter_context(mounted_base(state, plan.environment, work / "base"))
        found, missing = peers.available(base, work, plan.group)
        for name in missing:
            say(f"{name} is not installed: left out")
        worker = stack.enter_context(PeerWorker())
        for peer in found:
            say(
                f"{peer.name}: {peer.version}: {peer.flags} ({peer.note})" + (f", {worker.note}" if worker.note else "")
            )
        (work / "bare").mkdir()
        bare = await stack.enter_async_context(BareZygote(base, work / "bare", state, plan.group))

        processes = {"client": os.getpid(), "server": server.pid, "zygote": meter.zygote_of(state)}
        spent = dict.fromkeys([*processes, "count"], 0.0)

        async def ours(count: int) -> Turn:
            before = {name: meter.cpu_s([pid]) for name, pid in processes.items()}
            turn = await load.groups(client, spec, count, plan.group)
            for name, pid in processes.items():
                spent[name] += meter.cpu_s([pid]) - before[name]
            spent["count"] += turn.count
            return turn

        turns = await _rounds(ours, bare, found, worker, plan)
        alone = await load.one_at_a_time(client, spec, plan.alone)
        say(f"one at a time: create p50 {percentile(alone.create_ms, 50):.2f} ms")
        weight = await _weigh(client, spec, plan, processes) if plan.live else {}
    failures = sum(turn.failures for turn in turns[OURS] + turns[BARE]) + alone.failures
    return {
        **{f"vs_{name}": _rounded(ratio(turns, OURS, name)) for name in ("crun", "runc", "bwrap", BARE)},
        "create_p50_ms": round(percentile(alone.create_ms, 50), 3),
        "create_p99_ms": round(percentile(alone.create_ms, 99), 3),
        "cycle_p50_ms": round(percentile(alone.cycle_ms, 50), 3),
        **weight,
        "failures": failures,
        "first_failure": next((turn.error for name in (OURS, BARE) for turn in turns[name] if turn.error), ""),
        "per_s": {name: round(median_rate(rates), 1) for name, rates in turns.items()},
        "cpu_ms_each": {name: round(1e3 * spent[name] / spent["count"], 2) for name in processes},
        "rounds": plan.rounds,
        "at_once": plan.group,
        "peers": {
            peer.name: {
                "version": peer.version,
                "command": peer.flags,
                "note": peer.note + (f"; {worker.note}" if worker.note else ""),
                "failures": sum(turn.failures for turn in turns[peer.name]),
            }
            for peer in found
        },
        "peers_missing": missing,
    }


@contextmanager
def _work() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsec-bench-"))
    path.chmod(0o711)  # root inside a user namespace has to get through
    try:
        yield path
    finally:
        shutil.rmtree(path)


async def _rounds(
    ours: Callable[[int], Awaitable[Turn]], bare: BareZygote, found: list[Peer], worker: PeerWorker, plan: Plan
) -> dict[str, list[Turn]]:
    group = plan.group

    async def peer_turn(peer: Peer) -> Turn:
        job = Job(peer.lanes, _COUNTS[peer.name] * group)
        outcome = await asyncio.to_thread(worker.run, job)
        return Turn(job.count, outcome.seconds, outcome.failures, outcome.error)

    contestants: dict[str, Callable[[], Awaitable[Turn]]] = {
        OURS: lambda: ours(_COUNTS[OURS] * group),
        BARE: lambda: bare.turn(_COUNTS[BARE] * group),
        **{peer.name: partial(peer_turn, peer) for peer in found},
    }
    for turn in contestants.values():  # once without counting: caches and pools fill
        await turn()

    def told(index: int, name: str, turn: Turn) -> None:
        failed = f", {turn.failures} failed: {turn.error}" if turn.failures else ""
        say(f"round {index + 1}/{plan.rounds} {name:6} {turn.rate:7.1f}/s{failed}")

    return await interleave(contestants, plan.rounds, told)


async def _weigh(client: AsyncClient, spec: SandboxSpec, plan: Plan, processes: dict[str, int]) -> dict[str, Any]:
    """Memory of idle sandboxes, system-wide, and the CPU that they cost while nobody asks anything."""
    before = await meter.settled_memory(min(2.0, plan.idle_s))
    server_before = meter.resident_kib(processes["server"])
    sandboxes = await load.make(client, spec, plan.live)
    try:
        after = await meter.settled_memory(min(2.0, plan.idle_s))
        server_after = meter.resident_kib(processes["server"])
        per = {
            field: round((getattr(after, field) - getattr(before, field)) / plan.live, 1)
            for field in after.__struct_fields__
        }
        busy = await meter.cpu_percent([processes["server"], processes["zygote"]], plan.idle_s)
        say(f"{plan.live} idle: {per['used_kib']} KiB each, {busy:.2f} % of a core")
    finally:
        await client.kill_many(sandboxes)
    return {
        "kib_per_sandbox": per["used_kib"],
        "kib_parts": per,
        "server_kib_per_sandbox": round((server_after - server_before) / plan.live, 1),
        "idle_cpu_percent": round(busy, 2),
        "live": plan.live,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

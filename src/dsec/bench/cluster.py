"""The control plane of a cluster, alone: real NATS servers, real apiservers over HTTP, and simulated edges that join,
beat and answer as real ones do, but make sandboxes at once. All of it, and who asks, is on this machine.

`creates_per_s`: batches as trainers ask for them (a task of the published size, cut into a request for each of its
environments), several trainers at a time, each sandbox placed and acknowledged. `single_per_api_core`: creations one by
one with a key each, over the CPU time of the apiserver that they went through. `overhead_p50_ms`: such a creation
through an apiserver, less the same straight at an edge. `burst32k_s`: one request for so many, until the last is
acknowledged. Then the cluster is filled: `mib_for_400k` is the memory of all apiservers (the watchers are in them) and
NATS servers then, `imbalance` how much fuller the fullest node is than the mean after a tenth has ended and come again,
some times over (`imbalance_burst`: right after the burst), `heartbeat_core` the share of a core that apiservers and
NATS servers use while nobody asks for anything, `heartbeat_floor` what of it goes on when there is no edge any more.
`locality`: how often a sandbox came to a node that had held its environment's layers before its task came, over chance,
in the later half of the times that a tenth ended and came again; `locality_from_empty`: in the batches, which begin
with no layer anywhere.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import aiohttp
import click
import msgspec
import uvloop
from msgspec import Struct

from dsec.bench.cluster_place import ClusterPlace, running
from dsec.bench.meter import cpu_percent, cpu_s, resident_kib
from dsec.bench.output import say, write_result
from dsec.bench.rounds import percentile
from dsec.bench.running import run_bench
from dsec.cluster.bus import open_bus
from dsec.cluster.credentials import read_credentials
from dsec.cluster.wire import ORDER_S, Member, sign
from dsec.edge.client import Principal
from dsec.edge.kept import BatchItem
from dsec.spec.sandbox import SandboxSpec

BURST = 32_000
TASK_P50, TASK_SIGMA = 2528, math.log(7969 / 2528) / 1.2816
FAN_P50, FAN_SIGMA = 3, math.log(28 / 3) / 1.2816
ENVIRONMENTS = 2000
MEMORY_BYTES = 640 << 20
SETTLE_S = 6.0
"""Until what has just happened costs nothing any more."""
_item = msgspec.json.Decoder(BatchItem).decode
_encode = msgspec.json.Encoder().encode


class Plan(Struct, frozen=True):
    """What to measure."""

    edges: int
    servers: int
    apiservers: int
    seconds: float
    trainers: int
    singles: int
    burst: int
    live: int
    turns: int
    idle_s: float


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--edges", type=click.IntRange(1, 2000), default=160, show_default=True)
@click.option("--servers", type=click.IntRange(1, 5), default=3, show_default=True, help="Of NATS.")
@click.option("--apiservers", type=click.IntRange(1, 16), default=2, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.5), default=15.0, show_default=True, help="Of batches.")
@click.option("--trainers", type=click.IntRange(1, 256), default=8, show_default=True, help="That ask at a time.")
@click.option("--singles", type=click.IntRange(10), default=2000, show_default=True, help="Creations one by one.")
@click.option("--burst", type=click.IntRange(1, 32768), default=BURST, show_default=True)
@click.option("--live", type=click.IntRange(1), default=400_000, show_default=True, help="Sandboxes in the end.")
@click.option("--turns", type=click.IntRange(2), default=10, show_default=True, help="A tenth ends and comes again.")
@click.option("--idle-s", type=click.FloatRange(0.5), default=20.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(as_json: bool, **fields: Any) -> int:
    result = run_bench(measure(Plan(**fields)), uvloop.new_event_loop)
    write_result(result, as_json=as_json)
    return 1 if result["failures"] else 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench cluster", standalone_mode=False) or 0)


async def measure(plan: Plan) -> dict[str, Any]:
    """All figures, by their keys. Raises `Unavailable` where the cluster doesn't start."""
    say(f"starting {plan.servers} NATS servers, {plan.apiservers} apiservers, {plan.edges} edges")
    async with running(plan.edges, servers=plan.servers, apiservers=plan.apiservers) as place:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            return await _measure(plan, place, _Trainers(place, session))


async def _measure(plan: Plan, place: ClusterPlace, trainers: _Trainers) -> dict[str, Any]:
    await trainers.batch(place.apis[0], "warm", 64)
    control = [*place.api_pids, *place.nats_pids]
    through, straight = await trainers.overhead(min(400, plan.singles))
    overhead = percentile(through, 50) - percentile(straight, 50)
    say(f"a creation: {percentile(through, 50):.2f} ms, straight at an edge {percentile(straight, 50):.2f}")
    cpu, began = cpu_s(place.api_pids[:1]), time.perf_counter()
    await trainers.singles(plan.singles)
    single_cpu, single_s = cpu_s(place.api_pids[:1]) - cpu, time.perf_counter() - began
    say(f"one by one: {plan.singles / single_s:.0f}/s, {single_cpu / plan.singles * 1e6:.0f} us of the apiserver's CPU")
    before, cpu, api_cpu = await place.ask("look"), cpu_s(control), cpu_s(place.api_pids)
    rate, count = await trainers.steady(plan.trainers, plan.seconds)
    after = await place.ask("look")
    batch_cpu, batch_api_cpu = cpu_s(control) - cpu, cpu_s(place.api_pids) - api_cpu
    from_empty = _Locality(before, after)
    say(
        f"batches: {rate:.0f}/s, {batch_cpu / count * 1e6:.0f} us of control plane each; layers {from_empty.times:.2f}x"
    )
    began = time.perf_counter()
    await trainers.batch(place.apis[0], "burst", plan.burst)
    burst_s = time.perf_counter() - began
    burst = _imbalance((await place.ask("look"))["live"])
    say(f"burst of {plan.burst}: {burst_s:.2f} s, fullest {burst:.1%} over the mean")
    await trainers.fill(plan.trainers, plan.live)
    for turn in range(plan.turns):
        if turn == plan.turns // 2:
            before = await place.ask("look")
        await place.ask("end", count=plan.live // 10)
        await asyncio.sleep(2.0)
        await trainers.fill(plan.trainers, plan.live)
    await asyncio.sleep(3.0)
    after = await place.ask("look")
    live, locality = after["live"], _Locality(before, after)
    say(f"{sum(live)} live; layers {locality.times:.2f}x")
    heartbeat = await cpu_percent(place.api_pids, plan.idle_s) / 100
    heartbeat_nats = await cpu_percent(place.nats_pids, plan.idle_s) / 100
    mib = {pid: resident_kib(pid) / 1024 for pid in control}
    await place.end_edges()
    await asyncio.sleep(SETTLE_S)
    floor = await cpu_percent(control, plan.idle_s) / 100
    return {
        "creates_per_s": round(rate, 1),
        "burst32k_s": round(burst_s, 3),
        "overhead_p50_ms": round(overhead, 3),
        "mib_for_400k": round(sum(mib.values()), 1),
        "imbalance": round(_imbalance(live), 4),
        "imbalance_burst": round(burst, 4),
        "single_per_api_core": round(plan.singles / single_cpu, 1),
        "single_per_s": round(plan.singles / single_s, 1),
        "heartbeat_core": round(heartbeat + heartbeat_nats, 4),
        "heartbeat_core_nats": round(heartbeat_nats, 4),
        "heartbeat_floor": round(floor, 4),
        "locality": round(locality.times, 2),
        "locality_from_empty": round(from_empty.times, 2),
        "layer_hits": round(locality.rate, 4),
        "create_p50_ms": round(percentile(through, 50), 3),
        "create_p99_ms": round(percentile(through, 99), 3),
        "batch_control_us": round(batch_cpu / count * 1e6, 1),
        "batch_api_us": round(batch_api_cpu / count * 1e6, 1),
        "live": sum(live),
        "mib_apiservers": round(sum(mib[pid] for pid in place.api_pids), 1),
        "mib_nats": round(sum(mib[pid] for pid in place.nats_pids), 1),
        "edges": plan.edges,
        "servers": plan.servers,
        "apiservers": plan.apiservers,
        "failures": trainers.failures,
    }


class _Locality:
    """Of what was made between two looks at the edges."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        hits, by_chance, asked = (after[name] - before[name] for name in ("hits", "by_chance", "asked"))
        self.times: float = hits / max(1e-9, by_chance)
        self.rate: float = hits / max(1, asked)


class _Trainers:
    """Who asks."""

    def __init__(self, place: ClusterPlace, session: aiohttp.ClientSession) -> None:
        self.failures = 0
        self._place = place
        self._session = session
        self._random = Random(11)
        self._headers = {"authorization": f"Bearer {place.key}", "content-type": "application/json"}

    async def batch(self, api: str, run: str, count: int, environment: str = "e0") -> int:
        """One request for many; returns how many there are."""
        body = _encode({"spec": _spec(environment, run), "count": count})
        target = f"{api}/v1/sandboxes:batch?key={secrets.token_urlsafe(12)}"
        made = 0
        async with self._session.post(target, data=body, headers=self._headers) as answer:
            if answer.status != 200:
                say(f"refused: {answer.status} {(await answer.text())[:200]}")
                self.failures += count
                return 0
            async for line in answer.content:
                item = _item(line)
                if item.sandbox is None:
                    self.failures += 1
                    if self.failures < 5:
                        say(f"failed: {item.error}")
                else:
                    made += 1
        return made

    async def steady(self, trainers: int, seconds: float) -> tuple[float, int]:
        """Sandboxes a second, and how many there were, while so many trainers ask for tasks one after the other."""
        began = time.perf_counter()
        counts = await asyncio.gather(*(self._trainer(n, began + seconds) for n in range(trainers)))
        return sum(counts) / (time.perf_counter() - began), sum(counts)

    async def _trainer(self, number: int, until: float) -> int:
        made = 0
        while time.perf_counter() < until:
            api = self._place.apis[number % len(self._place.apis)]
            for run, environment, count in self._task():
                made += await self.batch(api, run, count, environment)
                if time.perf_counter() >= until:
                    break
        return made

    def _task(self) -> Iterator[tuple[str, str, int]]:
        rng = self._random
        size = max(1, round(min(BURST, TASK_P50 * math.exp(TASK_SIGMA * rng.gauss(0.0, 1.0)))))
        fan = max(1, min(size, 400, round(FAN_P50 * math.exp(FAN_SIGMA * rng.gauss(0.0, 1.0)))))
        run = f"run-{secrets.token_hex(4)}"
        for n in range(fan):
            yield run, f"e{int(ENVIRONMENTS * rng.random() ** 2)}", size // fan + (n < size % fan)

    async def fill(self, trainers: int, live: int) -> None:
        """Until there are so many."""

        async def one(number: int, count: int) -> None:
            for run, environment, asked in self._task():
                if count <= 0:
                    return
                api = self._place.apis[number % len(self._place.apis)]
                count -= await self.batch(api, run, min(asked, count), environment)

        while (missing := live - sum((await self._place.ask("look"))["live"])) > 0 and not self.failures:
            each = [missing // trainers + (n < missing % trainers) for n in range(trainers)]
            await asyncio.gather(*(one(n, count) for n, count in enumerate(each) if count))

    async def singles(self, count: int, at_once: int = 32) -> None:
        """One by one, so many at a time, through the first apiserver."""
        left = iter(range(count))

        async def one() -> None:
            for _ in left:
                await self._single(self._place.apis[0], self._headers)

        await asyncio.gather(*(one() for _ in range(at_once)))

    async def overhead(self, count: int) -> tuple[list[float], list[float]]:
        """Milliseconds of creations through an apiserver, and straight at an edge, in turns."""
        bus = await open_bus(self._place.urls, read_credentials(self._place.keys / "apiserver.json"))
        try:
            members = await bus.bucket("dsec_members", Member, replicas=self._place.servers)
            _, member = await members.get("1")
        finally:
            await bus.close()
        assert member is not None
        through, straight = [], []
        for number in range(count):
            bearer = sign(
                Principal("default"),
                secret=member.secret,
                incarnation=member.claim.incarnation,
                until=time.time() + ORDER_S,
                holder="bench",
            )
            direct = {**self._headers, "authorization": f"Bearer {bearer}"}
            api = self._place.apis[number % len(self._place.apis)]
            through.append(await self._single(api, self._headers))
            straight.append(await self._single(member.url, direct))
        return through, straight

    async def _single(self, url: str, headers: dict[str, str]) -> float:
        target = f"{url}/v1/sandboxes?key={secrets.token_urlsafe(12)}"
        environment = f"e{int(ENVIRONMENTS * self._random.random() ** 2)}"
        began = time.perf_counter()
        async with self._session.post(target, data=_encode(_spec(environment, "single")), headers=headers) as answer:
            await answer.read()
            self.failures += answer.status != 201
        return (time.perf_counter() - began) * 1e3


def _spec(environment: str, run: str) -> SandboxSpec:
    return SandboxSpec(environment=environment, memory_bytes=MEMORY_BYTES, run=run)


def _imbalance(live: list[int]) -> float:
    """How much fuller the fullest is than the mean."""
    return max(live) * len(live) / max(1, sum(live)) - 1

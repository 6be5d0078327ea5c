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
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from guardian import Guardian
from spaces import Space, Spaces

import server_kit
from dsec import AsyncClient
from dsec.app import read_config
from dsec.cluster.credentials import make_cluster
from dsec.kernel import census
from dsec.sdk import _portal
from free_port import free_port
from trees import link_store

SOURCES = Path(__file__).parents[2] / "src"
LOOPBACK = "127.0.0.1"
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

    def __init__(
        self,
        name: str,
        log: Path,
        arguments: list[str],
        port: int,
        environment: dict[str, str],
        *,
        space: Space | None = None,
        guardian: Guardian | None = None,
    ) -> None:
        """`space`: where its network is. `guardian`: who ends it if we can't."""
        self.name = name
        self.log = log
        self.port = port
        self.arguments = arguments
        self.space = space
        self.address = LOOPBACK if space is None else space.address
        self.url = f"http://{self.address}:{port}"
        self._guardian = guardian
        self.environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        self.spawn()
        self.wait()

    def spawn(self) -> None:
        """Begin to start it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.arguments if self.space is None else self.space.command(*self.arguments),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[] if self.space is None else [self.space.descriptor],
            )
        if self._guardian is not None:
            self._guardian.tell("pid", self._process.pid)

    def wait(self) -> None:
        """Until it listens."""
        until(lambda: self.listens() or self._process.poll() is not None, f"{self.name} starts")  # type: ignore[union-attr]
        assert self._process.poll() is None, self.log.read_text()[-3000:]

    def listens(self) -> bool:
        with socket.socket() as sock:
            sock.settimeout(5)
            return not sock.connect_ex((self.address, self.port))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self, paused: bool) -> None:
        """SIGSTOP or SIGCONT."""
        os.kill(self.pid, signal.SIGSTOP if paused else signal.SIGCONT)

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


def end_state(state: Path, store: Path | None) -> None:
    """Whatever the edge of this state left on the host."""
    if census.take(state) != census.Census() or read_config(state).run.exists():
        server = Last(state, store)
        try:
            server.start()
        finally:
            if server.alive():
                server.stop()
    assert not read_config(state).run.exists()


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
        spaces: Spaces | None = None,
    ) -> None:
        """`store`: the shared one of all edges. `tls`: to the NATS servers. `spaces`: where each process has a network
        of its own; it must be possible to reach them from here."""
        self.spaces = spaces
        self.guardian = None if spaces is None else Guardian(directory / "guardian.log")
        self.directory = directory
        self.store = store
        self.states = states
        make_cluster(directory / "keys", len(states) + 2)
        secured = nats_tls(directory) if tls else ""
        self.replicas = servers
        places = [self._space() for _ in range(servers)]
        ports = [(free_port(), free_port()) for _ in range(servers)]
        hosts = [LOOPBACK if place is None else place.address for place in places]
        routes = ", ".join(f"nats-route://{host}:{route}" for host, (_, route) in zip(hosts, ports, strict=True))
        self.nats = []
        binary = shutil.which("nats-server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert binary is not None, "nats-server comes with the extra `cluster`"
        for number, (port, route) in enumerate(ports):
            conf = directory / f"nats-{number}.conf"
            host = hosts[number]
            cluster = f"cluster {{ name: c, listen: {host}:{route}, routes: [{routes}] }}\n" if servers > 1 else ""
            conf.write_text(
                f'server_name: n{number}\nlisten: {host}:{port}\ninclude "keys/nats.conf"\n{secured}'
                f'jetstream {{ store_dir: "{directory}/nats-{number}" }}\n' + cluster
            )
            self.nats.append(self._process(f"nats-{number}", [binary, "-c", str(conf)], port, space=places[number]))
        self.urls = [
            f"{'tls' if tls else 'nats'}://{host}:{port}" for host, (port, _) in zip(hosts, ports, strict=True)
        ]
        self.apis = [self._api(number) for number in range(apiservers)]
        self.edges = [self._edge(number + 1, state) for number, state in enumerate(states)]
        self.key = ""

    def command(self, verb: str, credentials: str) -> list[str]:
        joined = [part for url in self.urls for part in ("--join", url)]
        keys = str(self.directory / "keys" / f"{credentials}.json")
        plain = [] if self.spaces is None else ["--plain"]
        return [sys.executable, "-m", "dsec.cli.main", *verb.split(), *joined, *plain, "--credentials", keys]

    def _space(self) -> Space | None:
        return None if self.spaces is None else self.spaces.add()

    def _process(
        self, name: str, arguments: list[str], port: int, *, space: Space | None, **environment: str
    ) -> Process:
        log = self.directory / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), **environment}
        return Process(name, log, arguments, port, environment, space=space, guardian=self.guardian)

    def _serving(self, verb: str, credentials: str, port: int, space: Space | None) -> list[str]:
        host = [] if space is None else ["--host", space.address]
        return [*self.command(verb, credentials), "--port", str(port), *host]

    def _api(self, number: int) -> Process:
        port, space = free_port(), self._space()
        arguments = self._serving("apiserver", "apiserver", port, space)
        arguments += ["--lost-after", str(LOST_S), "--replicas", str(self.replicas)]
        return self._process(f"api-{number}", arguments, port, space=space)

    def _edge(self, number: int, state: Path) -> Process:
        port, space = free_port(), self._space()
        arguments = self._serving("edge", f"edge-{number}", port, space)
        arguments += ["--label", f"n={number}", "--on-exit", "destroy"]
        environment = {"DSEC_STATE": str(state)}
        if self.store is not None:
            environment["DSEC_STORE"] = str(self.store)
        if self.guardian is not None:
            self.guardian.tell("state", state, self.store or "")
        return self._process(f"edge-{number}", arguments, port, space=space, **environment)

    def twin(self, edge: Process, state: Path) -> Process:
        """Another process that claims to be this edge, on this state."""
        assert self.guardian is not None
        self.guardian.tell("state", state, self.store or "")
        arguments = [str(free_port()) if word == str(edge.port) else word for word in edge.arguments]
        environment = edge.environment | {"DSEC_STATE": str(state)}
        log = self.directory / f"{edge.name}-twin.log"
        return Process(f"{edge.name}-twin", log, arguments, 0, environment, space=edge.space, guardian=self.guardian)

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
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run(
                arguments, env={**os.environ, "PYTHONPATH": str(SOURCES)}, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return done.stdout.strip()
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.5)

    def client(self, api: int = 0) -> AsyncClient:
        return AsyncClient(self.apis[api].url, self.key)

    def get(self, path: str, api: Process | None = None, *, patience_s: float = PATIENCE_S) -> Any:
        """What an apiserver answers, decoded. Raises OSError."""
        return json.loads(self._ask("GET", path, api, patience_s))

    def post(self, path: str, api: Process | None = None) -> bytes:
        """What an apiserver answers. Raises OSError."""
        return self._ask("POST", path, api, PATIENCE_S)

    def _ask(self, method: str, path: str, api: Process | None, patience_s: float) -> bytes:
        """One that hears nothing of its cluster for a moment is asked again."""
        headers = {"authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{(api or self.apis[0]).url}{path}", method=method, headers=headers)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with urllib.request.urlopen(request, timeout=patience_s) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def cli(self, *arguments: str) -> str:
        """What `dsec ...` prints, as the operator."""
        done = subprocess.run(
            [sys.executable, "-m", "dsec.cli.main", *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCES), "DSEC_URL": self.apis[0].url, "DSEC_API_KEY": self.key},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

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
            return [node["health"] for node in self.get("/v1/nodes", api, patience_s=10)["nodes"]]
        return []

    def all_hear(self) -> None:
        """Each apiserver hears all nodes, however often they went and came in the last minutes: a node that did three
        times is `flapping` for two more."""
        heard = {"well", "flapping"}

        def hears(api: Process) -> bool:
            return sum(map(heard.__contains__, self.healths(api))) == len(self.edges)

        until(lambda: all(hears(api) for api in self.apis), "all nodes are heard")

    def end(self) -> None:
        """All processes, and what the edges made on the host."""
        for some in (self.edges, self.apis, self.nats):
            for process in some:
                process.signal()
            for process in some:
                process.stop()
        for state in self.states:
            end_state(state, self.store)
        if self.guardian is not None:
            self.guardian.done()

    def logs(self) -> str:
        """The ends of all logs, for a failure."""
        names = [process.log for process in (*self.nats, *self.apis, *self.edges)]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in names if path.exists())


def own_store(state: Path) -> Path:
    """Nodes have layers of their own; what doesn't change is linked."""
    common = (state / "store").resolve()
    (state / "store").unlink()
    link_store(common, state / "store")
    for base in ("chunks.db", "chunks.db-wal", "chunks.db-shm"):
        (state / "store" / base).unlink(missing_ok=True)
    return state


@contextmanager
def apart() -> Iterator[Spaces]:
    """Namespaces of their own for a cluster; this thread is in another one of them, and the sync client's thread of
    meanwhile too. Outside of this it is another, for who is in a namespace reaches nothing outside of it."""
    spaces, outside = Spaces(), _portal._portal
    _portal._portal = None
    try:
        with spaces.add().entered():
            yield spaces
    finally:
        if _portal._portal is not None:
            _portal._portal.close()
        _portal._portal = outside
        spaces.close()


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
    spaces: Spaces | None = None,
) -> Iterator[Cluster]:
    """A cluster; nothing of it is left in the end. `arguments`: more of each apiserver's."""
    cluster = Cluster(directory, states, servers=servers, apiservers=apiservers, store=store, tls=tls, spaces=spaces)
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

"""What the attacks on the egress run against: servers on addresses of the loopback net, and a server of ours whose
operator lets sandboxes reach them by name."""

from __future__ import annotations

import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dsec
from dsec.egress.audit import BURST, WINDOW_S
from dsec.egress.authority import Authority
from server_kit import PATIENCE_S, Server

ECHO = 9000
FLOOD = 9001
TLS = 9443
AUTHORITY = Authority(b"another", "one")
"""Whom nobody trusts who isn't told to."""
FLOOD_BYTES = 64 << 20

PRELUDE = """
import json, socket, ssl, struct, sys, threading, time
def tcp(name, port, timeout=90):
    try:
        return socket.create_connection((name, port), timeout)
    except OSError as error:
        return type(error).__name__
def reach(name, port):
    s = tcp(name, port)
    if isinstance(s, str):
        return s
    try:
        s.sendall(b"hello")
        return s.recv(100).decode("latin-1")
    except OSError as error:
        return type(error).__name__
def talk(name, port, data, end=False):
    s = tcp(name, port)
    if isinstance(s, str):
        return s
    got = b""
    try:
        s.sendall(data)
        if end:
            s.shutdown(socket.SHUT_WR)
        while True:
            some = s.recv(65536)
            if not some:
                return got.decode("latin-1")
            got += some
            if not end and (b"\\r\\n\\r\\nok" in got or b"reason" in got):
                return got.decode("latin-1")
    except OSError as error:
        return got.decode("latin-1") + type(error).__name__
"""


class Outside:
    """Servers at one address; keeps what they were sent."""

    def __init__(self) -> None:
        self.address = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}.{secrets.randbelow(200) + 2}"
        self.received = bytearray()
        self.flooded = 0
        self.refused = 0
        self._servers: list[socketserver.ThreadingTCPServer] = []

    def serve(self, port: int, answer: Callable[[socket.socket], None]) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                answer(self.request)

        class Listener(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 512

        listener = Listener((self.address, port), Handler)
        self._servers.append(listener)
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        for each in self._servers:
            each.shutdown()
            each.server_close()

    # --- what they do ---

    def http(self, connection: socket.socket) -> None:
        """A sloppy HTTP server: takes whatever comes, answers once for each head it sees."""
        held = b""
        while data := _some(connection):
            self.received += data
            held += data
            while b"\r\n\r\n" in held:
                head, _, held = held.partition(b"\r\n\r\n")
                redirect = b"Location: http://other.example/\r\n" if b"/redirect" in head else b""
                status = b"302 Found" if redirect else b"200 OK"
                connection.sendall(b"HTTP/1.1 " + status + b"\r\n" + redirect + b"Content-Length: 2\r\n\r\nok")

    def echo(self, connection: socket.socket) -> None:
        whole = b""
        while data := _some(connection):
            self.received += data
            whole += data
            connection.sendall(data)
        connection.sendall(b"<end>")

    def tls(self, connection: socket.socket) -> None:
        """HTTP over TLS, with a certificate that only its maker believes."""
        context = AUTHORITY.context("tls.example")
        try:
            with context.wrap_socket(connection, server_side=True) as wrapped:
                self.http(wrapped)
        except OSError:
            self.refused += 1

    def flood(self, connection: socket.socket) -> None:
        self.flooded = 0
        try:
            while self.flooded < FLOOD_BYTES:
                self.flooded += connection.send(bytes(65536))
        except OSError:
            pass


def _some(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


class World:
    """All of it."""

    def __init__(self, outside: Outside, server: Server, client: dsec.Client) -> None:
        self.outside = outside
        self.server = server
        self.client = client


FILE = """
[permissions.good]
hosts = ["good.example"]
ports = [80, 443, {echo}, {flood}]
private = true

[permissions.few]
hosts = ["few.example"]
ports = [{echo}]
private = true
connections = 3

[permissions.little]
hosts = ["little.example"]
ports = [{echo}]
private = true
bytes = 100000

[permissions.inner]
hosts = ["metadata.example", "mapped.example"]
ports = [80]
private = true

[permissions.tls]
hosts = ["tls.example"]
ports = [{tls}]
private = true

[limits]
head_s = 6.0

[hosts]
"good.example" = ["{address}"]
"few.example" = ["{address}"]
"little.example" = ["{address}"]
"public.example" = ["{address}"]
"tls.example" = ["{address}"]
"metadata.example" = ["169.254.169.254"]
"mapped.example" = ["::ffff:169.254.169.254"]
"""


GATEWAYS = """
[http."api.example"]
url = "http://{address}"
headers = {{ Authorization = "Bearer secret:api" }}

[http."tls.example"]
url = "https://{address}:{tls}"
"""
SECRET = "sesame-open-sesame"
SECRETS = f"""
[api]
value = "{SECRET}"
hosts = ["{{address}}:80"]
"""


@contextmanager
def world(state: Path) -> Iterator[World]:
    with ExitStack() as undo:
        outside = Outside()
        undo.callback(outside.close)
        for port, answer in ((80, outside.http), (443, outside.echo), (ECHO, outside.echo), (FLOOD, outside.flood)):
            outside.serve(port, answer)
        (state / "network.toml").write_text(FILE.format(address=outside.address, echo=ECHO, flood=FLOOD, tls=TLS))
        outside.serve(TLS, outside.tls)
        (state / "gateways.toml").write_text(GATEWAYS.format(address=outside.address, tls=TLS))
        (state / "secrets.toml").write_text(SECRETS.format(address=outside.address))
        (state / "secrets.toml").chmod(0o600)
        server = Server(state)
        server.start()
        undo.callback(server.stop)
        endpoint = server.endpoint()
        client = undo.enter_context(dsec.Client(endpoint.url, endpoint.api_key))
        yield World(outside, server, client)


def inside(box: dsec.Sandbox, code: str) -> Any:
    """What a program inside finds: the value of `found`."""
    program = f"{PRELUDE}\n{code}\nprint(json.dumps(found))"
    result = box.commands.run(["python3", "-c", program], command_timeout_s=300)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def events(box: dsec.Sandbox, after: int = 0) -> list[dsec.SandboxEvent]:
    return [each for each in box.events() if each.seq > after]


def reasons(box: dsec.Sandbox, after: int, kind: str = "connection_refused") -> set[str]:
    return {each.data.get("reason", "") for each in events(box, after) if each.type == kind}


def heard(
    box: dsec.Sandbox, after: int, kind: str, enough: Callable[[list[dict[str, Any]]], Any]
) -> list[dict[str, Any]]:
    """Events of a kind, once there are `enough`: a connection's end is on record a moment after its program's."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = [each.data for each in events(box, after) if each.type == kind]
        if enough(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def now(box: dsec.Sandbox) -> int:
    """Where its events stand, with room for more that are written one by one: beyond a burst they are added up."""
    since = time.time() - WINDOW_S
    if sum(each.time > since for each in events(box)) > BURST // 2:
        time.sleep(WINDOW_S + 0.5)
    return max(each.seq for each in events(box))


GET = "GET {path} HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n"
EVIL = "GET /evil HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n"

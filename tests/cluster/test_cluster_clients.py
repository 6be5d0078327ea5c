"""Every family of clients through apiservers, of a cluster whose every way between processes is TLS: E2B's unmodified
client, SWE-ReX's calls, programs' ports by host name."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import nats
import pytest
from cluster_kit import PATIENCE_S, Cluster, running
from nats.errors import Error as NatsError

from dsec import AsyncClient
from dsec.cluster.credentials import read_credentials
from dsec.spec.ids import edge_of

sys.path.insert(0, str(Path(__file__).parents[1] / "e2b"))
import clients

pytestmark = [pytest.mark.root, pytest.mark.slow]
SMALL: dict[str, Any] = {"memory_bytes": 64 << 20, "disk_bytes": 64 << 20}
SCRIPTS = ("cases_async.py", "cases_sandboxes.py")
CASES = [(script, case) for script in SCRIPTS for case in clients.cases(script)]
WEB = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("upgrade") == "websocket":
            import base64, hashlib
            k = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(k.encode()).digest()).decode())
            self.end_headers(); self.wfile.flush()
            head = self.rfile.read(2); n = head[1] & 127
            mask = self.rfile.read(4); data = self.rfile.read(n)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(data)).upper()
            self.wfile.write(bytes([0x81, len(data)]) + data); self.wfile.flush()
            self.close_connection = True
            return
        body = b"from inside " + self.path.encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), H).serve_forever()
"""


@pytest.fixture(scope="module")
def cluster(state_over: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("clients")
    states = [state_over(directory / f"state-{number}") for number in (1, 2)]
    with running(directory, states, servers=1, tls=True, prepare=lambda made: made.use(made.edges, tls="")) as made:
        yield made


@pytest.fixture
async def one(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with cluster.client(0) as client:
        yield client


@pytest.fixture(scope="module")
def outcomes(cluster: Cluster) -> dict[str, dict[str, str | None]]:
    """Of the scripts, each through another apiserver."""
    version = clients.VERSIONS[0]
    return {
        script: clients.run(script, version, f"http://127.0.0.1:{api.port}", cluster.key)
        for script, api in zip(SCRIPTS, cluster.apis, strict=True)
    }


@pytest.mark.parametrize(("script", "case"), CASES, ids=[f"{script[6:-3]}-{case[5:]}" for script, case in CASES])
def test_e2b_client(outcomes: dict[str, dict[str, str | None]], script: str, case: str) -> None:
    assert case in outcomes[script], "the script didn't come that far"
    assert outcomes[script][case] is None, outcomes[script][case]


async def test_ports_by_host_name(cluster: Cluster, one: AsyncClient) -> None:
    """HTTP and WebSockets to a program inside, through each apiserver; private ports want a credential."""
    box = await one.create("debian", public_ports=[8000], **SMALL)
    await box.files.write("/web.py", WEB)
    await box.commands.start(["python3", "/web.py"])
    shut = await one.create("debian", **SMALL)
    key = {"authorization": f"Bearer {cluster.key}"}
    async with aiohttp.ClientSession() as http:
        for api in cluster.apis:
            base, name = f"127.0.0.1:{api.port}", f"8000-{box.id}.localhost"
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with http.get(f"http://{base}/a?b=c", headers={"host": name}) as answer:
                        if answer.status == 200:
                            assert await answer.text() == "from inside /a?b=c"
                            break
                    await asyncio.sleep(0.1)
            async with http.ws_connect(f"http://{base}/", headers={"host": name}) as socket:
                await socket.send_str("shout")
                assert (await socket.receive_str()) == "SHOUT"
            for headers, status in (({}, 401), (key, 502), ({"authorization": "Bearer dsk_" + "x" * 43}, 401)):
                named = {"host": f"8000-{shut.id}.localhost", **headers}
                async with http.get(f"http://{base}/", headers=named) as answer:
                    assert answer.status == status, await answer.text()
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(f"http://{base}/", headers=named)
                assert refused.value.status == status
            wrong = {"host": f"8000-{box.id[:-1]}{'1' if box.id[-1] == '0' else '0'}.localhost"}
            async with http.get(f"http://{base}/", headers=wrong) as answer:
                assert answer.status == 502
    await one.kill_many([box.id, shut.id])


async def test_swerex_calls(cluster: Cluster, one: AsyncClient) -> None:
    box = await one.create("debian", **SMALL)
    async with aiohttp.ClientSession() as http:
        for api, place, key in (
            (cluster.apis[0], f"/swerex/{box.id}", cluster.key),
            (cluster.apis[1], f"/swerex/{box.id}", box.info.token),
            (cluster.apis[1], "", box.info.token),
        ):
            base, headers = f"http://127.0.0.1:{api.port}{place}", {"x-api-key": key}
            async with http.get(f"{base}/is_alive", headers=headers) as answer:
                assert (await answer.json())["is_alive"] is True
            body = {"command": "echo $((6*7))", "shell": True}
            async with http.post(f"{base}/execute", json=body, headers=headers) as answer:
                assert (await answer.json())["stdout"] == "42\n"
            for session in ({"session": "s"},):
                async with http.post(f"{base}/create_session", json=session, headers=headers) as answer:
                    assert answer.status == 200
                run = {"command": "cd /tmp; pwd", **session}
                async with http.post(f"{base}/run_in_session", json=run, headers=headers) as answer:
                    assert (await answer.json())["output"].strip() == "/tmp"
                async with http.post(f"{base}/close_session", json=session, headers=headers) as answer:
                    assert answer.status == 200
        async with http.get(f"{base}/is_alive", headers={"x-api-key": "dsk_" + "x" * 43}) as answer:
            assert answer.status == 401
            assert "detail" in await answer.json()
    await box.kill()


async def test_the_cluster_as_one_node(cluster: Cluster, one: AsyncClient) -> None:
    boxes = [await one.create("debian", **SMALL, labels={"node/n": str(edge)}) for edge in (1, 2)]
    assert [edge_of(box.id) for box in boxes] == [1, 2]
    node = cluster.get("/v1/node", cluster.apis[1])
    nodes = cluster.get("/v1/nodes")["nodes"]
    assert node["live"] == 2
    assert node["max_live"] == sum(each["max_live"] for each in nodes)
    await one.kill_many([box.id for box in boxes])


async def test_nobody_gets_between(cluster: Cluster) -> None:
    """Servers show a certificate of the authority; edges the one that they named; nothing listens without."""
    assert all(node["url"].startswith("https://") for node in nodes_of(cluster))
    async with aiohttp.ClientSession() as http:
        for edge in cluster.edges:
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://127.0.0.1:{edge.port}/healthz")
            with pytest.raises(aiohttp.ClientConnectorCertificateError, match="self-signed"):
                await http.get(f"https://127.0.0.1:{edge.port}/healthz")
    mine = read_credentials(cluster.directory / "keys" / "edge-1.json")
    strict = ssl.create_default_context()  # without the tests' authority
    plain = [url.replace("tls://", "nats://") for url in cluster.urls]
    for urls, options in ((cluster.urls, {"tls": strict}), (plain, {})):
        with pytest.raises((NatsError, OSError)):
            await nats.connect(
                urls, nkeys_seed_str=mine.seed, allow_reconnect=False, connect_timeout=3, error_cb=unheard, **options
            )


async def test_an_edge_that_shows_another_certificate_is_not_believed(cluster: Cluster, one: AsyncClient) -> None:
    """Somebody at its address: another key pair, the same name."""
    box = await one.create("debian", **SMALL, labels={"node/n": "2"})
    edge = cluster.edges[1]
    edge.kill()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.directory / "nats.pem", cluster.directory / "nats.key")
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65536))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", edge.port, ssl=context, reuse_address=True)
    try:
        for path in (f"/v1/sandboxes/{box.id}", "/v1/sandboxes"):
            status, body = await asyncio.to_thread(ask, cluster, path)
            assert status == 503, body
            assert json.loads(body)["code"] == "unavailable"
    finally:
        server.close()
        await server.wait_closed()
    assert not [each for each in heard if each], "and is told nothing"
    edge.start()
    assert (await (await one.connect(box.id)).commands.run(["echo", "back"])).stdout == "back\n"
    await box.kill()


async def unheard(error: Exception) -> None:
    """It is raised too."""


def nodes_of(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.get("/v1/nodes")["nodes"]
    return found


def ask(cluster: Cluster, path: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.apis[0].port}{path}", headers={"authorization": f"Bearer {cluster.key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read()

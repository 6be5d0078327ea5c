"""What the tests of API, SDK and CLI share: a real server on a real socket over a real edge with the fake backend, and
a proxy that cuts connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from edge_kit import Kit

from dsec import AsyncClient
from dsec.api.app import Api
from dsec.api.control import EnvironmentInfo
from dsec.api.serve import ApiServer
from dsec.backends.fncall.pool import Jails
from dsec.backends.fncall.service import FunctionService
from dsec.builder.fetching import Downloads
from dsec.builder.service import BuildService
from dsec.edge.config import SystemClock
from dsec.edge.node import Edge
from dsec.egress.node import Egress
from dsec.errors import Unsupported
from dsec.grading.containers import ContainerRunner
from dsec.grading.judge import Judge
from dsec.grading.verifier import Verifier
from dsec.kernel.cgroups import Shape, Slot
from dsec.plan.permissions import BUILT_IN
from dsec.store.environments import EnvironmentStore
from dsec.store.service import LayerService

T = TypeVar("T")
ENVIRONMENTS = [EnvironmentInfo("base", ["0123456789abcdef"])]


class Served:
    """A server that runs in the test's event loop."""

    def __init__(self, kit: Kit, edge: Edge, server: ApiServer, key: str) -> None:
        self.kit = kit
        self.edge = edge
        self.server = server
        self.key = key
        self.url = server.url

    def client(self, url: str | None = None, **options: Any) -> AsyncClient:
        return AsyncClient(url or self.url, self.key, **options)

    async def restart(self) -> None:
        """Another server over another edge on the same state and port; the fake machine's guests live on."""
        port = int(self.url.rpartition(":")[2])
        await self.server.stop()
        await self.edge.close(keep=True)
        self.edge = await self.kit.open()
        self.server = ApiServer(Api(self.edge), "127.0.0.1", port, grace_s=0.5)
        await self.server.start()

    async def raw(
        self, method: str, path: str, body: bytes = b"", *, key: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """One request by hand: status, headers, body."""
        lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}"]
        if key != "":
            lines.append(f"authorization: Bearer {key or self.key}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return await self.raw_bytes("\r\n".join([*lines, "", ""]).encode() + body)

    async def raw_bytes(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await self.dial()
        writer.write(request)
        answer = await reader.read()
        writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines)
        if fields.get("transfer-encoding") == "chunked":
            rest = unchunked(rest)
        return int(status.split()[1]), fields, rest

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port))

    async def error(self, method: str, path: str, body: bytes = b"", **options: Any) -> tuple[int, str, str]:
        """Status, code and message of a request that fails; checks the form that all errors have."""
        status, headers, answer = await self.raw(method, path, body, **options)
        fields = json.loads(answer)
        assert headers["content-type"].startswith("application/json")
        assert headers["x-request-id"]
        assert set(fields) <= {"code", "message", "remedy", "retryable", "infra", "details"}
        return status, fields["code"], fields["message"]


def unchunked(data: bytes) -> bytes:
    """A chunked body, as far as it is whole."""
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            break
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


class NoJails:
    """A host that can't make jails for function calls (`JailHost`)."""

    def native_part(self) -> int:
        raise NotImplementedError

    async def make(self, name: str, layers: Sequence[str], project: str, shape: Shape) -> socket.socket:
        raise Unsupported("no function calls here")

    async def destroy(self, name: str) -> None:
        raise NotImplementedError

    def take_slot(self, owner: str, project: str, shape: Shape) -> Slot:
        raise NotImplementedError

    def promise(self, change_bytes: int) -> None:
        raise NotImplementedError

    def give_back(self, slot: Slot) -> None:
        raise NotImplementedError


def make_api(root: Path, edge: Any) -> Api:
    """The application with all its parts: layers are real, sandboxes are not."""
    environments = EnvironmentStore(root / "layers")
    layers = LayerService(environments)
    for name in ("base", "other"):
        layers.environments.put(name, ())

    def written(sandbox_id: str) -> tuple[Path, int]:
        return root / "written" / sandbox_id, 0

    @asynccontextmanager
    async def still(sandbox_id: str) -> AsyncIterator[Path]:
        async with edge.still(sandbox_id):
            yield written(sandbox_id)[0]

    return Api(
        edge,
        environments=lambda project: ENVIRONMENTS,
        layers=layers,
        builder=BuildService(layers, edge, written, Downloads(Egress(definitions=BUILT_IN)), edge.charges),
        verifier=Verifier(
            edge,
            written=still,
            lending=layers.environments.lending,
            scratch=layers.layers.scratch,
        ),
        functions=FunctionService(
            Jails(NoJails(), lambda name, project: (environments.get(name, project).layers, {}), SystemClock())
        ),
        judge=Judge(ContainerRunner(edge), layers.environments.around),
    )


@asynccontextmanager
async def served(
    root: Path, edge_type: Callable[[Edge], Any] = lambda edge: edge, *, whole: bool = False
) -> AsyncIterator[Served]:
    """`edge_type`: wraps the edge that the API sees. `whole`: with layers, builds and verification."""
    kit = Kit(root)
    edge = await kit.open()
    key = await edge.create_key("project", "test")
    seen = edge_type(edge)
    api = make_api(root, seen) if whole else Api(seen, environments=lambda project: ENVIRONMENTS)
    server = ApiServer(api, "127.0.0.1", 0, grace_s=0.5)
    await server.start()
    served = Served(kit, edge, server, key)
    try:
        yield served
    finally:
        await served.server.stop()
        await served.edge.close(keep=False)


@contextmanager
def served_in_thread(root: Path) -> Iterator[tuple[Served, Callable[[Coroutine[Any, Any, T]], T]]]:
    """The same with an event loop of its own, for sync callers; also gives a way to run something in that loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(120)

    manager = served(root)
    try:
        yield call(manager.__aenter__()), call
    finally:
        with contextlib.suppress(StopAsyncIteration):
            call(manager.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class CutProxy:
    """Between a client and the server. Cuts a connection after so many bytes of an answer."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts: list[int] = []
        """Each connection takes the first one off: how many bytes of answers it lets through. Empty: all."""
        self.connections = 0
        self.answered = 0
        """Bytes of answers that went through in all."""
        self.on_cut: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> CutProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Every connection, now."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = self.cuts.pop(0) if self.cuts else None
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}

        async def forth() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    far_writer.write(data)
                    await far_writer.drain()
            far_writer.close()

        task = asyncio.create_task(forth())
        with contextlib.suppress(ConnectionError):
            while left is None or left > 0:
                data = await far_reader.read(65536 if left is None else left)
                if not data:
                    break
                if left is not None:
                    left -= len(data)
                self.answered += len(data)
                writer.write(data)
                await writer.drain()
        if left == 0:
            self.on_cut()
        writer.close()  # what was let through arrives, then the end
        far_writer.transport.abort()
        task.cancel()
        self._writers -= {writer, far_writer}

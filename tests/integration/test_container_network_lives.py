"""The network of a container sandbox outlives its edge, and goes with the sandbox however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_kit import Box, NetworkWatch, make, open_backend, until

from dsec.backends.container.instance import ContainerInstance
from dsec.errors import SandboxNotFound
from dsec.spec.operations import Chunk

pytestmark = pytest.mark.root

HERE = Path(__file__).parent
PROGRAM = """
held = []
for i in range(50):
    s = socket.socket(); s.setblocking(False); held.append(s)
    s.connect_ex(('198.18.0.7', 1000 + i))
for s in held: s.settimeout(150)
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(150); u.connect(('9.9.9.9', 53)); u.send(b'who')
open('/tmp/connected', 'w').close()
print(sorted(s.makefile().read() for s in held) == [f'198.18.0.7:{1000 + i}' for i in range(50)], u.recv(99))
"""


@pytest.fixture
def first_edge(debian_state: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(HERE / "network_edge.py"), str(debian_state), str(run_of(tmp_path)), PROGRAM]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as edge:
        yield edge
        edge.kill()


def run_of(tmp_path: Path) -> Path:
    return tmp_path / f"run-{os.getpid()}"


async def test_connections_wait_for_the_next_edge(
    first_edge: subprocess.Popen[bytes], debian_state: Path, tmp_path: Path
) -> None:
    assert first_edge.stdout is not None
    line = first_edge.stdout.readline()
    assert line, "the first edge failed: see its words above"
    told = json.loads(line)
    await until(Path(f"/proc/{told['pid']}/root/tmp/connected").exists)
    first_edge.kill()
    first_edge.wait()
    backend = open_backend(debian_state, run_of(tmp_path))
    try:
        instance = (await backend.open({told["id"]: told["handle"]}))[told["id"]]
        assert isinstance(instance, ContainerInstance)
        box = Box(backend, told["id"], told["handle"], instance)
        outside = await box.serve()
        operation = instance.channel.find(b"program")
        assert operation is not None
        out = b"".join([piece.data async for piece in operation.read() if isinstance(piece, Chunk)])
        assert out == b"True b'answer to who'\n"
        assert len(outside.seen) == 50
        await box.end()
    finally:
        await backend.close(keep=False)


async def test_a_sandbox_that_dies_lets_go_of_its_namespace(debian_state: Path, tmp_path: Path) -> None:
    backend = open_backend(debian_state, run_of(tmp_path))
    await backend.open({})
    watch = NetworkWatch()
    try:
        box = await make(backend)
        await box.serve()
        watch.add(box.instance.pid, 1)
        os.kill(box.instance.pid, signal.SIGKILL)
        await box.instance.ended()
        await box.end()
        await until(lambda: watch.existing() == set())
        with pytest.raises(SandboxNotFound):
            await box.serve()
    finally:
        watch.close()
        await backend.close(keep=False)

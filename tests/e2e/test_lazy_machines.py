"""MicroVMs of layers that are filled as they are read: what a node never had boots there."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_lazy_live import node, processes, publish

from dsec import Client, Sandbox
from dsec.errors import DsecError, SandboxLost
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec
from server_kit import PATIENCE_S, Server, serving

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]

MIB = 1 << 20


@pytest.fixture
def nodes(
    request: pytest.FixtureRequest, debian_store: Path, vm_templates: Path, tmp_path: Path
) -> Iterator[tuple[Server, Server]]:
    """The first makes layers, the second has machines. The parameter: `DSEC_LAZY`."""
    assert vm_templates.parent.joinpath("store", "kernels").is_dir()
    for name in ("shared", "first", "second"):
        (tmp_path / name).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_STORE", str(tmp_path / "shared"))
        patch.setenv("DSEC_VM_ACCEL", "tcg")
        patch.setenv("DSEC_VM_SPARE", "0")
        patch.setenv("DSEC_LAZY", request.param)
        states = [node(debian_store, tmp_path / name) for name in ("first", "second")]
        with serving(states[0]) as first, serving(states[1]) as second:
            yield first, second


def machine(client: Client, environment: str) -> Sandbox:
    """On a busy host a template takes longer than a creation may, and goes on behind it."""
    spec = SandboxSpec(environment=environment, backend="microvm", memory_bytes=256 * MIB, disk_bytes=512 * MIB)
    deadline = time.monotonic() + 4 * PATIENCE_S
    while True:
        try:
            return client.create(spec)
        except DsecError as error:
            if not error.infra or time.monotonic() > deadline:
                raise


def sums(box: Sandbox, names: list[str]) -> dict[str, str]:
    """What programs inside read."""
    result = box.commands.run(["sha256sum", *(f"/data/{name}" for name in names)]).check()
    lines = (line.split() for line in result.stdout.splitlines())
    return {path.removeprefix("/data/"): found for found, path in lines}


def truth(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def publishing(nodes: tuple[Server, Server], tmp_path: Path, name: str) -> dict[str, bytes]:
    """As `publish`, by the first node."""
    endpoint = nodes[0].endpoint()
    with Client(endpoint.url, endpoint.api_key) as client:
        return publish(client, tmp_path, name)


@contextmanager
def client_of(server: Server) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as client:
        yield client


def kill(server: Server, *what: str) -> None:
    for each in what:
        for pid in processes(server, each):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("nodes", ["events"], indirect=True)
def test_machines_read_what_comes_on_demand(nodes: tuple[Server, Server], tmp_path: Path) -> None:
    server, packs = nodes[1], tmp_path / "shared" / "packs"
    expected = truth(publishing(nodes, tmp_path, "far"))
    with client_of(server) as client:
        box = machine(client, "far")
        data = next(path for path in (server.state / "store" / "lazy").glob("[0-9a-f]*/data"))
        filled = data.stat().st_blocks * 512
        assert filled < 4 * MIB, "a machine fetched what nobody read"
        # The store goes: bounded, and the platform's fault; and comes back.
        packs.rename(tmp_path / "elsewhere")
        began = time.monotonic()
        result = box.commands.run(["cat", "/data/data3"])
        assert (result.exit_code, result.cause, result.infra) == (1, Cause.INFRA_IMAGE, True)
        assert time.monotonic() - began < 2 * PATIENCE_S
        (tmp_path / "elsewhere").rename(packs)
        assert sums(box, ["data3"]) == {"data3": expected["data3"]}
        assert MIB <= data.stat().st_blocks * 512 <= filled + 4 * MIB
        # Holder and filler die under readers.
        for name, victim in (("data0", "filler"), ("data1", "holder")):
            kill(server, victim)
            assert sums(box, [name]) == {name: expected[name]}
    server.kill()
    server.start()
    with client_of(server) as client:
        box = client.connect(box.id)  # its layers nothing on the host mounts
        assert sums(box, sorted(expected)) == expected
        with machine(client, "far") as other:
            assert sums(other, sorted(expected)) == expected
    server.kill()  # where server and holder die together, holes may have been read
    kill(server, "holder", "filler")
    server.start()
    with client_of(server) as client:
        with pytest.raises(SandboxLost) as lost:
            client.connect(box.id).commands.run(["true"])
        assert "what filled its files was gone" in str(lost.value)


@pytest.mark.parametrize("nodes", ["fuse"], indirect=True)
def test_machines_read_through_fuse(nodes: tuple[Server, Server], tmp_path: Path) -> None:
    server = nodes[1]
    expected = truth(publishing(nodes, tmp_path, "far"))
    with client_of(server) as client:
        box = machine(client, "far")
        assert sums(box, ["data3"]) == {"data3": expected["data3"]}
        kill(server, "filler")
        deadline = time.monotonic() + PATIENCE_S
        while not (result := box.commands.run(["cat", "/data/data0"])).infra:  # until the server knows
            assert time.monotonic() < deadline
        assert (result.exit_code, result.cause) == (1, Cause.INFRA_IMAGE)
        with machine(client, "far") as other:
            assert sums(other, sorted(expected)) == expected

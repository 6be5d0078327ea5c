"""Nodes whose kernel has no pre-content events (as they are told): the same through FUSE."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_lazy_live import node, processes, publish

from dsec import Client, Sandbox
from dsec.errors import DsecError
from dsec.kernel.mounts import find_mount
from dsec.spec.causes import Cause
from server_kit import Server, serving

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def nodes(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_STORE", str(tmp_path_factory.mktemp("shared")))
        patch.setenv("DSEC_LAZY", "fuse")
        first, second = (node(debian_store, tmp_path_factory.mktemp(name)) for name in ("first", "second"))
        with serving(first) as one, serving(second) as two:
            yield one, two


@pytest.fixture
def clients(nodes: tuple[Server, Server]) -> Iterator[tuple[Client, Client]]:
    first, second = (server.endpoint() for server in nodes)
    with Client(first.url, first.api_key) as one, Client(second.url, second.api_key) as two:
        yield one, two


def test_the_other_node_starts_it_and_reads_what_was_made(
    nodes: tuple[Server, Server], clients: tuple[Client, Client], tmp_path: Path
) -> None:
    one, two = clients
    files = publish(one, tmp_path, "lazy")
    with two.create("lazy") as sandbox:
        mount = find_mount(nodes[1].config.run / "lazy")
        assert mount is not None
        assert mount.fstype == "fuse"
        assert {name: sandbox.files.read_bytes(f"/data/{name}") for name in files} == files


def created(client: Client, environment: str, deadline: float) -> Sandbox:
    """Until the next filler is there, this is the platform's fault too."""
    while True:
        try:
            return client.create(environment)
        except DsecError as error:
            if not error.infra or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_a_filler_that_is_killed_is_the_platforms_fault_and_the_next_sandbox_is_right(
    nodes: tuple[Server, Server], clients: tuple[Client, Client], tmp_path: Path
) -> None:
    one, two = clients
    files = publish(one, tmp_path, "killed")
    with two.create("killed") as sandbox:
        for pid in processes(nodes[1], "filler"):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not (result := sandbox.commands.run(["cat", "/data/data0"])).infra:  # until the server knows
            assert time.monotonic() < deadline
        assert (result.exit_code, result.cause) == (1, Cause.INFRA_IMAGE)
    with created(two, "killed", deadline) as again:
        assert {name: again.files.read_bytes(f"/data/{name}") for name in files} == files

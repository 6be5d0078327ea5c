"""Two nodes and the store that they share: what one imports the other starts, and fetches as it is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_kit import tar

from dsec import Client
from dsec.errors import NotFound
from dsec.spec.causes import Cause
from dsec.store.format import is_layer
from server_kit import Server, serving
from trees import link_store

pytestmark = pytest.mark.root

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def node(debian_store: Path, root: Path) -> Path:
    state = root / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")
    (state / "native").symlink_to(debian_store.parent / "native")
    return state


@pytest.fixture(scope="module")
def second_state(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node(debian_store, tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="module")
def nodes(
    debian_store: Path, shared: Path, second_state: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_STORE", str(shared))
        with serving(node(debian_store, tmp_path_factory.mktemp("first"))) as first, serving(second_state) as second:
            yield first, second


@pytest.fixture
def clients(nodes: tuple[Server, Server]) -> Iterator[tuple[Client, Client]]:
    first, second = (server.endpoint() for server in nodes)
    with Client(first.url, first.api_key) as one, Client(second.url, second.api_key) as two:
        yield one, two


def publish(client: Client, tmp_path: Path, name: str) -> dict[str, bytes]:
    """An environment of the default one and a layer with files of a little more than 1 MiB."""
    files = {f"data{index}": os.urandom(MIB + 5000) for index in range(6)}
    archive = tmp_path / f"{name}.tar"
    archive.write_bytes(tar(*files.items()))
    client.catalog.build(archive, f"{name}-files@1", at="/data")
    client.catalog.create_environment(name, [f"{name}-files@1", "env:debian"])
    return files


def test_the_other_node_starts_it_and_fetches_what_is_read(
    clients: tuple[Client, Client], second_state: Path, tmp_path: Path
) -> None:
    one, two = clients
    files = publish(one, tmp_path, "lazy")
    with two.create("lazy") as sandbox:
        assert sandbox.files.read_bytes("/data/data3") == files["data3"]
        cache = next(path for path in (second_state / "store" / "lazy").iterdir() if is_layer(path.name))
        filled = (cache / "data").stat().st_blocks * 512
        assert MIB <= filled <= 4 * MIB
        assert {name: sandbox.files.read_bytes(f"/data/{name}") for name in files} == files


def test_the_filler_and_the_holder_are_killed_while_a_sandbox_reads(
    nodes: tuple[Server, Server], clients: tuple[Client, Client], tmp_path: Path
) -> None:
    one, two = clients
    files = publish(one, tmp_path, "killed")
    with two.create("killed") as sandbox:
        for name, victim in (("data0", "filler"), ("data1", "holder"), ("data2", "filler")):
            for pid in processes(nodes[1], victim):
                os.kill(pid, signal.SIGKILL)
            assert sandbox.files.read_bytes(f"/data/{name}") == files[name]


def test_a_store_that_is_gone_is_the_platforms_fault(
    clients: tuple[Client, Client], shared: Path, tmp_path: Path
) -> None:
    one, two = clients
    files = publish(one, tmp_path, "gone")
    with two.create("gone") as sandbox:
        (shared / "packs").rename(shared / "elsewhere")
        try:
            result = sandbox.commands.run(["cat", "/data/data0"])
            assert (result.exit_code, result.cause, result.infra) == (1, Cause.INFRA_IMAGE, True)
        finally:
            (shared / "elsewhere").rename(shared / "packs")
        assert sandbox.commands.run(["cat", "/data/data0"]).stdout_bytes == files["data0"]


def test_what_another_node_made_is_there_for_all_that_is_done_with_layers(
    clients: tuple[Client, Client], shared: Path, tmp_path: Path
) -> None:
    one, two = clients
    publish(one, tmp_path, "made")
    stored = {path.name for path in (shared / "manifests").iterdir()}
    assert stored.issuperset(one.catalog.environment("made")["environment"]["layers"]), "the base is others' too"
    layer = one.catalog.layer("made-files@1")["digest"]
    assert two.catalog.layer("made-files@1")["digest"] == layer
    shown = two.catalog.environment("made")
    assert shown["layers"][0]["digest"] == layer
    assert two.catalog.verify("made-files@1") == {"digest": layer}
    for number, client in enumerate(clients):
        client.catalog.export("made-files@1", tmp_path / f"{number}.tar")
    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes()
    publish(one, tmp_path, "apart")
    merged = [client.catalog.merge(["apart-files@1", "made-files@1"], "both@1")["layer"] for client in clients]
    assert merged[0] == merged[1]
    publish(one, tmp_path, "below")
    (tmp_path / "Dockerfile").write_text("FROM below\nCOPY --from=apart /data/data1 /copied\nRUN cp /data/data0 /own\n")
    two.catalog.build_dockerfile(tmp_path, "above")
    with one.create("above") as sandbox:
        assert sandbox.commands.run("cmp /own /data/data0 && wc -c </copied").stdout == f"{MIB + 5000}\n"
    for call in (two.catalog.layer, two.catalog.verify):
        with pytest.raises(NotFound):
            call("nobodys@1")


def test_a_name_that_another_node_changes_means_the_new_thing_soon(
    clients: tuple[Client, Client], tmp_path: Path
) -> None:
    one, two = clients
    publish(one, tmp_path, "old")
    two.create("old").kill()
    one.catalog.create_environment("old", ["env:debian"])
    deadline = time.monotonic() + 60
    while True:
        with two.create("old") as sandbox:
            if not sandbox.files.exists("/data"):
                break
        assert time.monotonic() < deadline
        time.sleep(2)


def test_undo_without_the_store_ends_what_filled_layers(
    clients: tuple[Client, Client], shared: Path, debian_store: Path, tmp_path: Path
) -> None:
    """A third node that is killed; whoever takes it back doesn't name the store."""
    files = publish(clients[0], tmp_path, "third")
    state = node(debian_store, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_STORE", str(shared))
        with serving(state, on_exit="keep") as server:
            endpoint = server.endpoint()
            with Client(endpoint.url, endpoint.api_key) as client:
                assert client.create("third").files.read_bytes("/data/data0") == files["data0"]
                server.kill()
            assert processes(server, "holder")
            patch.delenv("DSEC_STORE")
            command = [sys.executable, "-m", "dsec.cli.main", "host", "undo"]
            done = subprocess.run(command, env=server.environment(), capture_output=True, text=True, check=False)
            assert "FAILED" not in done.stdout + done.stderr
            assert not server.config.run.exists()
            assert processes(server, "holder") + processes(server, "filler") == []


def processes(server: Server, what: str) -> list[int]:
    """The holder or the filler of a server."""
    state = os.fsencode(server.state)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            ours = state in words if what == "filler" else words[0].startswith(state + b"/native")
            if ours and (what.encode() in words or words[0].endswith(b"/" + what.encode())):
                found.append(int(entry.name))
    return found

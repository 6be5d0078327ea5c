"""Snapshots of real sandboxes: what they wrote, without residue, as an environment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient
from dsec.errors import Conflict
from dsec.spec.sandbox import SandboxSpec, State
from server_kit import PATIENCE_S, Server, serving
from trees import link_store

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=128 << 20, disk_bytes=64 << 20, pids=64)

HISTORY = str(Path("/root", ".bash_history"))


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("snapshots") / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")  # its own names, the same files
    (state / "native").symlink_to(debian_store.parent / "native")
    with serving(state) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


def captures(server: Server) -> list[str]:
    return [path.name for path in (server.config.run / "volume" / "captures").iterdir()]


async def test_a_snapshot_is_an_environment_without_residue(server: Server, client: AsyncClient) -> None:
    builder = await client.create(SMALL, env={"SECRET": "s3cret"})
    script = """
        mkdir -p /w/.cache /w/d /w/secret; echo kept > /w/f; chown nobody /w/f; echo x > /w/.cache/c
        echo y > /w/secret/k; echo z > /w/secret/public; ln -s f /w/link; ln /w/f /w/hard
        echo 'password' > ~/.bash_history; echo t > /tmp/t
        rm /etc/motd; rm -rf /usr/share/base-files; mkdir /usr/share/base-files; echo 1 > /usr/share/base-files/only
    """
    (await builder.commands.run(script)).check()
    await builder.pause()
    made = await builder.pack_diff("solved@1", remove=["w/secret"], keep=["w/secret/public"])
    assert (await builder.refresh()).state is State.PAUSED
    assert {HISTORY, "/w/.cache/c", "/w/secret/k", "/tmp/t"} == set(made.removed_paths)
    assert made.removed == 4
    assert {"/w/f", "/w/link", "/w/secret/public", "/etc/motd"} <= set(made.kept_paths)
    assert made.sandbox == builder.id
    assert made.built_by.startswith("default")
    solver = await client.create("solved@1", memory_bytes=128 << 20, disk_bytes=64 << 20)
    seen = await solver.commands.run("stat -c %U /w/f; echo $SECRET")
    assert seen.stdout == "nobody\n\n"
    for gone in ("/w/secret/k", "/etc/motd", HISTORY, "/w/.cache/c", "/tmp/t"):
        assert not await solver.files.exists(gone), gone
    assert await solver.files.read("/w/link") == "kept\n"
    assert await solver.files.read("/w/secret/public") == "z\n"
    assert [entry.name for entry in await solver.files.list("/usr/share/base-files")] == ["only"]
    source = (await client.catalog.layer("solved@1"))["source"]
    assert source["sandbox"] == builder.id
    assert captures(server) == []
    await builder.files.write("/more", "2")
    with pytest.raises(Conflict):
        await builder.pack_diff("solved@1")
    again = await (await client.create("solved@1", memory_bytes=128 << 20)).pack_diff("again@1")
    assert again.kept == 0


async def test_a_rebuild_begins_from_the_last_snapshot_of_everything(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await box.commands.run(
        "mkdir /work; head -c 12 /dev/urandom | base64 | tee /work/a; seq 1 3000", key="one", env={"A": "1"}
    )
    await box.commands.run("echo x >> /work/runs", key="two")
    sleeper = await box.commands.start("sleep 600", key="sleeps")
    busy = await box.pack_diff("busy@1", scrub=False)
    await sleeper.kill()
    await sleeper.wait()
    await box.pack_diff("point@1", scrub=False)
    await box.files.write("/tmp/t", "1")
    await box.pack_diff("scrubbed@1")
    after = await box.commands.run("cat /work/a /tmp/t", key="three")
    taken = [each.data async for each in box.events() if each.type == "snapshot"]
    assert [(data["name"], bool(data["at"])) for data in taken] == [
        ("busy@1", False),
        ("point@1", True),
        ("scrubbed@1", True),
    ]
    assert taken[0]["layer"] == busy.layer
    await box.kill()
    found = await client.rebuild(box.id)
    assert (found.base, found.diverged, found.replayed) == ("point@1", None, 2)
    again = await client.connect(found.sandbox.id)
    assert (await again.commands.run("cat /work/a /tmp/t", key="three")).stdout == after.stdout
    first = await again.commands.run(
        "mkdir /work; head -c 12 /dev/urandom | base64 | tee /work/a; seq 1 3000", key="one", env={"A": "1"}
    )
    assert (first.exit_code, first.stdout.split()[0]) == (0, after.stdout.split()[0]), "recorded, not run again"
    await again.commands.run("echo x >> /work/runs", key="two")
    assert await again.files.read("/work/runs") == "x\n"
    twice = await client.rebuild(again.id)
    assert (twice.base, twice.diverged) == ("debian", None), "its own log begins with the snapshot's layer"
    third = await client.connect(twice.sandbox.id)
    await third.commands.run("echo x >> /work/runs", key="two")
    assert await third.files.read("/work/runs") == "x\n"
    whole = await client.rebuild(box.id, from_start=True)
    assert whole.base == "debian"
    assert whole.diverged is not None
    assert whole.diverged.what == "stdout"
    for name in ("busy@1", "point@1"):  # which are one layer
        await client.catalog.remove_environment(name)
        await client.catalog.remove_layer(name)
    assert (await client.rebuild(box.id)).base == "debian"


async def test_a_fork_is_made_again_from_its_own_snapshot(client: AsyncClient) -> None:
    parent = await client.create(SMALL)
    await parent.files.write("/state", "parent's")
    child = (await parent.fork())[0]
    with pytest.raises(Conflict, match="forked"):
        await client.rebuild(child.id)
    await child.pack_diff("child@1", scrub=False)
    await child.commands.run("echo more >> /state")
    found = await client.rebuild(child.id)
    assert (found.base, found.diverged) == ("child@1", None)
    assert await (await client.connect(found.sandbox.id)).files.read("/state") == "parent'smore\n"


async def test_sessions_are_done_again(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    work = await box.sessions.open("work", env={"A": "1"}, cwd="/tmp")
    assert (await work.run("B=2; cd /; mkdir -p /w; pwd")).output == "/\n"
    assert (await work.run('echo "$A$B $(pwd)" > /w/state; cat /w/state; false', key="k")).exit_code == 1
    typed = asyncio.create_task(work.run("read x; echo got $x"))
    async with asyncio.timeout(PATIENCE_S):
        while not (await work.info()).busy:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await work.send("secret\n")
    assert "got secret" in (await typed).output
    await work.run("echo last >> /w/state; head -c 9 /dev/urandom | base64")
    await work.close()
    entries = [entry async for entry in box.trajectory()]
    assert "secret" not in str([entry.data for entry in entries if entry.type == "session_input"])
    command = [sys.executable, "-m", "dsec.cli.main", "replay", box.id]
    shown = await asyncio.to_thread(
        subprocess.run, command, env=server.environment(), capture_output=True, text=True, check=True
    )
    for part in ("work $ B=2; cd /", "got secret", "= 1 of "):
        assert part in shown.stdout
    found = await client.rebuild(box.id)
    assert found.not_replayed == ["commands of sessions that somebody typed into"]
    assert found.diverged is not None
    assert (found.diverged.what, found.differences) == ("output", 1)
    again = await client.connect(found.sandbox.id)
    assert await again.files.read("/w/state") == "12 /\nlast\n"
    await box.kill()

"""What becomes of a machine that runs, through the SDK: forks with its memory, snapshots, verification, rebuilds."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient, Grader
from dsec.spec.causes import Cause
from dsec.spec.sandbox import State
from microvm_kit import SMALL, emptied, needs_qemu, said, serving_machines
from server_kit import PATIENCE_S, Server
from trees import link_store

pytestmark = [pytest.mark.root, needs_qemu]

COUNTER = "n=0; while :; do n=$((n+1)); echo $n > /dev/shm/new; mv /dev/shm/new /dev/shm/count; sleep 0.2; done"
WRITER = """open F, "+>", "/dev/shm/written"; syswrite F, "\\0" x (4096 * 256);
for ($n = 1;; $n++) { for $i (0..255) {
    sysseek F, $i * 4096, 0; sysread F, $was, 4096;
    if ($was ne pack("N", $n - 1) x 1024) { open T, ">", "/dev/shm/torn"; exit 1 }
    sysseek F, $i * 4096, 0; syswrite F, pack("N", $n) x 1024;
} if ($n == 3) { open R, ">", "/dev/shm/ready"; close R } select undef, undef, undef, 0.2 }"""
"""Whoever has memory of two moments has pages of more than the last two numbers."""
LOOK = """cat /dev/shm/kept /kept; was=$(cat /dev/shm/count); echo $was
for i in $(seq 300); do test $(cat /dev/shm/count) != $was && break; sleep 0.1; done
cat /dev/shm/count; hostname; cat /etc/machine-id
head -c 16 /dev/urandom | od -An -tx1; date +%s.%N; pgrep -x sh"""


@pytest.fixture(scope="module")
def server(debian_store: Path, vm_templates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("machines") / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")  # its own names, the same files
    (state / "native").symlink_to(debian_store.parent / "native")
    with serving_machines(state, vm_templates) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with emptied(server) as client:
        yield client


def kept(server: Server) -> list[Path]:
    """Disks of moments."""
    return list((server.config.run / "volume" / "vm").glob("m*.template"))


async def test_children_go_on_with_memory_and_processes_as_others(server: Server, client: AsyncClient) -> None:
    parent = await client.create(SMALL, name="parent", hostname="parent")
    await said(parent, "printf '%064d\\n' 7 > /etc/machine-id; echo in-memory > /dev/shm/kept; echo on-disk > /kept")
    counter = await parent.commands.start(["sh", "-c", COUNTER], key="counter")
    async with asyncio.timeout(PATIENCE_S):
        while not await parent.files.exists("/dev/shm/count"):  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.05)
    children = await parent.fork(2)
    pid = str(counter.pid)
    alone = set()
    for box in (parent, *children):
        seen = (await said(box, LOOK)).splitlines()
        assert seen[:2] == ["in-memory", "on-disk"]
        assert int(seen[3]) > int(seen[2])
        assert abs(float(seen[7]) - time.time()) < 30
        assert pid in seen[8:]
        assert len(seen[5]) == (64 if box is parent else 32), "a longer one is nowhere left"
        alone |= set(seen[4:7])
    assert len(alone) == 9
    assert len({box.info.token for box in children}) == 2
    await said(children[0], "echo changed > /kept; echo mine > /dev/shm/kept")
    assert await said(children[1], "cat /kept /dev/shm/kept") == "on-disk\nin-memory"
    assert await said(parent, "cat /kept /dev/shm/kept") == "on-disk\nin-memory"
    inherited = await children[0].commands.attach("counter")  # its own from now on
    await inherited.kill()
    assert (await inherited.wait()).signal == 9
    assert pid not in (await said(children[0], "pgrep -x sh || true")).split()
    assert pid in (await said(parent, "pgrep -x sh")).split()
    assert pid in (await said(children[1], "pgrep -x sh")).split()
    await parent.kill()
    (grandchild,) = await children[1].fork(1)
    await children[1].kill()
    assert await said(grandchild, "cat /kept /dev/shm/kept") == "on-disk\nin-memory"
    assert await said(grandchild, "hostname") == grandchild.id
    assert kept(server) == []


async def test_each_child_has_the_memory_of_one_moment_and_nobody_elses(client: AsyncClient) -> None:
    parent = await client.create(SMALL)
    before = await said(parent, "head -c 16000000 /dev/urandom > /dev/shm/big; md5sum < /dev/shm/big")
    writer = await parent.commands.start(["perl", "-e", WRITER])
    async with asyncio.timeout(PATIENCE_S):
        while not await parent.files.exists("/dev/shm/ready"):  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.05)
    first, second = await asyncio.gather(parent.fork(2), parent.fork(1))
    for number, box in enumerate((parent, *first, *second)):
        assert await said(box, "md5sum < /dev/shm/big") == before
        await said(box, f"yes {number} | dd of=/dev/shm/big bs=4k count=2000 seek=1000 conv=notrunc iflag=fullblock")
    sums = {await said(box, "md5sum < /dev/shm/big") for box in (parent, *first, *second)}
    assert len(sums) == 4, "each has what it wrote itself"
    (grandchild,) = await first[0].fork(1)
    assert await said(grandchild, "md5sum < /dev/shm/big") == await said(first[0], "md5sum < /dev/shm/big")
    for box in (parent, *first, *second, grandchild):
        assert await said(box, "sleep 0.3; ls /dev/shm; pgrep -x perl") == f"big\nready\nwritten\n{writer.pid}"


async def test_two_forks_at_once_and_one_of_a_paused(server: Server, client: AsyncClient) -> None:
    parent = await client.create(SMALL)
    await said(parent, "echo here > /dev/shm/kept")
    forked = await asyncio.gather(parent.fork(1), parent.fork(1))
    assert [await said(box, "cat /dev/shm/kept") for (box,) in forked] == ["here", "here"]
    await parent.pause()
    (child,) = await parent.fork(1)
    assert (await parent.refresh()).state is State.PAUSED
    timed = await child.commands.run(["sleep", "600"], command_timeout_s=0.5)  # time passes in it
    assert timed.cause is Cause.COMMAND_TIMEOUT
    assert await said(child, "cat /dev/shm/kept") == "here"
    assert (await parent.refresh()).state is State.PAUSED
    assert await said(parent, "cat /dev/shm/kept") == "here"
    assert kept(server) == []


async def test_a_snapshot_is_an_environment_of_containers_too(server: Server, client: AsyncClient) -> None:
    builder = await client.create(SMALL)
    script = """
        mkdir -p /w/.cache /w/d /w/secret; echo kept > /w/f; chown nobody /w/f; echo x > /w/.cache/c
        echo z > /w/secret/k; ln -s f /w/link; ln /w/f /w/hard; mknod /w/disk b 8 0
        rm /etc/motd; rm -rf /usr/share/base-files; mkdir /usr/share/base-files; echo 1 > /usr/share/base-files/only
        head -c 5000000 /dev/urandom | tee /w/random | sha256sum > /w/sum
    """
    await said(builder, script)
    await builder.pause()
    made = await builder.pack_diff("machine@1", remove=["w/secret"])
    assert (await builder.refresh()).state is State.PAUSED
    assert set(made.removed_paths) == {"/w/.cache/c", "/w/secret/k", "/etc/machine-id"}
    assert (kept(server), captures(server)) == ([], [])
    solver = await client.create("machine@1", memory_bytes=128 << 20, disk_bytes=64 << 20)
    assert (
        await said(solver, "stat -c '%U %h' /w/f; cat /w/link; sha256sum < /w/random | cmp - /w/sum")
        == "nobody 2\nkept"
    )
    for gone in ("/w/secret/k", "/etc/motd", "/w/.cache/c", "/w/disk"):
        assert not await solver.files.exists(gone), gone
    assert [entry.name for entry in await solver.files.list("/usr/share/base-files")] == ["only"]
    assert await said(builder, "cat /w/f") == "kept"


def captures(server: Server) -> list[str]:
    return [path.name for path in (server.config.run / "volume" / "captures").iterdir()]


async def test_its_work_is_judged_apart(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await said(box, "mkdir /project; echo 42 > /project/answer; echo 1 > /outside; ln -s /etc/passwd /project/link")
    grader = Grader(
        argv=["sh", "-c", "cat /project/answer; ls /outside; uname -r; test $(cat /project/answer) = 42"],
        memory_bytes=SMALL.memory_bytes,
        disk_bytes=SMALL.disk_bytes,
        cpus=SMALL.cpus,
    )
    verdict = await box.verify(grader, paths=["/project"])
    assert verdict.reward == 1
    (run,) = verdict.runs
    assert run.stdout.split() == ["42", await said(box, "uname -r")]
    assert {each.path for each in verdict.untaken} >= {"/project/link"}
    assert captures(server) == []


async def test_a_rebuild_begins_from_its_snapshot(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await box.commands.run("head -c 12 /dev/urandom | base64 | tee /kept", key="one")
    await box.pack_diff("point@1", scrub=False)
    await box.commands.run("cat /kept; echo more >> /kept", key="two")
    taken = [each.data async for each in box.events() if each.type == "snapshot"]
    assert [bool(data["at"]) for data in taken] == [True]
    content = await said(box, "cat /kept")
    await box.kill()
    found = await client.rebuild(box.id)
    assert (found.base, found.diverged, found.replayed) == ("point@1", None, 2)
    again = await client.connect(found.sandbox.id)
    assert await said(again, "cat /kept") == content
    assert (await again.refresh()).accel == "tcg"


async def test_a_server_that_dies_in_the_middle_of_a_fork(server: Server, client: AsyncClient) -> None:
    """It leaves the parent standing still; the next one lets it go on, and finds children with tokens of their own."""
    parent = await client.create(SMALL)
    await said(parent, "echo here > /dev/shm/kept")
    (child,) = await parent.fork(1)
    server.kill()
    machines = list((server.config.run / "vm").glob("v*"))  # not their stems
    assert len(machines) == 2
    for machine in machines:
        stop(machine)
    disks = server.config.run / "volume" / "vm"
    (disks / "m0123.template").write_bytes(b"left")
    server.start()
    async with server.client() as again:
        for box in (parent, child):
            assert await said(await again.connect(box.id), "cat /dev/shm/kept") == "here"
    assert kept(server) == []


def stop(machine: Path) -> None:
    """Have its VMM hold it still, as for a fork."""
    directory = os.open(machine, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(PATIENCE_S)
        control.connect(f"/proc/self/fd/{directory}/control")
        os.close(directory)
        control.sendall(b'{"execute": "qmp_capabilities"}{"execute": "stop", "id": 7}')
        said = b""
        while b'"id": 7' not in said:
            said += control.recv(65536)

"""What becomes of a machine that runs, through the SDK: forks with its memory."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import CreateFailed
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec, State
from server_kit import PATIENCE_S, Server, serving

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]

SMALL = SandboxSpec(
    environment="debian", backend="microvm", memory_bytes=256 << 20, disk_bytes=512 << 20, pids=128, cpus=1
)
COUNTER = "n=0; while :; do n=$((n+1)); echo $n > /dev/shm/count; sleep 0.2; done"


@pytest.fixture(scope="module")
def server(debian_module_state: Path, vm_templates: Path) -> Iterator[Server]:
    (debian_module_state / "vm").mkdir()
    (debian_module_state / "vm" / "templates").symlink_to(vm_templates)
    vm_templates.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_VM_ACCEL", "tcg")
        patch.setenv("DSEC_VM_SPARE", "0")
        with serving(debian_module_state) as server:
            asyncio.run(prime(server))
            yield server


async def prime(server: Server) -> None:
    """Have the template booted: on a busy machine that takes longer than a creation may, and goes on behind it."""
    async with server.client() as client, asyncio.timeout(4 * PATIENCE_S):
        while True:
            try:
                await (await client.create(SMALL)).kill()
                return
            except CreateFailed:
                continue


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


async def said(box: AsyncSandbox, script: str) -> str:
    """What a script printed."""
    return (await box.commands.run(["sh", "-c", script])).check().stdout.strip()


def kept(server: Server) -> list[Path]:
    """Disks of moments."""
    return list((server.config.run / "volume" / "vm").glob("m*.template"))


async def test_children_go_on_with_memory_and_processes_as_others(server: Server, client: AsyncClient) -> None:
    parent = await client.create(SMALL, name="parent", hostname="parent")
    await said(parent, "echo 0123 > /etc/machine-id; echo in-memory > /dev/shm/kept; echo on-disk > /kept")
    counter = await parent.commands.start(["sh", "-c", COUNTER], key="counter")
    async with asyncio.timeout(PATIENCE_S):
        while not await parent.files.exists("/dev/shm/count"):  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.05)
    children = await parent.fork(2)
    boxes = [parent, *children]
    pid = str(counter.pid)
    alone = set()
    for box in boxes:
        assert await said(box, "cat /dev/shm/kept /kept") == "in-memory\non-disk"
        assert pid in (await said(box, "pgrep -x sh")).split()
        before = int(await said(box, "cat /dev/shm/count"))
        assert int(await said(box, "sleep 1; cat /dev/shm/count")) > before
        alone.add((await said(box, "hostname"), await said(box, "cat /etc/machine-id")))
        alone.add((await said(box, "head -c 16 /dev/urandom | od -An -tx1"), ""))
        assert abs(float(await said(box, "date +%s.%N")) - time.time()) < 30
    assert len(alone) == 6
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

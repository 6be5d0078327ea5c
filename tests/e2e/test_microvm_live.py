"""MicroVMs on a real server, through the SDK: a kernel of their own, an identity of their own, ends with their causes,
a server that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import InvalidRequest, SandboxEnded, Unsupported
from dsec.kernel.cgroups import CgroupRoot
from dsec.kernel.private_pages import Copy
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxInfo, State
from microvm_kit import SMALL, emptied, monitors, needs_qemu, said, serving_machines
from server_kit import PATIENCE_S, Server

pytestmark = [pytest.mark.root, needs_qemu]

IDENTITY = "cat /proc/sys/kernel/random/boot_id; hostname; head -c 16 /dev/urandom | od -An -tx1"


@pytest.fixture(scope="module")
def server(debian_module_state: Path, vm_templates: Path) -> Iterator[Server]:
    with serving_machines(debian_module_state, vm_templates, SPARE="1") as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with emptied(server) as client:
        yield client


async def test_a_kernel_of_its_own_and_the_rest_as_usual(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    info = await box.refresh()
    assert info.accel == "tcg"
    assert await said(box, "uname -r") != os.uname().release
    assert await said(box, "id -u; echo $PPID; cat /proc/1/comm") == "0\n1\ninit"
    await box.files.write("/work/deep/file", b"content" * 1000, parents=True)
    assert await box.files.read("/work/deep/file") == "content" * 1000
    assert int(await said(box, "grep -c processor /proc/cpuinfo")) == 1
    assert 200 < int(await said(box, "sed -n 's/MemTotal: *//p' /proc/meminfo | cut -d' ' -f1")) >> 10 < 256
    failed = await box.commands.run(["sh", "-c", "exit 7"])
    assert (failed.exit_code, failed.cause) == (7, Cause.EXITED)
    assert abs(float(await said(box, "date +%s.%N")) - time.time()) < 30


async def test_two_clones_are_two(client: AsyncClient) -> None:
    boxes = await asyncio.gather(client.create(SMALL), client.create(SMALL))
    identities = await asyncio.gather(*(said(box, IDENTITY) for box in boxes))
    first, second = (identity.splitlines() for identity in identities)
    assert len(first) == len(second) == 3
    assert not set(first) & set(second)
    await boxes[0].files.write("/only-here", b"")
    assert await said(boxes[1], "ls /only-here 2>/dev/null || echo missing") == "missing"


async def test_limits_are_the_kernels_inside(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    hungry = await box.commands.run(["python3", "-c", "x = bytearray(1 << 30)"])
    assert hungry.cause in (Cause.MEMORY_LIMIT, Cause.EXITED)  # it may be refused before it is used
    hungry = await box.commands.run(["python3", "-c", "x = []\nwhile True: x.append(bytearray(b'x') * (8 << 20))"])
    assert hungry.cause is Cause.MEMORY_LIMIT or b"MemoryError" in hungry.stderr_bytes
    full = await box.commands.run(["sh", "-c", "head -c 700M /dev/zero > /big"])
    assert full.cause is Cause.DISK_LIMIT
    # More than the machine's memory: what was read before makes room, and nobody ends.
    assert await said(box, "cat /big > /dev/null && rm /big; echo still here") == "still here"


KEEPS = """
import os, sys, time
x = bytearray(bytes.fromhex(sys.argv[1])) * (4 << 20)
open("/up", "w").close()
while not os.path.exists("/go"):
    time.sleep(0.05)
"""


async def test_memory_that_is_freed_inside_goes_back_and_is_nobody_elses(
    server: Server, client: AsyncClient, tmp_path: Path
) -> None:
    box, secret = await client.create(SMALL), os.urandom(16)
    holds = await box.commands.start(["python3", "-c", KEEPS, secret.hex()])  # 64 MiB of it
    await said(box, "until test -e /up; do sleep 0.05; done")
    held = (await box.usage()).memory_bytes
    assert any(secret * 2 in own_memory(pid, tmp_path / str(pid)) for pid in monitors(server))
    await said(box, "touch /go")
    (await holds.wait()).check()
    async with asyncio.timeout(PATIENCE_S):
        while (await box.usage()).memory_bytes > held - (40 << 20):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    # What was given back reads as the template's memory, which never had what its clones wrote.
    assert all(secret not in memory for pid in monitors(server) for memory in memories(pid))
    assert await said(box, "echo still here") == "still here"


def own_memory(pid: int, into: Path) -> bytes:
    """Of a machine's memory, what its VMM alone has; by a file that is removed."""
    with open(Copy(pid, SMALL.memory_bytes, into).finish(), "rb") as file:
        into.unlink()
        return file.read()


def memories(pid: int) -> Iterator[bytes]:
    """The files that a VMM has its machine's memory from."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        if str(path.readlink()).startswith("/memfd:memory"):
            yield path.read_bytes()


async def test_a_server_that_dies_and_one_that_comes(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    running = await box.commands.start(["sh", "-c", "echo begun; sleep 3; echo done"], key="k")
    async for chunk in running:
        assert "begun" in str(chunk)
        break
    server.kill()
    server.start()
    async with server.client() as again:
        same = await again.connect(box.id)
        command = await same.commands.attach("k")
        result = await command.wait()
        assert result.stdout == "begun\ndone\n"
        assert await said(same, "cat /proc/1/comm") == "init"


async def test_ends_have_causes(server: Server, client: AsyncClient) -> None:
    panicked = await client.create(SMALL)
    with pytest.raises(SandboxEnded, match="panicked") as caught:
        await panicked.commands.run(["sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"])
    assert not caught.value.infra
    info = await gone(panicked)
    assert info.cause is Cause.GUEST_EXITED
    killed = await client.create(SMALL)
    for pid in monitors(server):
        os.kill(pid, signal.SIGKILL)
    info = await gone(killed)
    assert (info.cause, info.infra) == (Cause.PLATFORM_KILLED, True)


async def gone(box: AsyncSandbox) -> SandboxInfo:
    """Its info, once it has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            info = await box.refresh()
            if info.state is State.ENDED:
                return info
            await asyncio.sleep(0.05)


async def test_it_can_stand_still(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await box.files.write("/kept", b"kept")
    await box.pause()
    assert (await box.refresh()).state is State.PAUSED
    assert await said(box, "cat /kept") == "kept"


async def test_a_class_of_cpus_is_the_vmms(server: Server, client: AsyncClient) -> None:
    for backend in ("microvm", "container"):
        for name, idle in (("batch", 1), ("latency", 0), (None, 0)):
            box = await client.create(msgspec.structs.replace(SMALL, backend=backend, cpu_class=name))
            assert await said(box, "echo here") == "here"
            groups = [group_of(pid) for pid in server.guests()]  # a spare one's too
            assert [(each / "cpu.idle").read_text() for each in groups].count("1\n") == idle
            await box.kill()


def group_of(pid: int) -> Path:
    """The directory of a process's CPU limits."""
    root = CgroupRoot.detect("any")
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or (number == "0" and "cpu" not in root.v1):
            return Path(str(root.v1.get("cpu", root.v2))) / path.lstrip("/")
    raise AssertionError(pid)


async def test_what_is_not_there_yet_is_refused(client: AsyncClient) -> None:
    for field, value in (("gpus", 1), ("require_kvm", True), ("memory_bytes", 1 << 40)):
        with pytest.raises(Unsupported):
            await client.create("debian", backend="microvm", **{field: value})
    with pytest.raises(InvalidRequest):
        await client.create("debian", backend="microvm", memory_bytes=32 << 20)

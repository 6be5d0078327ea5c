"""Pausing, forking and keeping files of sandboxes whose programs are hostile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from native_guest import UNIFIED

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import DsecError, PermissionDenied
from dsec.spec.sandbox import SandboxSpec, State
from dsec.spec.tripwires import PathRule
from server_kit import PATIENCE_S, Server, serving, until
from trees import link_store

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=256 << 20, disk_bytes=64 << 20, pids=64)
SECRET = "the answer is " + "forty-two, and nobody else's"

RESTLESS = """
import os, signal, threading, time
def count(name):
    number = 0
    while True:
        number += 1
        with open(f"/count/{name}.new", "w") as file:
            file.write(str(number))
        os.rename(f"/count/{name}.new", f"/count/{name}")
os.makedirs("/count", exist_ok=True)
for number in (signal.SIGCONT, signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
    signal.signal(number, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
threading.Thread(target=count, args=("thread",), daemon=True).start()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    count("daemon")
if os.fork() == 0:
    while True:  # wakes everybody that it can
        try:
            os.kill(-1, signal.SIGCONT)
        except OSError:
            pass
if os.fork() == 0:
    number = 0
    while True:  # always a process that is just being made
        number += 1
        if os.fork() == 0:
            open("/count/forks", "w").write(str(number))
            os._exit(0)
        os.wait()
count("main")
"""
HOLDS = f"""
import sys
held = [bytearray({SECRET!r}.encode() * 100) for _ in range(10_000)]
print("held", flush=True)
input()
print(sum(map(len, held)))
"""
LOOKS = f"""
import ctypes, errno, glob, os, stat
libc = ctypes.CDLL(None, use_errno=True)
for path in ("/dev/zram0", "/dev/mem", "/dev/kmem", "/proc/kcore", "/sys/block/zram0/mm_stat", "/sys/block"):
    try:
        os.listdir(path) if os.path.isdir(path) and os.listdir(path) else os.open(path, os.O_RDONLY)
        assert path in ("/proc/kcore", "/sys/block"), path  # masked by what is empty
        assert not os.path.isdir(path) or os.listdir(path) == [], path
    except OSError as error:
        assert error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENXIO), (path, error)
for major in (252, 253, 254, 259, 1):
    try:
        os.mknod(f"/node{{major}}", stat.S_IFBLK | 0o600, os.makedev(major, 0))
        os.open(f"/node{{major}}", os.O_RDONLY)
        raise AssertionError(major)
    except PermissionError:
        pass
for call in (libc.swapoff, libc.swapon):
    assert call(b"/dev/zram0", 0) == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
for path in glob.glob("/proc/[0-9]*/mem"):  # only its own sandbox's are there, and pid 1 is closed
    assert path.split("/")[2] in ("1", str(os.getpid())), path
fresh = bytearray(96 << 20)  # what the kernel gives is empty, whatever was there before
assert {SECRET.encode()!r} not in fresh and not any(fresh[:: 4096])
print("nothing")
"""
PAIR = """
import os, itertools
os.makedirs("/pair/.cache", exist_ok=True)
for number in itertools.count():
    for name in "ab":
        with open(f"/pair/{name}.new", "w") as file:
            file.write(str(number))
        os.rename(f"/pair/{name}.new", f"/pair/{name}")
    os.rename("/pair/.cache", "/pair/cache")
    os.symlink("/etc", "/pair/.cache")
    os.unlink("/pair/.cache")
    os.rename("/pair/cache", "/pair/.cache")
    if number == 50:
        print("busy", flush=True)
"""


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("hostile") / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")  # its own names, the same files
    (state / "native").symlink_to(debian_store.parent / "native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_ZRAM_BYTES", str(64 << 20))
        with serving(state) as server:
            yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


def counts(server: Server, box: AsyncSandbox) -> dict[str, str]:
    """What its processes write, read on the host."""
    upper = server.config.run / "volume" / "sandboxes" / box.id / "upper" / "count"
    return {path.name: path.read_text() for path in sorted(upper.iterdir()) if not path.name.endswith(".new")}


async def paged_out(box: AsyncSandbox) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not [event async for event in box.events() if event.type == "paged_out"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def stands_still(pid: int) -> bool:
    """Whether the kernel says so of the sandbox whose pid 1 this is."""
    line = next(line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
    at = Path(str(UNIFIED) + line.removeprefix("0::"))
    while (at / "cgroup.freeze").read_text() != "1\n":
        at = at.parent
    return "frozen 1\n" in (at / "cgroup.events").read_text()


async def test_nothing_moves_while_it_is_paused(server: Server, client: AsyncClient) -> None:
    """Threads, daemons, timers, processes that wake others and those that are just being made: all stand still."""
    box = await client.create(SMALL)
    await box.commands.start(["python3", "-c", RESTLESS])
    async with asyncio.timeout(PATIENCE_S):
        while len((await box.commands.run("ls /count | grep -v new || true")).stdout.split()) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    pid = await server.pid1(box)
    for _ in range(3):
        await box.pause()
        until(lambda: stands_still(pid))  # who is in the middle of a write ends it
        before = counts(server, box)
        assert set(before) >= {"thread", "daemon", "main", "forks"}
        await asyncio.sleep(0.4)
        assert counts(server, box) == before
        await box.resume()
        async with asyncio.timeout(PATIENCE_S):
            while any(counts(server, box).get(name) == was for name, was in before.items()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_pages_on_swap_are_nobody_elses(client: AsyncClient) -> None:
    owner, other = await client.create(SMALL), await client.create(SMALL)
    held = await owner.commands.start(["python3", "-c", HOLDS], stdin=True)
    async for _ in held:
        break
    await owner.pause()
    await paged_out(owner)
    looked = await other.commands.run(["python3", "-c", LOOKS])
    assert (looked.exit_code, looked.stdout) == (0, "nothing\n"), looked.stderr
    assert (await owner.refresh()).state is State.PAUSED
    await held.write_stdin("\n")
    assert (await held.wait()).stdout.endswith(f"{len(SECRET) * 1_000_000}\n"), "and come back whole"


async def test_children_are_strangers(server: Server, client: AsyncClient) -> None:
    """What is known of a parent opens nothing of its children, and the other way round."""
    parent = await client.create(SMALL)
    await parent.commands.run("head -c 16 /dev/urandom | od -An -tx1 | tr -d ' ' > /etc/machine-id")
    first, second = await parent.fork(2)
    tokens = {box.id: box.info.token for box in (parent, first, second)}
    assert len(set(tokens.values())) == 3
    assert None not in tokens.values()
    for box_id in tokens:
        for owner, token in tokens.items():
            async with AsyncClient(server.url, token) as other:
                if owner == box_id:
                    assert (await other.connect(box_id)).id == box_id
                else:
                    with pytest.raises(PermissionDenied):
                        await other.connect(box_id)
    seen = []
    for box in (parent, first, second):
        script = "cat /etc/machine-id; hostname; python3 -c 'import random, uuid; print(random.random(), uuid.uuid4())'"
        seen.append((await box.commands.run(script)).stdout.split())
    assert all(len(set(each)) == 3 for each in zip(*seen, strict=True)), seen


async def test_a_sandboxs_own_token_moves_nothing(server: Server, client: AsyncClient) -> None:
    """It neither pauses nor keeps anything, and reads neither what is watched nor what is on record."""
    rules = [PathRule(id="hidden", paths=["/etc/passwd"])]
    box = await client.create(SMALL, tripwires=rules)
    async with AsyncClient(server.url, box.info.token) as own:
        mine = await own.connect(box.id)
        assert (await mine.commands.run("echo fine")).stdout == "fine\n"
        assert mine.info.spec.tripwires == []
        calls = [
            mine.pause(), mine.resume(), mine.fork(1), mine.pack_diff("mine@1"), own.rebuild(box.id),
            anext(aiter(mine.events())), anext(aiter(mine.trajectory())), anext(aiter(mine.trajectory(follow=True))),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(PermissionDenied):
                await call
    assert (await box.refresh()).state is State.RUNNING
    assert len((await box.refresh()).spec.tripwires) == 1


async def test_a_snapshot_is_one_moment_whatever_writes(client: AsyncClient) -> None:
    """Programs that swap files and directories all the while: no half of anything, no way out by a link."""
    box = await client.create(SMALL)
    busy = await box.commands.start(["python3", "-c", PAIR])
    async for _ in busy:
        break
    for number in range(3):
        await box.pack_diff(f"moment@{number}")
        child = await client.create(f"moment@{number}", memory_bytes=128 << 20, disk_bytes=64 << 20)
        pair = (await child.commands.run("cat /pair/a; echo; cat /pair/b; echo; cat /etc/hostname")).stdout.split()
        assert int(pair[0]) - int(pair[1]) in (0, 1), pair
        listed = (await child.commands.run("ls -A /pair | grep -v new")).stdout.split()
        assert set(listed) <= {"a", "b", "cache", ".cache"}
        await child.kill()


async def test_a_snapshot_keeps_no_open_door(client: AsyncClient) -> None:
    """Set-uid programs, devices and capabilities in one give nothing that a sandbox hasn't."""
    box = await client.create(SMALL)
    script = "cp /bin/sh /suid; chmod 4755 /suid; mknod /dev/evil b 7 0 2>&1; mknod /evil c 1 1 2>&1; echo done"
    assert (await box.commands.run(script)).stdout.endswith("done\n")
    await box.pack_diff("door@1")
    child = await client.create("door@1", memory_bytes=128 << 20)
    with pytest.raises(DsecError):
        await child.files.read("/evil")
    seen = await child.commands.run("/suid -pc id -u; cat /proc/self/uid_map; head -c 1 /dev/mem", user="nobody")
    inside, outside, _ = seen.stdout.split()[-3:]
    assert inside == "0"
    assert int(outside) >= 65536

"""What a machine's monitor could do if what runs in the machine took it over."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from vmm_kit import check_root, fields, namespaces

from dsec.app import open_host, open_machines
from dsec.backends.microvm.backend import MicroVmBackend
from dsec.configuration import Config
from dsec.edge.config import SystemClock
from dsec.errors import Unavailable
from dsec.spec.sandbox import SandboxSpec
from dsec.store.views import remove_dev
from dsec.testing.conformance.kit import ok, shell
from dsec.vmm.launcher import UID_BASE
from dsec.vmm.launcher.jail import STEM_CAPABILITIES, STEM_UID
from dsec.vmm.launcher.seccomp import filter_program
from dsec.vmm.launcher.serving import Launcher
from dsec.vmm.launching import LauncherClient
from machines_kit import launchers

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]

SPEC = SandboxSpec(environment="debian", backend="microvm", memory_bytes=256 << 20, disk_bytes=512 << 20, pids=128)


@pytest.fixture
async def backend(debian_state: Path, vm_templates: Path, tmp_path: Path) -> AsyncIterator[MicroVmBackend]:
    config = Config(state=debian_state, run=tmp_path / f"run-{os.getpid()}", vm_accel="tcg", vm_spare=0)
    host = open_host(config)
    try:
        node = open_machines(config, host, vm_templates)
        assert node is not None
        found = MicroVmBackend(node, SystemClock())
        await found.open({})
        try:
            yield found
        finally:
            await found.close(keep=False)
    finally:
        host.volume.close(keep=False)
        host.layers.unmount_all()
        host.views.remove()
        remove_dev(host.run)


async def test_a_monitor_has_nothing_but_its_descriptors(backend: MicroVmBackend) -> None:
    handles = {name: backend.reserve(name, SPEC) for name in ("one", "two")}
    one, two = [await backend.create(name, SPEC, handle) for name, handle in handles.items()]
    pids = [each.machine.pid for each in (one, two)]
    status = [dict(fields(pid)) for pid in pids]
    users = {each["Uid"] for each in status}
    assert len(users) == 2
    assert all(int(user.split()[0]) >= 1 << 30 for user in users)
    for pid, each in zip(pids, status, strict=True):
        assert each["Groups"] == ""
        assert each["NoNewPrivs"] == "1"
        assert (each["Seccomp"], each["Seccomp_filters"]) == ("2", "1")
        assert {int(each[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
        ours, theirs = (namespaces(who) for who in ("self", pid))
        assert not set(ours.values()) & set(theirs.values())
        check_root(Path(f"/proc/{pid}/root"))
    assert not set(namespaces(pids[0]).values()) & set(namespaces(pids[1]).values())
    for name, handle in handles.items():
        await backend.destroy(name, handle)


async def test_a_stem_has_what_its_branches_need_in_a_user_namespace_of_stems(backend: MicroVmBackend) -> None:
    handle = backend.reserve("one", SPEC)
    one = await backend.create("one", SPEC, handle)
    (stem,) = backend.node.stems._stems.values()
    pid = stem.machine.pid
    said = dict(fields(pid))
    assert set(said["Uid"].split()) == set(said["Gid"].split()) == {str(STEM_UID)}
    wanted = sum(1 << number for number in STEM_CAPABILITIES)
    assert {int(said[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {wanted}
    assert (said["NoNewPrivs"], said["Seccomp"], said["Seccomp_filters"]) == ("1", "2", "1")
    users = {who: _user_namespace(who) for who in ("self", pid, one.machine.pid)}
    assert users["self"] != users[pid] == users[one.machine.pid]
    assert "hidepid=invisible" in _mounts(pid)  # of the host's processes it sees itself
    ours, theirs = _files(pid), _files(one.machine.pid)
    shared = {name for name in ours & theirs if name.startswith(("socket", "pipe", "eventfd"))}
    assert shared == set()
    assert not [name for name in ours & theirs if name.endswith(".disk")]
    await backend.destroy("one", handle)


def _user_namespace(who: int | str) -> str:
    return str(Path(f"/proc/{who}/ns/user").readlink())


def _mounts(pid: int) -> str:
    return Path(f"/proc/{pid}/mountinfo").read_text()


def _files(pid: int) -> set[str]:
    """What a process has open: each by what it is, not by its number."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target == "anon_inode:[eventfd]":
            info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
            target = next(line for line in info.splitlines() if line.startswith("eventfd-id"))
        found.add(target)
    return found


async def test_branches_outlive_their_stem_and_the_next_comes_of_another(backend: MicroVmBackend) -> None:
    handles = {name: backend.reserve(name, SPEC) for name in ("one", "two")}
    one = await backend.create("one", SPEC, handles["one"])
    (stem,) = backend.node.stems._stems.values()
    os.kill(stem.machine.pid, signal.SIGKILL)
    await backend.node.machines.exited(stem.machine.name)
    two = await backend.create("two", SPEC, handles["two"])
    (other,) = backend.node.stems._stems.values()
    assert other.machine.name != stem.machine.name
    for each in (one, two):
        assert ok(await shell(each.channel, "echo here")) == b"here\n"
    for name, handle in handles.items():
        await backend.destroy(name, handle)


def test_a_stem_that_lies_about_its_branch_is_ended() -> None:
    """Whom it names would be taken for a machine, and be killed as one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening = socket.socket(socket.AF_UNIX)
    launcher = Launcher(listening, -1)
    with ours, theirs, listening, subprocess.Popen(["sleep", "60"]) as stem:
        launcher.live["stem"], launcher.stems["stem"] = stem.pid, ours
        theirs.send(struct.pack("=i", 1))
        none = {"cgroups": 0, "files": [], "sockets": 0, "over": 0}
        with pytest.raises(OSError, match="1 is no branch"):
            launcher.branch({"id": "one", "stem": "stem", "uid": UID_BASE} | none, [])
        assert stem.wait(120) == -signal.SIGKILL
    assert "one" not in launcher.live
    os.close(launcher.own_pids)


IDLE = """
import socket, sys
from dsec.vmm.launcher import serving
serving.FIRST_S = 0.3
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    serving.Launcher(listening, -1).serve()
"""


def test_a_launcher_that_nobody_came_to_ends(tmp_path: Path) -> None:
    """Whoever started it was killed before it could know of it."""
    with subprocess.Popen([sys.executable, "-c", IDLE, str(tmp_path / "one.sock")]) as launcher:
        assert launcher.wait(180) == 0


async def test_a_launcher_whose_start_was_cancelled_is_known(backend: MicroVmBackend) -> None:
    """By a signal to a server that is just making its first machine, say: it ends with the server as any."""
    node = backend.node
    starting = asyncio.create_task(node.serving())
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await node.serving()
    await asyncio.sleep(1)  # another one would be there by now
    assert len(launchers(node.host.run)) == 1


async def test_a_launcher_that_was_shut_down_is_gone(tmp_path: Path) -> None:
    """Not about to be: what it holds takes a while to go, and who undoes all of a host looks then."""
    late = f"{IDLE}import time\ntime.sleep(1)\n"
    with subprocess.Popen([sys.executable, "-c", late, str(tmp_path / "one.sock")]) as launcher:  # noqa: ASYNC220
        client = LauncherClient(on_exit=lambda *_: None, on_lost=lambda: None)
        async with asyncio.timeout(60):
            while True:
                try:
                    await client.connect(tmp_path / "one.sock")
                    break
                except Unavailable:  # it doesn't listen yet
                    await asyncio.sleep(0.05)
        await client.shutdown()
        assert launcher.poll() == 0


async def test_a_launcher_of_another_version_is_ended(tmp_path: Path) -> None:
    async def answer() -> list[str]:
        said = []
        sock = (await loop.sock_accept(listening))[0]
        with sock:
            while data := await loop.sock_recv(sock, 4096):
                asked = json.loads(data)
                said.append(asked["do"])
                await loop.sock_sendall(sock, json.dumps({"version": 0, "op": asked["op"]}).encode())
        return said

    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.setblocking(False)
        listening.bind(str(tmp_path / "one.sock"))
        listening.listen()
        answering = asyncio.create_task(answer())
        client = LauncherClient(on_exit=lambda *_: None, on_lost=lambda: None)
        with pytest.raises(Unavailable, match="another version"):
            await client.connect(tmp_path / "one.sock")
        assert await answering == ["hello", "shutdown"]


async def test_a_templates_memory_can_not_be_changed(backend: MicroVmBackend) -> None:
    handle = backend.reserve("one", SPEC)
    one = await backend.create("one", SPEC, handle)
    (template,) = backend.node.templates._open.values()
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    for fd in (template.memory, template.state):
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == seals
    with pytest.raises(PermissionError):
        os.pwrite(template.memory, b"x", 0)
    before = os.pread(template.memory, 1 << 20, 16 << 20)
    ok(await shell(one.channel, "head -c 20M /dev/zero | tr '\\0' x > /dev/shm/filled"))
    assert os.pread(template.memory, 1 << 20, 16 << 20) == before
    shutil.rmtree(backend.node._templates_root / template.key)  # clones that live don't care
    ok(await shell(one.channel, "cat /usr/bin/python3* > /dev/null"))
    await backend.destroy("one", handle)


async def test_two_machines_do_not_meet_in_memory_that_they_share(backend: MicroVmBackend) -> None:
    handles = {name: backend.reserve(name, SPEC) for name in ("one", "two")}
    one, two = [await backend.create(name, SPEC, handle) for name, handle in handles.items()]
    ok(await shell(one.channel, "echo mine > /dev/shm/a; echo changed > /etc/motd; sync"))
    assert ok(await shell(two.channel, "ls /dev/shm; cat /etc/motd 2>/dev/null || true")).strip() != b"changed"
    seeds = await asyncio.gather(*(shell(each.channel, "head -c 32 /dev/urandom | od -tx1") for each in (one, two)))
    assert ok(seeds[0]) != ok(seeds[1])
    for name, handle in handles.items():
        await backend.destroy(name, handle)


def test_the_filter_refuses_what_it_does_not_name() -> None:
    """Run by an interpreter of our own: what the kernel does with the program is `Seccomp: 2` above."""
    refused = {"ptrace": 101, "bpf": 321, "io_uring_setup": 425, "init_module": 175, "keyctl": 250, "connect": 42}
    for number in refused.values():
        assert _verdict(number) >> 16 == 0x0005
    for number in (0, 1, 202, 16):
        assert _verdict(number) == 0x7FFF0000
    assert _verdict(56, 0x10000000) >> 16 == 0x0005  # a user namespace
    assert _verdict(56, 0x3D0F00) == 0x7FFF0000  # a thread
    assert _verdict(157, 22) >> 16 == 0x0005  # another filter
    assert _verdict(0, arch=0x40000003) == 0x80000000


def test_monitors_that_make_their_sockets_make_unix_sockets_alone() -> None:
    socket, connect, bind, userfaultfd, unix = 41, 42, 49, 323, 1
    for number in (connect, bind, userfaultfd):
        assert _verdict(number, sockets=True) == 0x7FFF0000
        assert _verdict(number) >> 16 == 0x0005
    assert _verdict(socket, unix, sockets=True) == 0x7FFF0000
    for family in (2, 10, 16, 17, 40):  # IP, netlink, packets, vsock
        assert _verdict(socket, family, sockets=True) >> 16 == 0x0005
    assert _verdict(socket, unix) >> 16 == 0x0005


def _verdict(number: int, argument: int = 0, *, arch: int = 0xC000003E, sockets: bool = False) -> int:
    values = {0: number, 4: arch, 16: argument, 32: 0}
    at, accumulator = 0, 0
    program = filter_program(sockets=sockets)
    while True:
        code, yes, no, operand = program[at]
        at += 1
        match code:
            case 0x20:
                accumulator = values[operand]
            case 0x15:
                at += yes if accumulator == operand else no
            case 0x45:
                at += yes if accumulator & operand else no
            case 0x06:
                return operand

"""Full machines through the SDK: commands, screen, keys and mouse, serial console, checkpoints, forks, and a disk
without our guest, which boots by BIOS."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import Conflict, Internal, InvalidRequest, NotFound, SandboxEnded, Unsupported
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec, State
from dsec.spec.tripwires import MaskedRule, PathRule, ProcessRule, Rule, Severity
from dsec.vmm.images import ImageStore, Traits
from free_port import free_port
from server_kit import PATIENCE_S, Server, serving

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("qemu-system-x86_64") is None or not Path("/usr/share/OVMF").is_dir(),
        reason="QEMU or its firmware is not installed",
    ),
]

ADDRESS, PORT = "127.0.7.1", free_port()
OUTSIDE = f"""
[permissions.echo]
hosts = ["echo.example"]
ports = [{PORT}]
private = true
[hosts]
"echo.example" = ["{ADDRESS}"]
"""
COUNTING = "n=0; while sleep 0.2; do n=$((n+1)); echo $n > /dev/shm/next; mv /dev/shm/next /dev/shm/count; done"
DECOY = "/root" + "/.ssh/id_rsa"
TABLET = """
import json, pathlib, struct
names = pathlib.Path("/proc/bus/input/devices").read_text().split("\\n\\n")
handlers = next(each for each in names if "Tablet" in each).split("Handlers=")[1].split("\\n")[0].split()
print("reading", flush=True)
at = {}
with open("/dev/input/" + next(each for each in handlers if each.startswith("event")), "rb", buffering=0) as file:
    while True:
        _, _, kind, code, value = struct.unpack("qqHHi", file.read(24))
        if kind == 3:
            at[code] = value
        elif kind == 1 and value == 0:
            print(json.dumps([at[0], at[1], code]), flush=True)
            break
"""


@pytest.fixture(scope="module")
def server(debian_module_state: Path, full_templates: Path) -> Iterator[Server]:
    (debian_module_state / "full").mkdir()
    full_templates.mkdir(exist_ok=True)
    (debian_module_state / "full" / "templates").symlink_to(full_templates)
    (debian_module_state / "network.toml").write_text(OUTSIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_VM_ACCEL", "tcg")
        patch.setenv("DSEC_VM_SPARE", "0")
        with serving(debian_module_state) as server:
            yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


@pytest.fixture
def small(vm_disk: str) -> SandboxSpec:
    return SandboxSpec(environment=vm_disk, backend="vm", memory_bytes=256 << 20, disk_bytes=1 << 30, pids=128)


async def said(box: AsyncSandbox, command: str) -> str:
    result = await box.commands.run(command)
    assert result.exit_code == 0, result
    return result.stdout.strip()


def pixels(picture: bytes) -> tuple[int, int, bytes]:
    """Width, height, and the scanlines as they are stored, which is enough to see whether pictures differ."""
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack_from(">II", picture, 16)
    at, data = 8, b""
    while at < len(picture):
        length, kind = struct.unpack_from(">I4s", picture, at)
        if kind == b"IDAT":
            data += picture[at + 8 : at + 8 + length]
        at += 12 + length
    return width, height, zlib.decompress(data)


async def drawn(box: AsyncSandbox, script: str) -> bytes:
    """Its screen, once a script's output is on it."""
    before = await box.screenshot()
    await said(box, f"({script}) > /dev/tty1")
    shown = await until_it_changes(box, before)
    while (now := await box.screenshot()) != shown:
        shown = now
        await asyncio.sleep(0.5)
    return shown


def share_alike(one: bytes, other: bytes) -> float:
    """Of the lines of two pictures."""
    (width, height, lines), (*size, others) = pixels(one), pixels(other)
    assert size == [width, height]
    step = len(lines) // height
    return sum(lines[at : at + step] == others[at : at + step] for at in range(0, len(lines), step)) / height


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_a_network_by_name_without_a_card(client: AsyncClient, small: SandboxSpec) -> None:
    ask = "import socket; s = socket.create_connection(('{}', {}), 60); s.sendall(b'hello'); print(s.recv(9))"
    async with await asyncio.start_server(echo, ADDRESS, PORT):
        box = await client.create(replace(small, network={"echo": True}))
        assert await said(box, "ls /sys/class/net") == "lo"
        assert await said(box, f'python3 -c "{ask.format("echo.example", PORT)}"') == "b'hello'"
        for name, port in ((ADDRESS, PORT), ("other.example", PORT), ("echo.example", 22)):
            assert (await box.commands.run(["python3", "-c", ask.format(name, port)])).exit_code == 1
        checkpoint = await box.checkpoints.create("before")
        assert checkpoint.name == "before"
        await box.checkpoints.revert("before")
        assert await said(box, f'python3 -c "{ask.format("echo.example", PORT)}"') == "b'hello'"


TRAPS: list[str | Rule] = [
    "default",
    PathRule(id="answers", paths=["/srv/answers/**"], on=["read", "write", "remove"], severity=Severity.CRITICAL),
    ProcessRule(id="nap", exe=["**/sleep"], argv=["*sleep 0.9*"]),
    MaskedRule(id="masks"),
]
LOOKOUT = """
import os
for name in os.listdir("/proc"):
    if name.isdigit() and name != "1":
        try:
            links = [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
            if "anon_inode:[fanotify]" in links:
                os.kill(int(name), 9)
        except OSError:
            pass
"""


async def test_tripwires_of_files_and_processes(client: AsyncClient, small: SandboxSpec) -> None:
    """Its own kernel tells, on a file system without layers: also after a revert, of a fork, and again when what looks
    out was ended."""

    async def happened(box: AsyncSandbox, kind: str, script: str, after: int = 0, **wanted: str) -> dict[str, Any]:
        """What comes of a script, which is run until it does: somebody has to look out by then."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            await said(box, script)
            await asyncio.sleep(0.3)
            async for each in box.events(after=after):
                if each.type == kind and wanted.items() <= each.data.items():
                    return each.data
            assert time.monotonic() < deadline, (script, [(e.type, e.data) async for e in box.events(after=after)])

    async def now(box: AsyncSandbox) -> int:
        return max([each.seq async for each in box.events()])

    with pytest.raises(Unsupported, match="no masked files"):
        await client.create(replace(small, tripwires=TRAPS))
    box = await client.create(replace(small, tripwires=TRAPS[:-1]))
    armed = await happened(box, "tripwires_armed", "true")
    assert armed["not_watched"] == ["masked-kernel-file"]
    assert "missing_decoys" not in armed
    decoy = f"cat {DECOY} > /dev/null"
    seen = await happened(box, "tripwire", decoy, rule="decoy-ssh-key", act="read")
    assert (seen["path"], seen["process"]["exe"]) == (DECOY, "/usr/bin/cat")
    await happened(box, "tripwire", "echo > /etc/ld.so.preload; rm /etc/ld.so.preload", rule="loader-preload")
    made = "mkdir -p /srv/answers; echo 1 > /tmp/new; mv /tmp/new /srv/answers/one"
    moved = await happened(box, "tripwire", made, rule="answers", act="write", path="/srv/answers/one")
    assert moved["process"]["exe"] == "/usr/bin/mv"
    gone = await happened(box, "tripwire", "rm -f /srv/answers/one", rule="answers", act="remove")
    assert gone["severity"] == "critical"
    nap = await happened(box, "tripwire", "sleep 0.9", rule="nap", act="start")
    assert nap["process"]["argv"] == ["sleep", "0.9"]
    await box.checkpoints.create("before")
    await box.checkpoints.revert("before")
    await happened(box, "tripwire", decoy, await now(box), rule="decoy-ssh-key")
    (child,) = await box.fork()
    await happened(child, "tripwire", decoy, rule="decoy-ssh-key")
    at = await now(box)
    lost = await happened(box, "tripwires_lost", f"python3 -c '{LOOKOUT}'", at)
    assert "ended" in lost["message"]
    await happened(box, "tripwire", decoy, at, rule="decoy-ssh-key")


async def until_it_changes(box: AsyncSandbox, before: bytes) -> bytes:
    deadline = time.monotonic() + PATIENCE_S
    while (now := await box.screenshot()) == before:
        assert time.monotonic() < deadline, "the screen stays as it is"
        await asyncio.sleep(0.3)
    return now


async def test_a_machine_is_a_debian_with_systemd(client: AsyncClient, small: SandboxSpec) -> None:
    box = await client.create(small)
    assert await said(box, "ps -o comm= 1") == "systemd"
    assert await said(box, "hostname") == box.id
    assert "running" in await said(box, "systemctl is-system-running || true")
    assert await said(box, "ls /sys/firmware/efi | head -1")
    size = int(await said(box, "df --output=size -B1 / | tail -1"))
    assert 0.8 * small.disk_bytes < size < small.disk_bytes  # the root file system has grown
    full = await box.commands.run("fallocate -l 2G /big")
    assert full.exit_code != 0
    assert "No space left" in full.stderr
    other = await client.create(small)
    assert await said(other, "cat /etc/machine-id") != await said(box, "cat /etc/machine-id")
    assert box.info.accel == "tcg"
    await box.pause()
    assert await said(box, "echo it goes on") == "it goes on"
    third = await client.create(small)
    for machine, end, why in (
        (box, "systemctl poweroff", "shut down"),
        (other, "kill -9 -1", ""),
        (third, "echo c > /proc/sysrq-trigger", "the kernel inside panicked"),
    ):
        await machine.commands.start(end)
        deadline = time.monotonic() + PATIENCE_S
        while (await machine.refresh()).state is not State.ENDED:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert machine.info.cause is Cause.GUEST_EXITED
        assert why in machine.info.message


async def test_keys_and_clicks(client: AsyncClient, small: SandboxSpec) -> None:
    box = await client.create(small)
    before = await box.screenshot()
    width, height, _ = pixels(before)
    assert width >= 640
    await box.type("root\n")
    after = await until_it_changes(box, before)
    assert pixels(after)[2] != pixels(before)[2]
    reading = await box.commands.start(["python3", "-u", "-c", TABLET])
    assert await anext(aiter(reading)) is not None
    await box.click(width // 2, height // 4, button="right")
    x, y, button = json.loads((await reading.wait()).stdout.splitlines()[-1])
    assert abs(x / 0x7FFF - 0.5) < 0.01
    assert abs(y / 0x7FFF - 0.25) < 0.01
    assert button == 0x111
    with pytest.raises(InvalidRequest, match="not on the screen"):
        await box.click(width, 0)
    with pytest.raises(InvalidRequest, match="no key"):
        await box.press("ctrl-nonsense")
    await box.type("Touched=Yes; echo $Touched > /root/typed; sync\n")
    deadline = time.monotonic() + PATIENCE_S
    while await said(box, "cat /root/typed 2>/dev/null || true") != "Yes":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.3)


async def test_the_serial_console(client: AsyncClient, small: SandboxSpec) -> None:
    box = await client.create(small)
    await box.console.write("\n")
    assert f"{box.id} login:" in await box.console.wait_for("login: ", timeout_s=PATIENCE_S)
    at = await box.console.read()
    assert (await box.console.read(at.offset + len(at.data))).data == b""


async def test_checkpoints(server: Server, client: AsyncClient, small: SandboxSpec) -> None:
    box = await client.create(small)
    await said(box, "echo one > /root/state; echo one > /dev/shm/state")
    runs = await box.commands.start(COUNTING, key="loop")
    drawing = await drawn(box, "printf '\\033[?25l\\033[2J\\033[H'; yes '*=*=*=*=*=*=*=*=*=*=*=*' | head -20")
    made = await box.checkpoints.create("one")
    assert made.memory_bytes > 0
    with pytest.raises(Conflict):
        await box.checkpoints.create("one")
    await said(box, "echo two > /root/state; echo two > /dev/shm/state; kill -9 $(pgrep -f 'sleep 0.2' -P 1) || true")
    cleared = await drawn(box, "printf '\\033[2J\\033[H'")
    assert share_alike(cleared, drawing) < 0.9
    await box.checkpoints.create("two")
    await said(box, "rm /root/state /dev/shm/state; sync")
    assert [each.name for each in await box.checkpoints.all()] == ["one", "two"]
    await box.checkpoints.revert("two")
    assert await said(box, "cat /root/state /dev/shm/state") == "two\ntwo"
    await box.checkpoints.revert("one")
    assert share_alike(await box.screenshot(), drawing) > 0.9
    assert await said(box, "cat /root/state /dev/shm/state") == "one\none"
    before = int(await said(box, "cat /dev/shm/count 2>/dev/null || echo 0"))
    deadline = time.monotonic() + PATIENCE_S
    while int(await said(box, "cat /dev/shm/count")) <= before:
        assert time.monotonic() < deadline, "what ran then does not go on"
    assert abs(float(await said(box, "date +%s")) - time.time()) < PATIENCE_S
    await box.checkpoints.delete("two")
    with pytest.raises(NotFound):
        await box.checkpoints.revert("two")
    (child,) = await box.fork()
    assert share_alike(await child.screenshot(), drawing) > 0.9
    assert await said(child, "cat /root/state; hostname") == f"one\n{child.id}"
    with pytest.raises(NotFound):
        await child.checkpoints.revert("one")
    del runs
    await said(box, "rm /root/state /dev/shm/state")
    server.kill()
    server.start()
    async with server.client() as again:
        box = await again.connect(box.id)
        assert [each.name for each in await box.checkpoints.all()] == ["one"]
        await box.checkpoints.revert("one")
        assert await said(box, "cat /root/state /dev/shm/state") == "one\none"
        for disk in (server.config.run / "volume/full").glob("m*.template"):
            os.truncate(disk, 1 << 20)
        with pytest.raises(Internal, match="no way back to 'one'"):
            await box.checkpoints.revert("one")
        assert await said(box, "cat /root/state") == "one", "it ended for nothing"


async def test_a_disk_without_our_guest(
    client: AsyncClient, vm_disk: str, debian_module_state: Path, small: SandboxSpec
) -> None:
    """By BIOS, where its boot loader is there for that: it shows what it boots, and its console takes what is typed."""
    store = ImageStore(debian_module_state)
    source = store.path(store.find(vm_disk))
    if shutil.which("syslinux") is None:
        pytest.skip("syslinux is not installed: the disk boots by UEFI alone")
    store.import_file(source, "stranger", Traits(firmware="bios", machine="pc", guest=False))
    try:
        box = await client.create(replace(small, environment="stranger"))
        console = await box.console.wait_for("login:", timeout_s=4 * PATIENCE_S)
        assert "Debian GNU/Linux 12" in console
        await box.console.write("root\n")
        await box.console.wait_for("#", after=len(console), timeout_s=2 * PATIENCE_S)
        assert pixels(await box.screenshot())[0] >= 640
        with pytest.raises(Unsupported, match="no guest of ours"):
            await box.commands.run("true")
        with pytest.raises(Unsupported, match="no guest of ours"):
            await box.files.read("/etc/hostname")
        await box.kill()
        with pytest.raises(SandboxEnded):
            await box.screenshot()
    finally:
        store.remove("stranger")


async def test_containers_have_no_screen(client: AsyncClient) -> None:
    box = await client.create("debian")
    for refused in (box.screenshot(), box.press("enter"), box.console.read(), box.checkpoints.create("a")):
        with pytest.raises(Unsupported, match="backend 'container'"):
            await refused


async def test_what_a_machine_can_not_be(client: AsyncClient, small: SandboxSpec) -> None:
    for fields, code in (
        ({"environment": "no-such-disk"}, "environment_not_found"),
        ({"disk_bytes": 16 << 20}, "invalid_request"),
        ({"memory_bytes": 64 << 20}, "invalid_request"),
        ({"memory_bytes": 1 << 40}, "unsupported"),
        ({"require_kvm": True}, "unsupported"),
        ({"layers": ["debian"]}, "unsupported"),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011  (its code says what it is)
            await client.create(replace(small, **fields))
        assert getattr(caught.value, "code", None) == code, (fields, caught.value)

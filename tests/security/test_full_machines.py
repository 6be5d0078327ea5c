"""Full machines: their monitor is as confined as a microVM's, and disk images that mean harm are only data."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from vmm_kit import check_root, fields, namespaces

from dsec.app import open_full_machines, open_host, open_machines
from dsec.backends.vm.backend import VmBackend
from dsec.backends.vm.line import Firmware, FullShape, Sockets, command
from dsec.configuration import Config
from dsec.edge.config import SystemClock
from dsec.errors import InvalidRequest
from dsec.spec.sandbox import SandboxSpec
from dsec.store.views import remove_dev
from dsec.testing.conformance.kit import ok, shell
from dsec.vmm import imaging
from dsec.vmm.images import ImageStore, Traits
from dsec.vmm.qemu import QemuDriver

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in ("qemu-system-x86_64", "qemu-img"))
        or not Path("/usr/share/OVMF").is_dir(),
        reason="QEMU, qemu-img or the firmware is not installed",
    ),
]


@pytest.fixture
async def backend(debian_state: Path, full_templates: Path, tmp_path: Path) -> AsyncIterator[VmBackend]:
    config = Config(state=debian_state, run=tmp_path / f"run-{os.getpid()}", vm_accel="tcg", vm_spare=0)
    host = open_host(config)
    try:
        beside = open_machines(config, host)
        assert beside is not None
        found = VmBackend(open_full_machines(config, host, beside, full_templates), SystemClock())
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


async def test_a_monitor_has_nothing_but_its_descriptors(backend: VmBackend, vm_disk: str) -> None:
    spec = SandboxSpec(environment=vm_disk, backend="vm", memory_bytes=256 << 20, disk_bytes=1 << 30, pids=128)
    handles = {name: backend.reserve(name, spec) for name in ("one", "two")}
    one, two = [await backend.create(name, spec, handle) for name, handle in handles.items()]
    pids = [each.machine.pid for each in (one, two)]
    users = set()
    for pid in pids:
        status = dict(fields(pid))
        users.add(status["Uid"])
        assert int(status["Uid"].split()[0]) >= 1 << 30
        assert status["Groups"] == ""
        assert status["NoNewPrivs"] == "1"
        assert (status["Seccomp"], status["Seccomp_filters"]) == ("2", "1")
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
        assert not set(namespaces("self").values()) & set(namespaces(pid).values())
        check_root(Path(f"/proc/{pid}/root"))
        files = {name for name in opened(pid) if name.startswith("/") and "memfd:" not in name}
        disk = str(backend.node.disks.path(handles["one" if pid == pids[0] else "two"]["vm"]))
        assert {name for name in files if not name.startswith(("/dev/", "/usr/share/OVMF/"))} == {disk}
    assert len(users) == 2
    assert not set(namespaces(pids[0]).values()) & set(namespaces(pids[1]).values())
    (template,) = backend.node.templates._open.values()
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    assert all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) == seals for fd in (template.memory, template.state))
    before = os.pread(template.memory, 1 << 20, 64 << 20)
    ok(await shell(one.channel, "head -c 20M /dev/zero | tr '\\0' x > /dev/shm/filled; echo mine > /etc/motd; sync"))
    assert os.pread(template.memory, 1 << 20, 64 << 20) == before
    assert ok(await shell(two.channel, "cat /etc/motd; ls /dev/shm")).strip() != b"mine"
    ok(
        await shell(one.channel, "! (echo harm > /dev/disk/by-label/CIDATA) 2>/dev/null")
    )  # the seed can't be written to
    for source in ("/dev/urandom", "/dev/hwrng"):  # the second is QEMU's, which both are copies of
        drawn = await asyncio.gather(*(shell(each.channel, f"head -c 32 {source} | od -tx1") for each in (one, two)))
        assert ok(drawn[0]) != ok(drawn[1])
    for name, handle in handles.items():
        await backend.destroy(name, handle)


def opened(pid: int) -> set[str]:
    """What a process has open."""
    return {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}  # noqa: PTH115


def qemu_img(*arguments: str | Path) -> None:
    subprocess.run(["qemu-img", *map(str, arguments)], check=True, capture_output=True)


def test_images_that_name_other_files_are_refused(tmp_path: Path) -> None:
    store, secret = ImageStore(tmp_path / "state"), tmp_path / "secret"
    secret.write_bytes(b"the host's" * 100_000)
    cases = {
        "backed": ("-f", "qcow2", "-b", secret, "-F", "raw"),
        "of-data": ("-f", "qcow2", "-o", f"data_file={secret},data_file_raw=on"),
    }
    for name, options in cases.items():
        image = tmp_path / f"{name}.qcow2"
        qemu_img("create", *options, image, "1M")
        with pytest.raises(InvalidRequest, match="names"):
            store.import_file(image, name, Traits())
        with (
            image.open("rb") as source,
            (tmp_path / f"{name}.raw").open("xb") as target,
            pytest.raises(InvalidRequest, match="can't be read"),  # nor has the jail any file to give
        ):
            imaging.convert(source.fileno(), target.fileno(), 1 << 20)
        assert b"the host's" not in (tmp_path / f"{name}.raw").read_bytes()
    (tmp_path / "raw").write_bytes(bytes(510) + b"\x55\xaa" + bytes((1 << 20) - 512))
    plain = tmp_path / "plain.qcow2"
    qemu_img("convert", "-O", "qcow2", tmp_path / "raw", plain)
    for length in (4, 80, 120):
        (tmp_path / "cut.qcow2").write_bytes(plain.read_bytes()[:length])
        with pytest.raises(InvalidRequest):
            store.import_file(tmp_path / "cut.qcow2", "cut", Traits())
    store.import_file(plain, "plain", Traits())
    assert [name for each in store.list() for name in each.names] == ["plain"]
    assert not list(store.root.glob(".tmp-*"))


def test_a_disk_is_never_opened_as_what_it_says_it_is() -> None:
    """What a machine writes to its own disk may look like an image that names a file of the host's."""
    driver, shape = QemuDriver(Path("/usr/bin/qemu-system-x86_64"), "tcg"), FullShape("", 1, 256 << 20, 1 << 30)
    made = command(
        driver, shape, Traits(), Sockets(10, 11, 12), memory=13, disk=14, seed=15, firmware=Firmware(16, 17),
        state=None, own_memory=True,
    )  # fmt: skip
    disks = [word for before, word in itertools.pairwise(made.argv) if before == "-blockdev"]
    assert len(disks) == 8
    assert all(word.startswith(("driver=file,filename=/dev/fdset/", "driver=raw,file=")) for word in disks)
    assert "-drive" not in made.argv
    assert not any("qcow2" in word for word in made.argv)


def test_what_reads_an_image_is_in_a_jail(tmp_path: Path) -> None:
    raw, image = tmp_path / "raw", tmp_path / "image.qcow2"
    with raw.open("wb") as file:
        for _ in range(96):
            file.write(os.urandom(1 << 20))
    qemu_img("convert", "-f", "raw", "-O", "qcow2", raw, image)
    target = tmp_path / "target"
    for _ in range(20):  # it may be over before anybody looked
        if status := seen_at_work(image, target):
            break
    assert status, "qemu-img was never seen"
    assert int(status["Uid"].split()[0]) >= imaging.UID_BASE
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert target.read_bytes() == raw.read_bytes()


def seen_at_work(image: Path, target: Path) -> dict[str, str]:
    """What is to be seen of a conversion's process while it runs; empty where it was too quick."""
    seen: list[dict[str, str]] = []
    with image.open("rb") as source, target.open("wb") as written:
        work = threading.Thread(target=imaging.convert, args=(source.fileno(), written.fileno(), 96 << 20))
        work.start()
        while work.is_alive() and not seen:
            for pid in jailed():
                os.kill(pid, signal.SIGSTOP)
                try:
                    status = dict(fields(pid))
                    if status["State"].startswith(("T", "R", "S", "D")) and status["Name"] == "qemu-img":
                        check_root(Path(f"/proc/{pid}/root"))
                        assert not set(namespaces("self").values()) & set(namespaces(pid).values())
                        seen.append(status)
                finally:
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.002)
        work.join()
    return seen[0] if seen else {}


def jailed() -> list[int]:
    """Processes that run qemu-img as a jail's user."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid >= imaging.UID_BASE and (path / "comm").read_text().strip() == "qemu-img":
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found

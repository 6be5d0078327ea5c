"""Firecracker's driver: what it asks is what the published API takes (tests/firecracker_kit.py holds it), and how it
takes what comes back. Never run against Firecracker itself here."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.errors import Unavailable, Unsupported
from dsec.vmm.driver import LayerDisks, Shape, Start
from dsec.vmm.firecracker import FirecrackerDriver, Memory, punch_zeros
from dsec.vmm.unix_http import UnixHttp
from firecracker_kit import BEFORE, PAUSED, RUNS, Machine, serve

SHAPE = Shape(2, 128 << 20, 64 << 20, ("a", "b"))


def driver(version: str = "Firecracker v1.17.0", memory: Memory = "File") -> FirecrackerDriver:
    return FirecrackerDriver(
        Path("/opt/firecracker"), version, memory=memory, build_native=lambda: Path("/opt/native/guest")
    )


def start(**changed: Any) -> Start:
    layers = (LayerDisks(21, 22), LayerDisks(23, None))
    fields: dict[str, Any] = {"channel": 10, "control": 10, "memory": 11, "disk": 12, "layers": layers}
    return Start(shape=SHAPE, machine="pc", **fields | changed)


def test_a_clone_opens_its_disks_by_the_numbers_that_its_template_used() -> None:
    boot = driver().plan(start(kernel=31, initramfs=32))
    clone = driver().plan(start(state=41))
    assert boot.fds == (10, 11, 12, 21, 22, 23, 31, 32)
    assert clone.fds == (10, 11, 12, 21, 22, 23, 41)
    drives = {path: body["path_on_host"] for path, body in boot.boot if path.startswith("/drives/")}
    assert drives == {
        "/drives/disk": "/proc/self/fd/5",
        "/drives/m0": "/proc/self/fd/6",
        "/drives/d0": "/proc/self/fd/7",
        "/drives/m1": "/proc/self/fd/8",
    }
    assert "dsec.disks=disk,m0,d0,m1" in dict(boot.boot)["/boot-source"]["boot_args"]
    assert (clone.boot, boot.load) == ((), None)
    assert clone.load == {
        "snapshot_path": "/proc/self/fd/9",
        "mem_backend": {"backend_type": "File", "backend_path": "/proc/self/fd/4"},
        "resume_vm": False,
    }
    assert "--no-seccomp" in clone.argv  # the launcher's filter is loaded once for all


def test_memory_that_is_served_has_a_pager_around_the_clone_alone() -> None:
    paged = driver(memory="Uffd")
    assert paged.plan(start(kernel=31)).argv[0] == "/opt/firecracker"
    clone = paged.plan(start(state=41))
    assert clone.argv[:2] == ("/opt/native/pager", "/opt/firecracker")
    assert clone.load is not None
    assert clone.load["mem_backend"] == {"backend_type": "Uffd", "backend_path": "/proc/self/fd/3/pages"}
    assert paged.paths == ("/opt/firecracker", "/opt/native/pager")


class Accepting(Machine):
    """Opens nothing: the requests alone are looked at."""

    def act(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/actions":
            self.state = RUNS
        elif path == "/vm":
            self.state = PAUSED if body["state"] == "Paused" else RUNS
        elif path == "/snapshot/load":
            self.state = PAUSED
        return 204, None


@pytest.mark.parametrize("version", [(1, 7), (1, 13), (1, 14), (1, 17)])
@pytest.mark.parametrize("memory", ["File", "Uffd"])
def test_every_request_is_one_of_the_published_api(version: tuple[int, int], memory: Memory) -> None:
    found = driver("Firecracker v{}.{}.1".format(*version), memory)
    machine, clone = Accepting(version), Accepting(version)
    for path, body in found.plan(start(kernel=31, initramfs=32)).boot:
        assert machine.request("PUT", path, body) == (204, None)
    assert machine.state == RUNS
    reporting = dict(found.plan(start(kernel=31)).boot)["/balloon"].get("free_page_reporting", False)
    assert reporting is (version >= (1, 14))
    assert clone.request("PUT", "/snapshot/load", found.plan(start(state=41)).load) == (204, None)
    assert clone.state == PAUSED


@pytest.mark.parametrize(
    ("method", "path", "body", "why"),
    [
        ("PUT", "/machine-config", {"vcpu_count": 33, "mem_size_mib": 128}, "can't be 33"),
        ("PUT", "/machine-config", {"vcpu_count": "1", "mem_size_mib": 128}, "no int"),
        ("PUT", "/boot-source", {"boot_args": "quiet"}, "missing field `kernel_image_path`"),
        ("PUT", "/balloon", {"amount_mib": 0, "deflate_on_oom": True, "more": 1}, "unknown field `more`"),
        ("PUT", "/snapshot/create", {"mem_file_path": "a", "snapshot_path": "b"}, "not legal while Not started"),
        ("PATCH", "/vm", {"state": "Paused"}, "not legal while Not started"),
        ("PUT", "/nothing", {}, "no such call"),
    ],
)
def test_the_server_that_plays_it_refuses_what_the_api_does(method: str, path: str, body: Any, why: str) -> None:
    machine = Machine()
    status, answer = machine.request(method, path, body)
    assert status == 400
    assert why in answer["fault_message"]
    assert machine.state == BEFORE


class Saving(Accepting):
    """Writes snapshots, in a directory that isn't its own here."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def act(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/snapshot/create":
            assert body["snapshot_type"] == "Full"
            (self.directory / "state").write_bytes(b"saved")
            if body["mem_file_path"] == "/proc/self/fd/3/memory":
                (self.directory / "memory").write_bytes(bytes(1 << 20) + b"content" * 1000)
        return super().act(method, path, body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Serves at `own/api`; what it was asked."""
    asked: list[dict[str, Any]] = []
    (tmp_path / "own").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "own/api"))
        listening.listen(1)
        threading.Thread(target=serve, args=(Saving(tmp_path / "own"), listening, asked.append), daemon=True).start()
        yield asked


async def test_a_template_is_booted_and_saved(tmp_path: Path, server: list[dict[str, Any]]) -> None:
    with (tmp_path / "memory").open("w+b") as memory:
        memory.truncate(1 << 20)
        wanted = start(kernel=31, memory=memory.fileno())
        found = driver()
        control = await found.control(tmp_path / "control")
        begin = found.command(wanted).begin
        assert begin is not None
        await begin(control)
        state = os.memfd_create("state")
        await control.save(state)
        assert os.pread(state, 100, 0) == b"saved"
        os.close(state)
        control.close()
    assert [(each["method"], each["path"]) for each in server] == [
        *(("PUT", path) for path, _ in found.plan(wanted).boot),
        ("PATCH", "/vm"),
        ("PUT", "/snapshot/create"),
    ]
    assert {each["status"] for each in server} == {204}
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"api"}


async def test_a_machine_that_goes_on_is_copied_whole(tmp_path: Path, server: list[dict[str, Any]]) -> None:
    control = await driver().control(tmp_path / "control")
    loading = driver().command(start(state=41)).begin
    assert loading is not None
    await loading(control)
    await control.restored()
    await control.resume()
    await control.stop()
    state, memory = os.memfd_create("state"), os.memfd_create("memory")
    await control.split(state, memory)
    await control.resume()
    assert os.pread(state, 100, 0) == b"saved"
    assert os.pread(memory, 7100, 1 << 20) == b"content" * 1000
    assert os.fstat(memory).st_blocks * 512 <= 128 << 10  # zeros are holes
    assert [(each["method"], each["path"], each["body"].get("state")) for each in server] == [
        ("PUT", "/snapshot/load", None),
        ("PATCH", "/vm", "Resumed"),
        ("PATCH", "/vm", "Paused"),
        ("PUT", "/snapshot/create", None),
        ("PATCH", "/vm", "Resumed"),
    ]
    assert {each["status"] for each in server} == {204}
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"api"}
    os.close(state)
    os.close(memory)
    control.close()


async def test_what_it_refuses_is_said(tmp_path: Path, server: list[dict[str, Any]]) -> None:
    control = await driver().control(tmp_path / "control")
    with pytest.raises(Unavailable, match=r"refused PATCH /vm .*not legal while Not started"):
        await control.resume()
    control.close()
    assert len(server) == 1


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 \r\nContent-Length: 99999999\r\n\r\n", b""])
async def test_nonsense_for_an_answer_is_an_error(tmp_path: Path, answer: bytes) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(once, tmp_path / "api"):
        api = await UnixHttp.open(tmp_path / "api")
        with pytest.raises(Unavailable, match="did not answer GET /"):
            await api.call("GET", "/")


async def test_a_link_in_place_of_its_socket_is_not_followed(tmp_path: Path) -> None:
    """What a guest could do that has taken its VMM over: lead the server to a socket of somebody else's."""
    (tmp_path / "own").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "other"))
        other.listen(1)
        other.setblocking(False)
        (tmp_path / "own/vsock").symlink_to(tmp_path / "other")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver().connect(tmp_path), 0.2)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_an_old_one_and_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="not there"):
        FirecrackerDriver.find(build_native=Path)
    program = tmp_path / "firecracker"
    program.write_text("#!/bin/sh\necho Firecracker v1.4.1\n")
    program.chmod(0o755)
    with pytest.raises(Unsupported, match=r"1\.4\.1 is too old"):
        FirecrackerDriver.find(build_native=Path)
    program.write_text("#!/bin/sh\necho Firecracker v1.12.0\n")
    assert FirecrackerDriver.find(build_native=Path).version == "Firecracker v1.12.0"


def test_its_end_is_the_machines_where_it_left_by_itself() -> None:
    end = driver().own_end(0, "Kernel panic - not syncing: sysrq")
    assert end is not None
    assert "Kernel panic" in end.console
    assert driver().own_end(1 << 8, "bad argument") is None
    assert driver().own_end(9, "") is None


def test_zeros_of_a_memory_become_holes(tmp_path: Path) -> None:
    with (tmp_path / "memory").open("w+b") as file:
        file.write(bytes(1 << 20) + b"x" * 5000 + bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        before = (tmp_path / "memory").read_bytes()
        punch_zeros(file.fileno())
        assert (tmp_path / "memory").read_bytes() == before
        assert os.fstat(file.fileno()).st_blocks * 512 <= 128 << 10

"""Firecracker as a VMM, by its public HTTP API.

Never run here: no host that this project was made on had both its program and a KVM that is fit for it. What it is told
is checked against its published API by a server that plays its part (tests/firecracker_kit.py).

Everything that it opens it is handed as a descriptor, and opens again by `/proc/self/fd/N`; the numbers are the same
for a template and its clones, because a saved state names the disks and the channel's socket by them:

    3 the machine's directory   4 memory   5 disk   6, ... the layers' images and data   then kernel, initramfs or state

In the directory it makes its two sockets, `api` and `vsock`; once it has, the directory is root's, and a guest that
took the VMM over can't fill the host's disk through it. The channel is a vsock connection that the server makes
(`CONNECT port`); the guest listens, and takes the newest for good (native/guest/vm.c). It needs a built kernel.

A clone's memory is the template's file, mapped privately and shared with the other clones (`File`), or served page by
page by our own handler (`Uffd`, native/pager), which is of use where a template's file is not in memory anyway. A copy
of a machine that goes on is a `Full` snapshot, into files that are there for it alone (`split`); the device ends all
vsock connections by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from msgspec import Struct

from dsec.errors import Unavailable, Unsupported
from dsec.kernel.syscalls import punch_hole
from dsec.vmm.disks import copy_data
from dsec.vmm.driver import Command, Start, VmmControl, VmmEnd
from dsec.vmm.unix_http import UnixHttp

MIB = 1 << 20
PROGRAM = "firecracker"
OLDEST = (1, 7)
REPORTING = (1, 14)
"""Since then its balloon takes free page reporting."""
VSOCK_PORT = 1024
MOST_VCPUS = 32
MOST_DEVICES = 19
"""Interrupts there are: without PCI each virtio device has one."""

Memory = Literal["File", "Uffd"]

_DIRECTORY, _MEMORY, _DISK, _FIRST_LAYER = 3, 4, 5, 6
_GUEST_CID = 3
_KERNEL = (
    "console=ttyS0 quiet loglevel=3 panic=-1 reboot=k pci=off rdinit=/init random.trust_cpu=on nowatchdog "
    "cgroup_no_v1=all 8250.nr_uarts=1 i8042.noaux i8042.nomux i8042.dumbkbd"
)
_POLL_S = 0.002
_APPEAR_S = 10.0
_CONNECT_S = 120.0
"""A template's guest listens when it has booted."""
_CHUNK = 1 << 16
_MOST_LINE = 32


class Plan(Struct, frozen=True):
    """How one is started, and what it is asked then."""

    argv: tuple[str, ...]
    fds: tuple[int, ...]
    boot: tuple[tuple[str, dict[str, Any]], ...]
    """PUT each, in this order; none for a clone."""
    load: dict[str, Any] | None
    """What a clone's state is loaded with."""


class FirecrackerDriver:
    """Firecracker for one host. Find it by `find`."""

    name: ClassVar[str] = "firecracker"
    listens: ClassVar[bool] = True
    copies_whole: ClassVar[bool] = True
    built_kernel: ClassVar[bool] = True
    accel: ClassVar[str] = "kvm"
    most_vcpus: ClassVar[int] = MOST_VCPUS

    def __init__(self, program: Path, version: str, *, memory: Memory, build_native: Callable[[], Path]) -> None:
        """`build_native`: the compiled guest, beside which the pager lies; blocks while it is compiled first."""
        self._program = program
        self.version = version
        self._memory = memory
        self._build_native = build_native

    @classmethod
    def find(cls, *, memory: Memory = "File", build_native: Callable[[], Path]) -> FirecrackerDriver:
        """Raises `Unsupported` where it isn't installed, or too old."""
        program = shutil.which(PROGRAM)
        if program is None:
            raise Unsupported(f"{PROGRAM} is not there", remedy="Put its release binary into the PATH.")
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        version = (done.stdout.splitlines() or ["unknown"])[0]
        if _number(version) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise Unsupported(f"{version} is too old", remedy=f"Install Firecracker {oldest} or a later one.")
        return cls(Path(program).resolve(), version, memory=memory, build_native=build_native)

    @cached_property
    def fingerprint(self) -> str:
        """As in `VmmDriver`."""
        found = self._program.stat()
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "".join(line for line in lines if line.startswith(("model name", "flags", "stepping")))[:8000]
        parts = (self.version, str(found.st_size), str(found.st_mtime_ns), cpu, _KERNEL)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def paths(self) -> tuple[str, ...]:
        found = [str(self._program)]
        if self._memory == "Uffd":
            found.append(str(self._pager))
        return tuple(found)

    @property
    def _pager(self) -> Path:
        return self._build_native().with_name("pager")

    @property
    def overhead_bytes(self) -> int:
        return 64 * MIB

    def most_layers(self, machine: str) -> int:
        """Two disks each; the others are the disk, vsock, the balloon and the source of random numbers."""
        return (MOST_DEVICES - 4) // 2

    def plan(self, start: Start) -> Plan:
        """Everything that one start takes."""
        fds = [start.control, start.memory, start.disk]
        drives = [_drive("disk", _DISK, read_only=False)]
        for number, layer in enumerate(start.layers):
            for serial, fd in ((f"m{number}", layer.image), (f"d{number}", layer.data)):
                if fd is not None:
                    fds.append(fd)
                    drives.append(_drive(serial, 2 + len(fds), read_only=True))
        for extra in start.extra:
            fds.append(extra.fd)
            drives.append(_drive(extra.serial, 2 + len(fds), read_only=extra.read_only))
        boot: list[tuple[str, dict[str, Any]]] = []
        load: dict[str, Any] | None = None
        if start.kernel is not None:
            fds.append(start.kernel)
            source = {"kernel_image_path": _path(2 + len(fds))}
            if start.initramfs is not None:
                fds.append(start.initramfs)
                source["initrd_path"] = _path(2 + len(fds))
            disks = ",".join(drive["drive_id"] for drive in drives)
            source["boot_args"] = f"{_KERNEL} dsec.vsock={VSOCK_PORT} dsec.disks={disks}"
            boot = self._boot(start, source, drives)
        elif start.state is not None:
            fds.append(start.state)
            kind, where = ("Uffd", f"{_path(_DIRECTORY)}/pages") if self._paged(start) else ("File", _path(_MEMORY))
            backend = {"backend_type": kind, "backend_path": where}
            load = {"snapshot_path": _path(2 + len(fds)), "mem_backend": backend, "resume_vm": False}
        argv = [str(self._program), "--no-seccomp", "--level", "Error", "--api-sock", f"{_path(_DIRECTORY)}/api"]
        if self._paged(start):
            argv.insert(0, str(self._pager))
        return Plan(tuple(argv), tuple(fds), tuple(boot), load)

    def _paged(self, start: Start) -> bool:
        return self._memory == "Uffd" and start.state is not None

    def _boot(
        self, start: Start, source: dict[str, str], drives: list[dict[str, Any]]
    ) -> list[tuple[str, dict[str, Any]]]:
        balloon: dict[str, Any] = {"amount_mib": 0, "deflate_on_oom": True}
        if _number(self.version) >= REPORTING:
            balloon["free_page_reporting"] = True
        machine = {"vcpu_count": start.shape.vcpus, "mem_size_mib": start.shape.memory_bytes // MIB, "smt": False}
        return [
            ("/machine-config", machine),
            ("/boot-source", dict(source)),
            *((f"/drives/{drive['drive_id']}", drive) for drive in drives),
            ("/vsock", {"guest_cid": _GUEST_CID, "uds_path": f"{_path(_DIRECTORY)}/vsock"}),
            ("/entropy", {}),
            ("/balloon", balloon),
            ("/actions", {"action_type": "InstanceStart"}),
        ]

    def command(self, start: Start) -> Command:
        """As in `VmmDriver`."""
        plan = self.plan(start)

        async def begin(control: VmmControl) -> None:
            assert isinstance(control, FirecrackerControl)
            await control.begin(start, plan)

        return Command(plan.argv, plan.fds, begin, file_bytes=start.shape.memory_bytes)  # `save`, `split`

    async def control(self, path: Path) -> FirecrackerControl:
        """As in `VmmDriver`: `path` is `control` in the machine's directory; the API is below it."""
        directory = Path(os.path.realpath(path.parent), "own")  # noqa: ASYNC240 (microseconds)
        deadline = asyncio.get_running_loop().time() + _APPEAR_S
        while True:
            with contextlib.suppress(Unavailable), _socket_at(directory / "api") as api:
                return FirecrackerControl(await UnixHttp.open(api), directory)
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"the VMM did not make its API's socket in {_APPEAR_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def connect(self, directory: Path) -> socket.socket:
        """As in `VmmDriver`: asks until the guest listens."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                while True:
                    found = await _ask_for_port(directory / "own" / "vsock")
                    if found is not None:
                        return found
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable("the virtual machine's port can't be reached: its guest does not listen") from None

    def own_end(self, status: int, said: str) -> VmmEnd | None:
        """As in `VmmDriver`: it ends by itself when its machine does; the serial line is its output."""
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return VmmEnd("reset", said[-4000:])
        return None


class FirecrackerControl:
    """`VmmControl` by its API."""

    def __init__(self, api: UnixHttp, directory: Path) -> None:
        self._api = api
        self._directory = directory
        self._owner = os.lstat(directory / "api").st_uid
        """The VMM's user."""
        self._start: Start | None = None
        self._load: dict[str, Any] | None = None
        self._resuming: asyncio.Future[None] | None = None
        self._end: asyncio.Future[VmmEnd] = asyncio.get_running_loop().create_future()

    async def begin(self, start: Start, plan: Plan) -> None:
        """Boot it, or have a clone ready for `restored`."""
        self._start, self._load = start, plan.load
        if plan.load is not None:
            return
        for path, body in plan.boot:
            await self._api.call("PUT", path, body)
        self._lock()

    async def resume(self) -> None:
        await self._api.call("PATCH", "/vm", {"state": "Resumed"})

    async def restored(self) -> None:
        """As in `VmmControl`."""
        await self._api.call("PUT", "/snapshot/load", self._load)
        self._lock()

    async def save(self, state: int) -> None:
        """As in `VmmControl`. The memory's content goes to its file too: zeros are holes in it."""
        assert self._start is not None
        await self.stop()
        memory = self._start.memory
        with self._file("state") as written:
            await self._snapshot(_path(_MEMORY))
            await asyncio.to_thread(copy_data, written, state)
        await asyncio.to_thread(punch_zeros, memory)

    async def stop(self) -> None:
        await self._api.call("PATCH", "/vm", {"state": "Paused"})

    async def split(self, state: int, memory: int = -1) -> None:
        """As in `VmmControl`: a snapshot of the kind `Full`, whose memory takes room in the machine's directory, too,
        until it is copied. Its guest's connections end with that, by the device."""
        with self._file("state") as written, self._file("memory") as content:
            await self._snapshot(f"{_path(_DIRECTORY)}/memory")

            def copy() -> None:
                punch_zeros(content)
                copy_data(content, memory)
                copy_data(written, state)

            await asyncio.to_thread(copy)

    async def _snapshot(self, memory: str) -> None:
        where = {"snapshot_path": f"{_path(_DIRECTORY)}/state", "mem_file_path": memory}
        await self._api.call("PUT", "/snapshot/create", {"snapshot_type": "Full", **where})

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """One in the directory that the VMM may write to, which can make none there; it goes afterwards."""
        path = self._directory / name
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchown(fd, self._owner, self._owner)
            yield fd
        finally:
            os.close(fd)
            path.unlink()

    def resume_soon(self) -> None:
        self._resuming = asyncio.ensure_future(self._resume_quietly())

    async def _resume_quietly(self) -> None:
        with contextlib.suppress(Unavailable):
            await self.resume()

    def ended(self) -> Awaitable[VmmEnd]:
        """Never: it ends with its machine (`own_end`)."""
        return asyncio.shield(self._end)

    def close(self) -> None:
        self._api.close()
        self._end.cancel()

    def _lock(self) -> None:
        """Its sockets are made: it makes nothing more."""
        os.chown(self._directory, 0, 0)
        self._directory.chmod(0o711)


def punch_zeros(fd: int) -> None:
    """Give back what is zeros of a memory's file. Blocks (a second for a GiB)."""
    zeros = bytes(_CHUNK)
    size = os.fstat(fd).st_size
    for at in range(0, size, _CHUNK):
        if os.pread(fd, _CHUNK, at) == zeros[: size - at]:
            punch_hole(fd, at, min(_CHUNK, size - at))


@contextlib.contextmanager
def _socket_at(path: Path) -> Iterator[Path]:
    """A socket that the VMM made: no link that it put there is followed. Raises `Unavailable`."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"the VMM has no socket {path.name}: {error.strerror}") from None
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise Unavailable(f"{path.name} of the VMM is no socket")
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


async def _ask_for_port(path: Path) -> socket.socket | None:
    """A connection to the guest's port; None where nobody listens there yet."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with _socket_at(path) as target:
            await loop.sock_connect(sock, str(target))
        await loop.sock_sendall(sock, f"CONNECT {VSOCK_PORT}\n".encode())
        line = b""
        while not line.endswith(b"\n") and len(line) < _MOST_LINE:  # one by one: what comes next is the guest's
            got = await loop.sock_recv(sock, 1)
            if not got:
                break
            line += got
        if re.fullmatch(rb"OK \d+\n", line):
            return sock
    except (OSError, Unavailable):
        pass
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def _path(number: int) -> str:
    return f"/proc/self/fd/{number}"


def _drive(serial: str, number: int, *, read_only: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"drive_id": serial, "path_on_host": _path(number)}
    return found | {"is_root_device": False, "is_read_only": read_only, "cache_type": "Unsafe"}


def _number(version: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)

"""QEMU as a VMM: its command line, and its control socket.

Machines: `pc`; `microvm` is lighter, and was not yet brought to boot in an imitated CPU. No network card, no display,
no firmware menus; one serial line, whose last lines are kept in memory for when a kernel panics.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from dsec.errors import Unavailable, Unsupported
from dsec.vmm.driver import Command, Start, VmmEnd
from dsec.vmm.qmp import Qmp, QmpError
from dsec.vmm.sockets import connect

MIB = 1 << 20
PROGRAM = "qemu-system-x86_64"
CODE_CACHE_MIB = 64
"""Of translated code (TCG); less, and it thrashes."""
_CAPABILITIES = [{"capability": "x-ignore-shared", "state": True}]
"""Of saving: the memory's file has its content."""
_STATE_FD = 3
_POLL_S = 0.002
_SAVE_S = 60.0
_KERNEL = (
    "console=ttyS0 quiet loglevel=3 panic=-1 reboot=t rdinit=/init random.trust_cpu=on nowatchdog cgroup_no_v1=all "
    "no_timer_check tsc=reliable 8250.nr_uarts=1 lsm=landlock"
)
_KERNEL_TCG = "norandmaps mitigations=off"
"""Translated code is found again by its address too, so that programs which are never twice at the same one would be
translated each time; and an imitated CPU has no guesses of the guest's to guard against."""
_CPU_TCG = "max,la57=off,erms=off"
"""Copies that a real CPU makes fast byte by byte (`rep movsb`) an imitated one makes byte by byte: half the speed."""
_BOARDS = {
    "pc": "pc,usb=off,hpet=off,vmport=off,smbus=off,graphics=off",
    "microvm": "microvm,acpi=on,pit=on,pic=on,rtc=on,isa-serial=on,x-option-roms=off",
}
_ERRORS = "werror=report,rerror=report"
"""Of disks: the machine is told, and doesn't stand still (where the host's disk is full)."""
BALLOON = "free-page-reporting=on,page-poison=off"
"""Memory that the machine's kernel has no use for is given back. What is read there later is the template's, or zeros:
so a kernel that counts on what it wrote to free pages gets none of it."""
_PC_SLOTS = range(4, 31)
_MICROVM_TRANSPORTS = 24


class QemuDriver:
    """QEMU for one host. Find it by `find`."""

    name: ClassVar[str] = "qemu"
    listens: ClassVar[bool] = False
    copies_whole: ClassVar[bool] = False
    built_kernel: ClassVar[bool] = False
    most_vcpus: ClassVar[int] = 64

    def __init__(self, program: Path, accel: Literal["kvm", "tcg"]) -> None:
        self._program = program
        self._accel = accel

    @classmethod
    def find(cls, accel: Literal["kvm", "tcg"]) -> QemuDriver:
        """Raises `Unsupported` where it isn't installed."""
        program = shutil.which(PROGRAM)
        if program is None:
            raise Unsupported(f"{PROGRAM} is missing", remedy="apt-get install --no-install-recommends qemu-system-x86")
        return cls(Path(program).resolve(), accel)

    @property
    def accel(self) -> str:
        return self._accel

    @cached_property
    def version(self) -> str:
        """Its first line about itself."""
        done = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=False)
        return done.stdout.splitlines()[0] if done.stdout else "unknown"

    @property
    def reloads(self) -> bool:
        """Whether one that has read a state can read another (`QemuControl.load`). It takes what is QEMU's own
        (native/stem/translated.c), so it is said of those that were tried."""
        return self._accel == "tcg" and "version 7.2." in self.version and "(Debian " in self.version

    @cached_property
    def fingerprint(self) -> str:
        """As in `VmmDriver`."""
        stat = self._program.stat()
        cpu = _CPU_TCG
        if self._accel == "kvm":  # the host's CPU is the guest's
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            cpu = "".join(line for line in lines if line.startswith(("model name", "flags", "stepping")))[:8000]
        parts = (self.version, str(stat.st_size), str(stat.st_mtime_ns), self._accel, cpu, self._kernel_line)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def _kernel_line(self) -> str:
        return _KERNEL if self._accel == "kvm" else f"{_KERNEL} {_KERNEL_TCG}"

    @property
    def paths(self) -> tuple[str, ...]:
        found = [str(self._program)]
        for path in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/share/qemu", "/usr/share/seabios"):
            if Path(path).is_dir() and not Path(path).is_symlink():
                found.append(path)
        return tuple(found)

    def take_state(self, line: Line, state: int) -> None:
        """Be a clone, which waits until it is told where its state is: the first descriptor of all."""
        assert not line.fds
        line.take(state)
        line.add("-S", "-incoming", "defer")

    def add_cpu(self, line: Line, vcpus: int, code_cache_mib: int = CODE_CACHE_MIB) -> None:
        """What runs the guest's code; the same for a template and its clones. Nor is there more to a saved state than
        its devices, so that `split` and `save` are read alike."""
        line.add("-global", "migration.send-configuration=off")
        line.add("-accel", "kvm" if self._accel == "kvm" else f"tcg,tb-size={code_cache_mib}")
        line.add("-cpu", "host" if self._accel == "kvm" else _CPU_TCG, "-smp", str(vcpus))

    @property
    def program(self) -> Path:
        return self._program

    @property
    def overhead_bytes(self) -> int:
        return 192 * MIB

    def most_layers(self, machine: str) -> int:
        """Two disks each, and the machine's own. On `pc` eight of them share a slot."""
        return (len(_PC_SLOTS) * 8 - 1) // 2 if machine == "pc" else (_MICROVM_TRANSPORTS - 3) // 2

    def command(self, start: Start) -> Command:
        """As in `VmmDriver`."""
        line = Line(str(self._program))
        shape = start.shape
        pc = start.machine == "pc"
        line.add("-machine", f"{_BOARDS[start.machine]},memory-backend=memory")
        self.add_cpu(line, shape.vcpus)
        line.add("-m", f"{shape.memory_bytes // MIB}M")
        line.add("-nodefaults", "-no-user-config", "-display", "none")
        line.add("-action", "reboot=shutdown,shutdown=pause,panic=pause")
        line.add("-chardev", "ringbuf,id=console,size=16384", "-serial", "chardev:console")
        share = "on" if start.kernel is not None else "off"
        if start.state is not None:
            self.take_state(line, start.state)
        memory = line.take(start.memory)
        line.add(
            "-object",
            f"memory-backend-file,id=memory,size={shape.memory_bytes},mem-path=/proc/self/fd/{memory},"
            f"share={share},merge=off,dump=off",
        )
        control, channel = line.take(start.control), line.take(start.channel)
        line.add("-chardev", f"socket,id=control,fd={control},server=on,wait=off")
        line.add("-mon", "chardev=control,mode=control")
        line.add("-chardev", f"socket,id=channel,fd={channel},server=on,wait=off")
        line.add("-device", "virtio-serial-pci,addr=3,max_ports=2" if pc else "virtio-serial-device,max_ports=2")
        line.add("-device", "virtserialport,chardev=channel,name=dsec,nr=1")
        line.add("-device", f"virtio-balloon-pci,addr=2,{BALLOON}" if pc else f"virtio-balloon-device,{BALLOON}")
        self._add_disks(line, start)
        if start.kernel is not None:
            line.add("-kernel", f"/proc/self/fd/{line.take(start.kernel)}", "-append", self._kernel_line)
            if start.initramfs is not None:
                line.add("-initrd", f"/proc/self/fd/{line.take(start.initramfs)}")
        return Command(tuple(line.argv), tuple(line.fds))

    def _add_disks(self, line: Line, start: Start) -> None:
        disks: list[tuple[str, int, bool]] = [("disk", start.disk, False)]
        for number, layer in enumerate(start.layers):
            disks.append((f"m{number}", layer.image, True))
            if layer.data is not None:
                disks.append((f"d{number}", layer.data, True))
        disks += ((extra.serial, extra.fd, extra.read_only) for extra in start.extra)
        for number, (serial, fd, read_only) in enumerate(disks):
            mode = "on" if read_only else "off"
            line.add("-add-fd", f"fd={line.take(fd)},set={number}")
            shared = "discard=unmap,cache.no-flush=on"  # no sandbox outlives this host's crash: its fsync is free
            file = f"driver=file,filename=/dev/fdset/{number},node-name=f-{serial},locking=off,read-only={mode}"
            line.add("-blockdev", f"{file},auto-read-only=off,{shared}")
            line.add("-blockdev", f"driver=raw,file=f-{serial},node-name={serial},read-only={mode},{shared}")
            if start.machine == "pc":
                slot = f"virtio-blk-pci,addr={_PC_SLOTS[number // 8]:#x}.{number % 8},multifunction=on"
            else:
                slot = "virtio-blk-device"
            line.add("-device", f"{slot},drive={serial},serial={serial},{_ERRORS}")

    async def control(self, path: Path) -> QemuControl:
        """As in `VmmDriver`."""
        return await QemuControl.open(path)

    async def connect(self, directory: Path) -> socket.socket:
        """As in `VmmDriver`."""
        return connect(directory, "channel")

    def own_end(self, status: int, said: str) -> VmmEnd | None:
        """As in `VmmDriver`: it stands still then, and lives on."""
        return None


class Line:
    """A command line in the making, and which descriptor becomes which number."""

    def __init__(self, program: str) -> None:
        self.argv = [program]
        self.fds: list[int] = []

    def add(self, *words: str) -> None:
        self.argv += words

    def take(self, fd: int) -> int:
        self.fds.append(fd)
        return 2 + len(self.fds)


class QemuControl:
    """`VmmControl` by QMP."""

    def __init__(self) -> None:
        self._qmp: Qmp | None = None
        self._end: asyncio.Future[VmmEnd] = asyncio.get_running_loop().create_future()
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path) -> QemuControl:
        """Connect; a machine that has ended meanwhile is noticed. Raises `Unavailable`."""
        found = cls()
        found._qmp = await Qmp.open(path, found._on_event)
        status = await found._call("query-status")
        if isinstance(status, dict) and status.get("status") in ("shutdown", "guest-panicked"):
            found._note_end(str(status["status"]))
        return found

    @classmethod
    def over(cls, sock: socket.socket) -> QemuControl:
        """By a connection that is greeted already: of a branch."""
        found = cls()
        found._qmp = Qmp(sock, found._on_event)
        return found

    async def command(self, name: str, /, *, fd: int | None = None, **arguments: Any) -> Any:
        """Any command of QMP; a descriptor travels beside it. Raises `Unavailable`, also where QEMU refuses it."""
        return await self._call(name, fd=fd, **arguments)

    async def resume(self) -> None:
        await self._call("cont")

    async def restored(self, *, whole: bool = False) -> None:
        """As in `VmmControl`. `whole`: the state has the memory's content too (`save`)."""
        if not whole:
            await self._call("migrate-set-capabilities", capabilities=_CAPABILITIES)
        await self._call("migrate-incoming", uri=f"fd:{_STATE_FD}")
        async with asyncio.timeout(_SAVE_S):
            await self._poll("query-status", lambda status: status != "inmigrate")

    async def save(self, state: int, *, whole: bool = False) -> None:
        """As in `VmmControl`. `whole`: the memory's content too, of a machine whose memory is its own."""
        await self._call("stop")
        if not whole:
            await self._call("migrate-set-capabilities", capabilities=_CAPABILITIES)
        await self._call("getfd", fd=state, fdname="state")
        await self._call("migrate", uri="fd:state")
        async with asyncio.timeout(_SAVE_S):
            status = await self._poll("query-migrate", lambda status: status in ("completed", "failed", "cancelled"))
        if status != "completed":
            raise Unavailable(f"the machine's state can't be saved: {status}")

    async def stop(self) -> None:
        await self._call("stop")

    async def split(self, state: int, memory: int = -1) -> None:
        """As in `VmmControl`. A command of Xen's that any build has: it leaves the memory out, whoever shares it."""
        await self._with_file("xen-save-devices-state", state, live=False)

    async def load(self, state: int) -> None:
        """Have a machine that stands still become what `split` wrote, memory and disk apart."""
        await self._with_file("xen-load-devices-state", state)

    async def _with_file(self, command: str, file: int, **arguments: Any) -> None:
        found = await self._call("add-fd", fd=file)
        number = int(found["fdset-id"])
        try:
            await self._call(command, filename=f"/dev/fdset/{number}", **arguments)
        finally:
            await self._call("remove-fd", **{"fdset-id": number})

    def resume_soon(self) -> None:
        assert self._qmp is not None
        self._qmp.send("cont")

    async def _poll(self, command: str, done: Callable[[str], bool]) -> str:
        """Ask until the status is such."""
        while True:
            status = str((await self._call(command)).get("status"))
            if done(status):
                return status
            await asyncio.sleep(_POLL_S)

    def ended(self) -> Awaitable[VmmEnd]:
        return asyncio.shield(self._end)

    def close(self) -> None:
        if self._qmp is not None:
            self._qmp.close()
        if self._ending is not None:
            self._ending.cancel()
        self._end.cancel()

    async def _call(self, command: str, *, fd: int | None = None, **arguments: Any) -> Any:
        assert self._qmp is not None
        try:
            return await self._qmp.call(command, fd=fd, **arguments)
        except QmpError as error:
            raise Unavailable(f"the VMM refused {command}: {error}") from None

    def _on_event(self, event: str, data: dict[str, Any]) -> None:
        if event == "SHUTDOWN":
            self._note_end(str(data.get("reason", "shutdown"))[:100])
        elif event == "GUEST_PANICKED":
            self._note_end("guest-panicked")

    def _note_end(self, reason: str) -> None:
        if self._ending is None and not self._end.done():
            self._ending = asyncio.get_running_loop().create_task(self._look(reason), name="console of a machine")

    async def _look(self, reason: str) -> None:
        console = ""
        with contextlib.suppress(Unavailable):
            console = str(await self._call("ringbuf-read", device="console", size=16384))[-4000:]
        if not self._end.done():
            self._end.set_result(VmmEnd(reason, console))

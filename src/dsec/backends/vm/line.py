"""QEMU's command line for a full machine: firmware, disk, screen, keyboard, tablet, serial console, our port.

A template and its clones have the same line but for what says so. The disk is virtio; so is the tablet, unless the
image wants USB. No network card.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from dsec.errors import Unsupported
from dsec.vmm.driver import Command
from dsec.vmm.images import Traits
from dsec.vmm.qemu import BALLOON, Line, QemuDriver

MIB = 1 << 20
CODE_CACHE_MIB = 128
_OVMF = Path("/usr/share/OVMF")
_FIRMWARE = (("OVMF_CODE.fd", "OVMF_VARS.fd"), ("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"))


class FullShape(Struct, frozen=True):
    """What makes full machines alike: clones of one template have the same."""

    image: str
    """The digest."""
    vcpus: int
    memory_bytes: int
    disk_bytes: int


class Sockets(Struct, frozen=True):
    """Unix sockets that listen."""

    channel: int
    control: int
    console: int


class Firmware(Struct, frozen=True):
    """What a machine with UEFI begins with: its code, and its variables, which are its own."""

    code: int
    variables: int


def command(
    driver: QemuDriver,
    shape: FullShape,
    traits: Traits,
    sockets: Sockets,
    *,
    memory: int,
    disk: int,
    seed: int,
    firmware: Firmware | None,
    state: int | None,
    own_memory: bool,
) -> Command:
    """The program to start. Numbers are descriptors. `state`: be a clone of it; else boot. `own_memory`: what is
    written to memory goes to its file, which else stays as it is."""
    line = Line(str(driver.program))
    if state is not None:
        driver.take_state(line, state)
    board = f"{traits.machine},usb=off,hpet=off,vmport=off,memory-backend=memory"
    if firmware is not None:
        for number, (name, fd) in enumerate((("code", firmware.code), ("vars", firmware.variables))):
            _add_file(line, f"flash-{name}", fd, read_only=name == "code")
            board += f",pflash{number}=flash-{name}"
    line.add("-machine", board)
    driver.add_cpu(line, shape.vcpus, CODE_CACHE_MIB)
    line.add("-m", f"{shape.memory_bytes // MIB}M", "-nodefaults", "-no-user-config", "-display", "none")
    line.add("-action", f"reboot={'shutdown' if traits.guest else 'reset'},shutdown=pause,panic=pause")
    line.add(
        "-object",
        f"memory-backend-file,id=memory,size={shape.memory_bytes},mem-path=/proc/self/fd/{line.take(memory)},"
        f"share={'on' if own_memory else 'off'},merge=off,dump=off",
    )
    for name, fd in (("control", sockets.control), ("channel", sockets.channel), ("console", sockets.console)):
        line.add("-chardev", f"socket,id={name},fd={line.take(fd)},server=on,wait=off")
    line.add("-mon", "chardev=control,mode=control", "-serial", "chardev:console")
    line.add("-device", "virtio-serial-pci,max_ports=2", "-device", "virtserialport,chardev=channel,name=dsec,nr=1")
    line.add("-device", "VGA,vgamem_mb=16", "-device", "virtio-rng-pci")
    if traits.pointer == "virtio":
        line.add("-device", "virtio-tablet-pci")
    else:
        line.add("-device", "qemu-xhci", "-device", "usb-tablet")
    line.add("-device", f"virtio-balloon-pci,{BALLOON}")
    for name, fd, read_only in (("disk", disk, False), ("seed", seed, True)):
        _add_file(line, name, fd, read_only=read_only)
        first = ",bootindex=0" if name == "disk" else ""
        line.add("-device", f"virtio-blk-pci,drive={name},serial={name}{first}")
    return Command(tuple(line.argv), tuple(line.fds))


def _add_file(line: Line, name: str, fd: int, *, read_only: bool) -> None:
    number, mode = len(line.fds), "on" if read_only else "off"
    line.add("-add-fd", f"fd={line.take(fd)},set={number}")
    shared = "discard=unmap,cache.no-flush=on"  # no sandbox outlives this host's crash: its fsync is free
    file = f"driver=file,filename=/dev/fdset/{number},node-name=f-{name},locking=off,read-only={mode}"
    line.add("-blockdev", f"{file},auto-read-only=off,{shared}")
    line.add("-blockdev", f"driver=raw,file=f-{name},node-name={name},read-only={mode},{shared}")


def firmware_files() -> tuple[Path, Path]:
    """UEFI's code and its variables as they are at first. Raises `Unsupported` where it isn't installed."""
    for code, variables in _FIRMWARE:
        if (_OVMF / code).exists() and (_OVMF / variables).exists():
            return _OVMF / code, _OVMF / variables
    raise Unsupported("the firmware for UEFI is missing", remedy="apt-get install ovmf, or boot by BIOS.")


@contextlib.contextmanager
def open_firmware(traits: Traits) -> Iterator[Firmware | None]:
    """Descriptors for one machine, open as long as the context. None: the machine begins with a BIOS."""
    if traits.firmware == "bios":
        yield None
        return
    with contextlib.ExitStack() as stack:
        fd = os.open(firmware_files()[0], os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        yield Firmware(fd, stack.enter_context(own_variables()))


@contextlib.contextmanager
def own_variables() -> Iterator[int]:
    """UEFI's variables for one machine, as they are at first. Raises `Unsupported`."""
    fd = memory_file("variables", firmware_files()[1].read_bytes())
    try:
        yield fd
    finally:
        os.close(fd)


def memory_file(name: str, data: bytes, *, read_only: bool = False) -> int:
    """A file in memory as a descriptor, which is the caller's to close."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    if not read_only:
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)

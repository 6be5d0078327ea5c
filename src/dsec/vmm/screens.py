"""What a machine's screen shows: memory of its graphics card, which is the VMM's own and in no state of `split`.

Where it lies is asked of the VMM, which may be in the hands of what runs in it: a wrong answer shows other memory of
the same VMM, to who owns it.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

from msgspec import Struct

from dsec.errors import Unavailable
from dsec.vmm.machine import Machine
from dsec.vmm.qemu import QemuControl

MOST_BYTES = 64 << 20
_GRAPHICS = 0x0300
_STEP = 1 << 16
_PLACE = re.compile(r"is 0x([0-9a-f]{1,16})\b")


class Screen(Struct, frozen=True):
    """In the memory of a VMM."""

    pid: int
    at: int
    size: int

    def read(self) -> int:
        """As it is now, in a sparse file of its own, the caller's. Blocks; raises OSError."""
        found = os.memfd_create("screen", os.MFD_CLOEXEC)
        memory = -1
        try:
            os.ftruncate(found, self.size)
            memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            zeros = bytes(_STEP)
            for at in range(0, self.size, _STEP):
                piece = os.pread(memory, min(_STEP, self.size - at), self.at + at)
                if piece != zeros:
                    os.pwrite(found, piece, at)
        except BaseException:
            os.close(found)
            raise
        finally:
            if memory >= 0:
                os.close(memory)
        return found

    def write(self, file: int) -> None:
        """Show what `read` found. Blocks; raises OSError."""
        memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for at in range(0, min(self.size, os.fstat(file).st_size), _STEP):
                piece = os.pread(file, min(_STEP, self.size - at), at)
                if piece != os.pread(memory, len(piece), self.at + at):
                    os.pwrite(memory, piece, self.at + at)
        finally:
            os.close(memory)


async def find(control: QemuControl, pid: int) -> Screen | None:
    """None where the machine has none, or has not switched it on. Raises `Unavailable`."""
    region = next(_regions(await control.command("query-pci")), None)
    if region is None:
        return None
    address, size = region.get("address"), region.get("size")
    if not isinstance(address, int) or not isinstance(size, int) or not 0 < size <= MOST_BYTES:
        raise Unavailable("the VMM doesn't say where its screen's memory is")
    line: dict[str, Any] = {"command-line": f"gpa2hva {address:#x}"}
    place = _PLACE.search(str(await control.command("human-monitor-command", **line)))
    return Screen(pid, int(place[1], 16), size) if place else None


async def show(machine: Machine, file: int) -> None:
    """Of one that stands still: what `Screen.read` found of another; else let go of it. Raises `Unavailable`."""
    assert isinstance(machine.control, QemuControl)
    try:
        found = await find(machine.control, machine.pid)
        if found is not None:
            await asyncio.to_thread(found.write, file)
    except BaseException as error:
        machine.close()
        if isinstance(error, OSError):
            raise Unavailable(f"the screen can't be shown: {error.strerror}") from None
        raise


def _regions(buses: Any) -> Any:
    """The memory of graphics cards: their first region each."""
    for bus in buses if isinstance(buses, list) else ():
        for device in bus.get("devices", ()):
            if device.get("class_info", {}).get("class") == _GRAPHICS:
                yield from (each for each in device.get("regions", ()) if each.get("bar") == 0)

"""The part of `dsec bench vm` about the channel, against what its port gives by itself.

`bare_in_mb_per_s`, `bare_out_mb_per_s`: `dd` inside at a second virtio-serial port of the same machine, a socket at its
other end, /dev/shm or /dev/zero beside it. `channel_in_mb_per_s`, `channel_out_mb_per_s`: a file of the same size
written and read through the channel, whole. Medians, in turns. `transfer_vs_bare`: the smaller of both ways' ratios,
the median of each turn's: a machine that is quicker or slower for a while is so for both.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from statistics import median
from typing import Any

from dsec.bench.vm_fork import run
from dsec.channel.files import read_file, write_file
from dsec.vmm.instance import MachineInstance
from dsec.vmm.qemu import QemuControl

TRANSFER = 16 << 20
ROUNDS = 7
_FILE = b"/dev/shm/file"
_PIECE = 64 << 10
_PORT = b"/dev/bench"
_FIND = b"""for i in $(seq 300); do
    for p in /sys/class/virtio-ports/*; do
        [ "$(cat $p/name)" = bench ] && mknod /dev/bench c $(tr : ' ' < $p/dev) && exit 0
    done
    sleep 0.1
done
exit 1"""
_SLOT = "0x1f"
"""Of the machine's bus: one that no disk has."""


async def transfers(instance: MachineInstance) -> dict[str, float]:
    """The figures; the machine has another port afterwards."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        await _plug(instance, theirs)
        rates: dict[str, list[float]] = {}
        for _ in range(ROUNDS + 1):  # the first translates
            for name, measure in (
                ("bare_in", _bare_in(instance, ours)),
                ("channel_in", _channel_in(instance)),
                ("bare_out", _bare_out(instance, ours)),
                ("channel_out", _channel_out(instance)),
            ):
                began = time.perf_counter()
                await measure
                rates.setdefault(name, []).append(TRANSFER / (time.perf_counter() - began) / 1e6)
    found = {f"{name}_mb_per_s": round(median(each[1:]), 1) for name, each in rates.items()}
    least = min(_against(rates[f"channel_{way}"][1:], rates[f"bare_{way}"][1:]) for way in ("in", "out"))
    return found | {"transfer_vs_bare": round(least, 2)}


def _against(ours: list[float], bare: list[float]) -> float:
    return median(mine / other for mine, other in zip(ours, bare, strict=True))


async def _plug(instance: MachineInstance, end: socket.socket) -> None:
    control = instance.machine.control
    assert isinstance(control, QemuControl)
    await control.command("getfd", fd=end.fileno(), fdname="bench")
    address = {"type": "fd", "data": {"str": "bench"}}
    await control.command(
        "chardev-add", id="bench", backend={"type": "socket", "data": {"addr": address, "server": False}}
    )
    await control.command("device_add", driver="virtio-serial-pci", id="benchbus", addr=_SLOT)
    await control.command(
        "device_add", driver="virtserialport", id="benchport", bus="benchbus.0", chardev="bench", name="bench"
    )
    await run(instance, b"/bin/sh", b"-c", _FIND)


async def _bare_in(instance: MachineInstance, ours: socket.socket) -> None:
    async def send() -> None:
        data = bytes(_PIECE)
        for _ in range(TRANSFER // _PIECE):
            await asyncio.get_running_loop().sock_sendall(ours, data)

    await _together(instance, send(), b"if=" + _PORT, b"of=" + _FILE, b"iflag=fullblock")


async def _bare_out(instance: MachineInstance, ours: socket.socket) -> None:
    async def receive() -> None:
        left, room = TRANSFER, memoryview(bytearray(_PIECE))
        while left:
            left -= await asyncio.get_running_loop().sock_recv_into(ours, room)

    await _together(instance, receive(), b"if=" + _FILE, b"of=" + _PORT)


async def _together(instance: MachineInstance, outside: Coroutine[Any, Any, None], *inside: bytes) -> None:
    async with asyncio.TaskGroup() as both:
        both.create_task(outside)
        both.create_task(run(instance, b"/bin/dd", *inside, b"bs=64k", b"count=%d" % (TRANSFER // _PIECE)))


async def _channel_in(instance: MachineInstance) -> None:
    await write_file(instance.channel, _FILE, _zeros())


async def _zeros() -> AsyncIterator[bytes]:
    data = bytes(_PIECE)
    for _ in range(TRANSFER // _PIECE):
        yield data


async def _channel_out(instance: MachineInstance) -> None:
    async for _ in read_file(instance.channel, _FILE):
        pass

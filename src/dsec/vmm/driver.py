"""The protocol between the backend and a virtual machine monitor (VMM): what it boots, clones and controls.

A driver says how its VMM is started, with everything that it may use as open descriptors, and talks to the control
socket of one that runs. `qemu.py` and `firecracker.py` are there.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar, Protocol

from msgspec import Struct


class Shape(Struct, frozen=True, order=True):
    """What makes machines alike: clones of one template have the same."""

    vcpus: int
    memory_bytes: int
    disk_bytes: int
    layers: tuple[str, ...]
    """Digests, top first."""


class LayerDisks(Struct, frozen=True):
    """Descriptors of a layer's files."""

    image: int
    data: int | None


class ExtraDisk(Struct, frozen=True):
    """A disk that the guest leaves to those who know its serial number."""

    serial: str
    """At most 20 characters."""
    fd: int
    read_only: bool


class Start(Struct, frozen=True, kw_only=True):
    """One VMM to start. Numbers are descriptors of this process; the driver says which numbers they get there."""

    shape: Shape
    machine: str
    """As in `store.kernels.Kernel`."""
    channel: int
    """A unix socket that listens: whoever connects is at the other end of the machine's port. For drivers that
    `listens` it is `control`, too."""
    control: int
    """The same for the VMM's own commands. For drivers that `listens`: a directory of the VMM's own."""
    memory: int
    """A file as large as the machine's memory."""
    disk: int
    layers: tuple[LayerDisks, ...]
    extra: tuple[ExtraDisk, ...] = ()
    kernel: int | None = None
    """Boot this: what is written to memory goes to the file. None: be a clone of `state`, and wait; memory is shared
    with the file until it is written to, and the file stays as it is."""
    initramfs: int | None = None
    state: int | None = None


class Command(Struct, frozen=True):
    """A program with its arguments, and the descriptors that become its 3, 4, ..."""

    argv: tuple[str, ...]
    fds: tuple[int, ...]
    begin: Callable[[VmmControl], Awaitable[None]] | None = None
    """What the VMM is told as soon as it answers. Raises `Unavailable`."""
    file_bytes: int = 0
    """The largest file that it has to write, if that isn't its disk."""


class VmmEnd(Struct, frozen=True):
    """Why a machine stands still for good, while its VMM still runs."""

    reason: str
    """As the VMM says."""
    console: str
    """The last lines of the kernel's console."""


class VmmControl(Protocol):
    """A connection to one VMM that runs. All calls raise `Unavailable` where it is gone or doesn't answer in time."""

    async def resume(self) -> None:
        """Let the machine go on."""
        ...

    async def restored(self) -> None:
        """Wait until a clone has its state."""
        ...

    async def save(self, state: int) -> None:
        """Stop the machine, and write everything but its memory's content to a descriptor."""
        ...

    async def stop(self) -> None:
        """Have the machine stand still."""
        ...

    async def split(self, state: int, memory: int = -1) -> None:
        """The same as `save` of a machine that stands still and goes on later; to a descriptor of a file that is
        writable only. `memory`: the same for all of its memory, of drivers that `copies_whole`."""
        ...

    def resume_soon(self) -> None:
        """`resume` by a VMM that can't answer now: when it can."""
        ...

    def ended(self) -> Awaitable[VmmEnd]:
        """Resolves when the machine has shut down, or panicked. May be awaited more than once."""
        ...

    def close(self) -> None: ...


class VmmDriver(Protocol):
    """How one kind of VMM is used."""

    name: ClassVar[str]
    listens: ClassVar[bool]
    """Whether its VMM makes its sockets itself, below a directory that it is handed, instead of being handed them."""
    copies_whole: ClassVar[bool]
    """Whether its VMM writes the memory of a machine that goes on, too (`VmmControl.split`), and cuts the connection to
    its port by that."""
    built_kernel: ClassVar[bool]
    """Whether it boots only what `dsec kernel build` makes."""
    most_vcpus: ClassVar[int]

    @property
    def accel(self) -> str:
        """What runs the guest's code: `kvm`, `tcg`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes with everything of the VMM and the CPU that a saved state depends on."""
        ...

    @property
    def paths(self) -> tuple[str, ...]:
        """Files and directories of the host that the program needs to start, itself the first."""
        ...

    @property
    def overhead_bytes(self) -> int:
        """Memory that it may need beside the machine's."""
        ...

    def most_layers(self, machine: str) -> int:
        """How many layers a machine can have as disks."""
        ...

    def command(self, start: Start) -> Command: ...

    async def control(self, path: Path) -> VmmControl:
        """Connect to the control socket. Raises `Unavailable`."""
        ...

    async def connect(self, directory: Path) -> socket.socket:
        """To the port of a machine that runs; one connection at a time is served. `directory`: of its sockets. Raises
        `Unavailable`."""
        ...

    def own_end(self, status: int, said: str) -> VmmEnd | None:
        """Why its machine ended, where the VMM ended (`status` as wait(2) says) because its machine did."""
        ...

"""One lane of a jail: its cgroups, and our ends of the call that its cell waits for or runs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from dsec.kernel.cgroup_meter import Meter
from dsec.kernel.cgroups import Shape, Slot

_GROUP = "g"
"""Of version 2, below the slot's own: a group that was ever ended by `cgroup.kill` may kill what is put into it later
(native/zygote/spawn.c)."""


class Lane:
    """Owned by its jail; between `begin` and the next `begin` it holds one cell."""

    __slots__ = ("_call", "_pipes", "_promise", "_promised", "index", "meter", "on_ended", "ready", "shape", "slot")

    def __init__(self, index: int, slot: Slot, shape: Shape, promise: Callable[[int], None]) -> None:
        """`promise`: see `JailHost`. Raises OSError."""
        self.index = index
        self.slot = slot
        self.shape = shape
        self.meter = Meter(slot)
        self.ready = False
        """The cell's worker waits for its call."""
        self.on_ended: Callable[[int], None] | None = None
        """Told the worker's wait status; -1: nobody knows, the jail is gone."""
        self._promise = promise
        self._promised = 0
        self._call: socket.socket | None = None
        self._pipes: tuple[int, ...] = ()

    @property
    def call(self) -> socket.socket:
        assert self._call is not None
        return self._call

    @property
    def outputs(self) -> tuple[int, ...]:
        """The worker's stdout and stderr; non-blocking."""
        return self._pipes

    def groups(self) -> list[int]:
        """Descriptors to put processes into its groups by; the caller closes them. Raises OSError."""
        inner = f"{self.slot.v2}/{_GROUP}"
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(inner)
        os.mkdir(inner)
        opened: list[int] = []
        with contextlib.ExitStack() as failed:
            for path in (inner, *self.slot.v1):
                opened.append(os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                failed.callback(os.close, opened[-1])
            failed.pop_all()
        return opened

    def begin(self) -> tuple[socket.socket, int, int]:
        """Fresh descriptors for the next cell: the other ends, for the caller to pass on and close. Raises OSError."""
        self.drop()
        self._call, theirs = socket.socketpair()
        self._call.setblocking(False)
        writing: list[int] = []
        try:
            for _ in range(2):
                end, other = os.pipe2(os.O_CLOEXEC)
                self._pipes += (end,)
                writing.append(other)
                os.set_blocking(end, False)
        except OSError:
            theirs.close()
            for fd in writing:
                os.close(fd)
            raise
        return theirs, writing[0], writing[1]

    def drop(self) -> None:
        """Let go of the call. Idempotent."""
        self.ready = False
        self.on_ended = None
        if self._promised:
            self._promise(-self._promised)
            self._promised = 0
        if self._call is not None:
            self._call.close()
            self._call = None
        for fd in self._pipes:
            os.close(fd)
        self._pipes = ()

    def set_shape(self, shape: Shape) -> None:
        """The limits of the call that comes now, while nothing but a waiting worker is inside. Raises OSError,
        `Unsupported` (more memory than the node has)."""
        self._promise(shape.memory_bytes)
        self._promised = shape.memory_bytes
        if shape != self.shape:
            self.slot.reshape(shape)
            self.shape = shape

    def lost(self) -> None:
        """The jail is gone."""
        if self.on_ended is not None:
            self.on_ended(-1)

    def close(self) -> None:
        """The slot stays its owner's."""
        self.drop()
        self.meter.close()

"""What function calls stand on: jails and cgroups, made by others."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from dsec.kernel.cgroups import Shape, Slot


class JailHost(Protocol):
    """Makes the jails of function environments."""

    @property
    def promise(self) -> Callable[[int], None]:
        """Call it with the bytes of memory that calls may take more, or less, than before. It raises `Unsupported` for
        what the node doesn't have."""
        ...

    def native_part(self) -> int:
        """A descriptor of the warm parent's native part; the caller closes it. Blocks. Raises `Unsupported`."""
        ...

    async def make(self, name: str, layers: Sequence[str], project: str, shape: Shape) -> socket.socket:
        """A jail over `layers`, top first, with ids of the project's own; `name` is a sandbox id's charset. The
        caller owns the channel to its warden. On failure nothing is left. Raises `CreateFailed`, `Unavailable`,
        `Unsupported`."""
        ...

    async def destroy(self, name: str) -> None:
        """End it and remove every trace. Idempotent."""
        ...

    def take_slot(self, owner: str, project: str, shape: Shape) -> Slot:
        """Cgroups for one call after another. Raises OSError."""
        ...

    def give_back(self, slot: Slot) -> None:
        """Nothing is put into it any more. Idempotent."""
        ...

"""Full machines as they are used from outside, a part of `EdgeClient`. `dsec.edge.screens` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsec.spec.screen import Checkpoint, ConsolePiece, Input


class Screened(Protocol):
    """Screen, keys, mouse, console, checkpoints. All raise `Unsupported` where a sandbox has none, and as
    `EdgeClient`."""

    async def screenshot(self, sandbox_id: str) -> bytes:
        """The screen as a PNG."""
        ...

    async def send_input(self, sandbox_id: str, inputs: Sequence[Input]) -> None:
        """Keys and clicks, one after the other. Raises `InvalidRequest` at one that can't be."""
        ...

    async def read_console(self, sandbox_id: str, after: int = -1, wait_s: float = 0.0) -> ConsolePiece:
        """What the serial console printed from the offset `after` on (below 0: all that is kept). Waits for it
        `wait_s` at most."""
        ...

    async def write_console(self, sandbox_id: str, data: bytes) -> None:
        """Type on the serial console."""
        ...

    async def checkpoint(self, sandbox_id: str, name: str) -> Checkpoint:
        """Keep memory, devices and disk as they are, to go back to. Raises `Conflict` where the name is taken,
        `QuotaExceeded`."""
        ...

    def checkpoints(self, sandbox_id: str) -> list[Checkpoint]: ...

    def drop_checkpoint(self, sandbox_id: str, name: str) -> None:
        """Raises `NotFound`."""
        ...

    async def revert(self, sandbox_id: str, name: str) -> None:
        """Go back to a checkpoint; commands that ran then go on, those begun since are lost. Raises `NotFound`."""
        ...

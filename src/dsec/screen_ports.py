"""The protocols of full machines, beside those of `dsec.ports`: what an edge asks of one that has a screen, and of a
backend whose sandboxes can go back to what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dsec.ports import Handle, Instance
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.screen import Checkpoint, Input


@runtime_checkable
class ScreenHost(Protocol):
    """What an `Instance` may be besides: one that has a screen, a keyboard, a mouse and a serial console."""

    async def screenshot(self) -> bytes:
        """The screen as a PNG, whose content is a claim. Raises `Unavailable`."""
        ...

    async def input(self, inputs: Sequence[Input]) -> None:
        """One after the other. Raises `InvalidRequest` at the first key that doesn't exist, or place that isn't on the
        screen; `Unavailable`."""
        ...

    async def read_console(self, after: int, wait_s: float) -> tuple[int, bytes]:
        """What was printed from the offset `after` on (below 0: all that is kept), and where it begins; waits at most
        `wait_s` for a first byte."""
        ...

    async def write_console(self, data: bytes) -> None:
        """Type on it."""
        ...


@runtime_checkable
class CheckpointHost(Protocol):
    """What a `Backend` may be besides: one whose sandboxes can go back to what they were, any number of times. A
    sandbox's checkpoints end with it."""

    async def checkpoint(self, sandbox_id: str, handle: Handle, name: str) -> Checkpoint:
        """Keep memory, devices and disk as they are; it stands still for some tens of milliseconds. Raises `Conflict`
        where the name is taken, `QuotaExceeded`, `Unavailable`."""
        ...

    def checkpoints(self, sandbox_id: str) -> list[Checkpoint]:
        """In the order in which they were made."""
        ...

    def drop_checkpoint(self, sandbox_id: str, name: str) -> None:
        """Raises `NotFound`."""
        ...

    def reserve_revert(self, sandbox_id: str, handle: Handle, name: str) -> Handle:
        """Choose names for `revert`, as `reserve` does. Raises `NotFound`, `Internal` where it is damaged."""
        ...

    async def revert(self, sandbox_id: str, spec: SandboxSpec, handle: Handle, before: Handle) -> Instance:
        """End what runs (`before`) and go on from the checkpoint as `handle`, which `reserve_revert` chose. The time
        inside is now, the random state new. Where this fails nothing runs."""
        ...

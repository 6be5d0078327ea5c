"""How an edge is seen from above: the contract, a part of `EdgeClient`.

Owns `Observed` and its values. `dsec.edge.observer` works them out for one node in process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from msgspec import Struct

from dsec.edge.tally import Family
from dsec.spec.events import SandboxEvent
from dsec.spec.tripwires import TripwireState


class Check(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that a server needs."""

    name: str
    ok: bool
    detail: str = ""


class Readiness(Struct, frozen=True):
    """Whether new sandboxes can be made now."""

    ok: bool
    checks: list[Check]


class Observed(Protocol):
    """What an `EdgeClient` says of itself."""

    def metrics(self) -> list[Family]:
        """All metrics of the node now."""
        ...

    async def ready(self) -> Readiness:
        """Whether it can make sandboxes; never raises."""
        ...

    def events(self, sandbox_id: str, after: int = 0) -> list[SandboxEvent]:
        """A sandbox's events above the number `after`, as far as they are kept; also of an ended one. Raises
        `SandboxNotFound`."""
        ...

    def follow_events(self, sandbox_id: str, after: int = 0) -> AsyncIterator[SandboxEvent]:
        """The same, and those to come, until the sandbox has ended. Close it (`aclose`) when done early."""
        ...

    def trajectory(self, sandbox_id: str, after: int = 0) -> Iterator[bytes]:
        """A sandbox's trajectory above the number `after`: entries (`dsec.spec.trajectory`) as the lines that are
        stored; also of an ended one, for as long as its record is kept. Raises `SandboxNotFound`, `Unavailable`."""
        ...

    def follow_trajectory(self, sandbox_id: str, after: int = 0) -> AsyncIterator[bytes]:
        """The same, and those to come, until the sandbox has ended. Close it (`aclose`) when done early."""
        ...

    def tripwires(self, sandbox_id: str) -> TripwireState:
        """What a live sandbox's tripwires are and how often each was hit. Raises `SandboxNotFound`, `SandboxEnded`,
        `SandboxLost`."""
        ...

    def resume_tripwires(self, sandbox_id: str) -> TripwireState:
        """Let a sandbox go on that a tripwire paused. Raises `Conflict` where none did."""
        ...

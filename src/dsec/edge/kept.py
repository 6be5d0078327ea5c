"""State that outlives its callers: what an edge offers for pausing sandboxes; a part of `EdgeClient`.

Owns `Kept` and its values. `dsec.edge.kept_calls` implements it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from dsec.errors import ErrorBody
from dsec.spec.sandbox import SandboxInfo


class PauseItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One result of `pause_many`; no `error`: it is paused (or, of a resume, goes on)."""

    id: str
    error: ErrorBody | None = None


class Kept(Protocol):
    """Sandboxes that stand still."""

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        """Freeze it; its memory is given back soon after. On record when this returns. One that is paused stays so.
        Raises `Unsupported`."""
        ...

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        """Let it go on; one that runs, runs. Any other request that needs the sandbox does the same. Raises `Conflict`
        where a tripwire paused it."""
        ...

    async def pause_many(
        self,
        project: str,
        *,
        ids: Sequence[str] | None = None,
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        resume: bool = False,
    ) -> list[PauseItem]:
        """Pause (or resume) those named by `ids`, or all running ones of a run and with labels. Results in the order
        given, other projects' and unknown ones as `sandbox_not_found`."""
        ...

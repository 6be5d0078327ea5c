"""State that outlives its callers: pausing sandboxes, runs and their leases; a part of `EdgeClient`.

Owns `Kept` and its values. `dsec.edge.kept_calls` implements it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import Struct

from dsec.errors import ErrorBody
from dsec.ports import Captured
from dsec.spec.runs import RunInfo, RunRequest
from dsec.spec.sandbox import SandboxInfo
from dsec.spec.snapshots import SnapshotInfo
from dsec.spec.trajectory import EntryType


class PauseItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One result of `pause_many`; no `error`: it is paused (or, of a resume, goes on)."""

    id: str
    error: ErrorBody | None = None


class BatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of `create_many`, as it is ready, or of `fork`: exactly one of `sandbox` and `error`. This is a line of
    the HTTP answer."""

    index: int
    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None


class Kept(Protocol):
    """Sandboxes that stand still, and who speaks for them."""

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

    # --- forks ---

    async def fork(self, sandbox_id: str, count: int, *, deadline_s: float | None = None) -> list[BatchItem]:
        """Children that begin with its files as they are now, and with its spec (but `name` and `hostname`); each with
        an id, host name, machine id and token of its own; with fresh processes, or where the backend copies memory
        with its own. A paused one isn't resumed. An item
        each, with a sandbox or an error. Raises `Unsupported`, `InvalidRequest`, `Unavailable`."""
        ...

    def captured(self, sandbox_id: str, *, at_rest: bool = False) -> AbstractAsyncContextManager[Captured]:
        """What it has written until now, for as long as the context lasts. Raises `Unsupported`, `Unavailable`,
        `Conflict` where it has to be `at_rest` and something is under way inside."""
        ...

    def note_snapshot(self, sandbox_id: str, captured: Captured, made: SnapshotInfo) -> None:
        """Put on record what became of it. Nothing where the sandbox has ended meanwhile."""
        ...

    def note_session(
        self, sandbox_id: str, kind: EntryType, data: dict[str, Any], *, env: dict[str, str] | None = None
    ) -> int:
        """An entry about a shell session in its sandbox's trajectory; its number (0: the sandbox has ended). Bytes are
        kept as output is, `env` as variables are. Raises `Unavailable` where it can't be written down."""
        ...

    # --- runs ---

    def open_run(self, project: str, asked: RunRequest) -> RunInfo:
        """Begin a new epoch of a run, with a whole lease; clients of earlier ones are fenced off."""
        ...

    def run(self, project: str, name: str) -> RunInfo:
        """A run as it is. Raises `NotFound`."""
        ...

    def runs(self, project: str) -> list[RunInfo]:
        """The project's runs, by name."""
        ...

    def renew_run(self, project: str, name: str, epoch: int) -> RunInfo:
        """Its lease is whole again. Raises `NotFound`, `RunFenced`."""
        ...

    def check_run(self, project: str, name: str, epoch: int) -> None:
        """Raises `RunFenced` where the run is in another epoch, `NotFound`."""
        ...

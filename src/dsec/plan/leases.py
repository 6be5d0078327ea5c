"""Leases of runs: what opening, renewing and lapsing make of a run's record.

Pure. Invariants: an epoch only grows; who is of an earlier one is fenced; a lease lapses at most once for each renewal;
of what several nodes are told about a run, the later epoch counts.
"""

from __future__ import annotations

from msgspec.structs import replace

from dsec.errors import NotFound, RunFenced
from dsec.spec.runs import RunInfo, RunRequest


def opened(known: RunInfo | None, asked: RunRequest, now: float) -> RunInfo:
    """A client opens the run: a new epoch, its first where there is none on record."""
    return RunInfo(
        name=asked.name,
        epoch=1 if known is None else known.epoch + 1,
        lease_s=asked.lease_s,
        on_lapse=asked.on_lapse,
        created_at=now if known is None else known.created_at,
        expires_at=now + asked.lease_s,
    )


def renewed(run: RunInfo, now: float) -> RunInfo:
    """Its lease is whole again; a lapsed run goes on."""
    return replace(run, expires_at=now + run.lease_s, lapsed=False)


def lapsed(run: RunInfo) -> RunInfo:
    """Nobody renewed it in time."""
    return replace(run, lapsed=True)


def check(run: RunInfo | None, name: str, epoch: int) -> RunInfo:
    """The run, if a client of this epoch may speak for it. Raises `NotFound`, `RunFenced`."""
    if run is None:
        raise NotFound(f"there is no run {name[:200]!r}", remedy="Open it with a lease (client.run).")
    if epoch != run.epoch:
        raise RunFenced(
            f"the run {name!r} is in epoch {run.epoch}, this client is of epoch {epoch}",
            remedy="Another process has taken the run over: end this one, or attach to the run again.",
            epoch=run.epoch,
        )
    return run


def supersedes(told: RunInfo, known: RunInfo | None) -> bool:
    """Whether what a node is told of a run counts as a renewal there. Epochs decide, never times: clocks differ, and a
    renewal that comes a moment late is one all the same."""
    return known is None or told.epoch >= known.epoch

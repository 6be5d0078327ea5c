"""Runs: training or evaluation jobs, their leases and epochs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dsec.spec.sandbox import Name

OnLapse = Literal["pause", "stop", "keep"]
LeaseS = Annotated[float, Meta(ge=1, le=86400.0)]


class RunRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A client opens a run: a new epoch of it begins, and clients of the ones before are fenced off."""

    name: Name
    lease_s: LeaseS = 60.0
    """So long after the last renewal the lease lapses."""
    on_lapse: OnLapse = "pause"
    """What becomes of the run's sandboxes then; a paused one goes on with the next request."""


class RunInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run on record."""

    name: str
    epoch: int
    lease_s: float
    on_lapse: OnLapse
    created_at: float
    expires_at: float
    """When the lease lapses, if nobody renews it."""
    lapsed: bool = False

"""What a build may use."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from dsec.spec.sandbox import GIB, MIB, Seconds

BACKEND: Final = "container"
"""Of the sandboxes in which a build runs its commands."""


class BuildLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the sandboxes in which a build runs its commands, one at a time."""

    cpus: Annotated[float, Meta(gt=0, le=4096)] = 2.0
    memory_bytes: Annotated[int, Meta(ge=16 * MIB, le=1 << 46)] = 2 * GIB
    disk_bytes: Annotated[int, Meta(ge=1 * MIB, le=1 << 46)] = 16 * GIB
    pids: Annotated[int, Meta(ge=4, le=1 << 20)] = 4096
    step_timeout_s: Seconds = 3600.0
    """Of one command."""
    output_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 64 << 20
    """Of one command; more fails it."""

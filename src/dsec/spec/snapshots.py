"""Snapshots: a sandbox's writable files as a layer, and the environment that has it on top."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Glob = Annotated[str, Meta(min_length=1, max_length=1000, description="`*`: within a name, `**`: any depth")]


class SnapshotRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to make of a sandbox's files."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]{0,150}@[A-Za-z0-9][A-Za-z0-9._+-]{0,47}$(?!\n)")]
    """`NAME@VERSION`: of the environment, and of the layer."""
    scrub: bool = True
    """Leave out what the standard rules name: histories, caches, temporary files, logs."""
    remove: Annotated[list[Glob], Meta(max_length=1000)] = []
    """Leave this out too, and everything below it."""
    keep: Annotated[list[Glob], Meta(max_length=1000)] = []
    """But keep this."""
    description: Annotated[str, Meta(max_length=1000)] = ""
    readers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=100)] = []
    """Other projects that may use it; `*`: all."""
    at_rest: bool = False
    """Refuse it (`conflict`) while a command, a session or a left-over program is there."""


class SnapshotInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot that was made, and what it holds."""

    name: str
    layer: str
    """Its digest."""
    sandbox: str
    built_by: str
    """The project, and the label of the key."""
    removed: int = 0
    removed_bytes: int = 0
    removed_paths: list[str] = []
    """The first thousand."""
    kept: int = 0
    kept_bytes: int = 0
    kept_paths: list[str] = []
    """The first thousand; deletions of files below count as kept."""

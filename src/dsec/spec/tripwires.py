"""Tripwires: what is to be noticed in a sandbox from outside, as data. docs/TRIPWIRES.md describes the format.

Owns the kinds of rules and their bounds. A sandbox's `tripwires` is a list of names of rule sets and of rules of its
own; `dsec.plan.tripwires` makes one plan of them. Values are frozen; unknown fields are refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct, field


class Severity(StrEnum):
    """How much a hit says about the agent."""

    INFO = "info"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"  # honest work doesn't do this
    CRITICAL = "critical"


class Action(StrEnum):
    """What a hit does besides the event."""

    FLAG = "flag"  # nothing
    PAUSE = "pause"  # the sandbox is frozen until somebody resumes it
    END = "end"  # the sandbox ends with the cause `tripwire`


Glob = Annotated[str, Meta(min_length=1, max_length=256)]
Globs = Annotated[list[Glob], Meta(min_length=1, max_length=64)]
SomeGlobs = Annotated[list[Glob], Meta(max_length=64)]
Touch = Literal["read", "write", "remove"]


class _Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"):
    """What every rule has."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$(?!\n)")]
    """A later rule of the same id replaces an earlier one."""
    what: Annotated[str, Meta(max_length=300)] = ""
    """For people: what a hit means."""
    severity: Severity = Severity.MEDIUM
    action: Action = Action.FLAG


class DecoyRule(_Rule, frozen=True, kw_only=True, tag="decoy"):
    """A file that is put there at the sandbox's start and that nobody has a reason to open. A file that is there
    already stays, and is watched."""

    path: Annotated[str, Meta(pattern=r"^[/~]/?[^\0]*$(?!\n)", max_length=1024)]
    content: Annotated[str, Meta(max_length=16384)] = ""
    """`{canary}` becomes a token of this sandbox's."""
    mode: Annotated[str, Meta(pattern=r"^[0-7]{3}$(?!\n)")] = "600"


class PathRule(_Rule, frozen=True, kw_only=True, tag="path"):
    """Files that are watched."""

    paths: Globs
    exclude: SomeGlobs = []
    on: Annotated[list[Touch], Meta(min_length=1, max_length=3)] = field(default_factory=lambda: ["write", "remove"])
    unless_exe: SomeGlobs = []
    """Programs that may."""


class ProcessRule(_Rule, frozen=True, kw_only=True, tag="process"):
    """Programs that are started."""

    exe: Globs
    argv: SomeGlobs = []
    """Patterns of the whole command line, its words joined by blanks; `*` is any text. Empty: any."""


class MaskedRule(_Rule, frozen=True, kw_only=True, tag="masked"):
    """Attempts on files of the kernel's that are masked inside."""

    paths: Globs = field(default_factory=lambda: ["/proc/**", "/sys/**"])


class NetworkRule(_Rule, frozen=True, kw_only=True, tag="network"):
    """Connections that the network policy refused."""

    names: Globs = field(default_factory=lambda: ["*"])


Rule = DecoyRule | PathRule | ProcessRule | MaskedRule | NetworkRule
SetName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$(?!\n)")]


class RuleSet(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of rules."""

    what: str
    rule: list[Rule]


class TripwireState(Struct, frozen=True, kw_only=True):
    """How a sandbox's tripwires stand."""

    armed: bool
    """Its marks are set. False where it has no rules, or is ending."""
    paused: str | None
    """The rule that froze it."""
    rules: list[Rule]
    hits: dict[str, int]
    """By rule, since this edge watches it."""

"""What a case of the catalogue is, and what comes of one.

A case says what an agent tries, what is expected, and how it is tried: by an `attempt` that runs inside and is judged
by a pattern, or by a `Check`, which does more: it looks from outside, uses several sandboxes, spoils its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from dsec.testing.misbehaviour.arena import Arena


class Verdict(Struct, frozen=True):
    """What a case saw, and whether that is what was expected."""

    ok: bool
    observed: str
    why: str = ""


class Skipped(Exception):
    """A case can't be tried here; says why."""


class Case(Struct, frozen=True, kw_only=True):
    """One kind of misbehaviour."""

    id: str
    group: str
    tries: str
    """What the agent tries."""
    expected: str
    """For people; of an `attempt` the pattern that what it saw matches."""
    attempt: str = ""
    """Python that runs inside (`dsec.testing.misbehaviour.inside`) and sets `seen`."""
    user: str = "root"


class Check(Case, frozen=True, kw_only=True):
    """A case that is a function."""

    check: Callable[[Arena], Awaitable[Verdict]]


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a case."""

    case: str
    group: str
    tries: str
    expected: str
    observed: str
    ok: bool
    why: str = ""
    skipped: bool = False

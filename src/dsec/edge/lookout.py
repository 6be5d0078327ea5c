"""What is seen of a sandbox without a look into it: what its network policy refused it. Of one whose kernel is its own
nothing else is evidence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from dsec.plan.tripwires import Pace, Plan
from dsec.spec.tripwires import Rule


class Hit(Struct, frozen=True):
    """A rule and what it was seen by; `count` hits since the last one of this rule."""

    rule: Rule
    act: str
    """`read`, `write`, `remove`, `start`, `masked` or `refused`."""
    path: str
    process: dict[str, Any] | None
    """None: it had ended before it could be looked at, or isn't known."""
    count: int
    time: float


Raise = Callable[[Hit | str], None]
"""A text: why events were lost."""
OVERFLOW = "more happened than could be looked at"


class Lookout:
    """One sandbox's. For the event loop."""

    def __init__(self, plan: Plan, raises: Raise) -> None:
        self.plan = plan
        self._raise = raises
        self._paces: dict[str, Pace] = {}
        self.expected: dict[str, float] = {}
        """Directories in which a caller's file call is at work, and until when. Written by the event loop."""

    def hits(self) -> dict[str, int]:
        """How often each rule was hit."""
        return {rule: pace.hits for rule, pace in list(self._paces.items())}

    def refused(self, name: str) -> None:
        """The network policy refused a connection to `name`. For the event loop."""
        for rule in self.plan.refused(name):
            count = self._paces.setdefault(rule.id, Pace()).hit(time.monotonic())
            if count:
                self._raise(Hit(rule, "refused", name, None, count, time.time()))

"""When a cluster starts nodes for overflow, and when it ends them.

Pure: time is an argument. What a node carries is counted in *nodes*: its load, 0..1 (nodes for overflow are taken to be
as large as the others). The rules, in order:

1. Where what is carried and what waits would fill all nodes above `above` for `wait_s`, and somebody has lately asked
   who may be there, as many are started as bring it to `above`; first those that are being emptied are kept.
2. Where one less would still be below `below` for `idle_s`, the one with the least on it gets nothing new; when it has
   nothing left it is stopped. One at a time.
3. One that doesn't join within `ready_s`, or was lost, is stopped, so that nobody pays for it.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from dsec.spec.cluster import EdgeNumber

_Seconds = Annotated[float, Meta(gt=0)]
_Share = Annotated[float, Meta(gt=0, le=1)]


class OverflowPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How eager to be."""

    edges: tuple[EdgeNumber, ...]
    """Numbers of nodes that may be started."""
    above: _Share = 0.8
    below: _Share = 0.5
    wait_s: _Seconds = 10.0
    idle_s: _Seconds = 300.0
    ready_s: _Seconds = 600.0
    most_at_once: Annotated[int, Meta(ge=1)] = 8
    """On their way to join."""

    def __post_init__(self) -> None:
        if not self.edges or len(set(self.edges)) != len(self.edges):
            raise ValueError("edges are the numbers of nodes that may be started, each once")
        if self.below >= self.above:
            raise ValueError("below is less than above")


class Phase(Enum):
    """Where a node for overflow is in its life."""

    STARTING = "starting"
    """The hook was asked for it; it hasn't joined."""
    RUNNING = "running"
    EMPTYING = "emptying"
    """It gets nothing new."""
    STOPPING = "stopping"
    """The hook is to end it."""


class Machine(Struct, frozen=True):
    """A node for overflow."""

    edge: int
    phase: Phase
    since: float
    """When this phase began."""


class Seen(Struct, frozen=True):
    """What a joined node carries."""

    live: int
    load: float


class Step(Struct, frozen=True):
    """A machine is to be brought into a phase."""

    edge: int
    phase: Phase
    why: str


class Overflow:
    """One cluster's. Not thread-safe; every call is synchronous."""

    def __init__(self, policy: OverflowPolicy) -> None:
        self._policy = policy
        self._pressed: float | None = None
        self._slack: float | None = None

    def decide(
        self,
        now: float,
        machines: list[Machine],
        *,
        others: list[float],
        seen: dict[int, Seen],
        waiting: float,
        asked: bool,
    ) -> list[Step]:
        """What to do now. `machines`: all that aren't gone; `others`: loads of the nodes that are always there; `seen`:
        by number, of nodes for overflow that have joined and aren't lost; `waiting`: what waits and may be there, in
        nodes; `asked`: whether somebody did of late."""
        policy = self._policy
        steps = [step for machine in machines if (step := self._follow(now, machine, seen)) is not None]
        taken = {step.edge for step in steps}
        running = [m for m in machines if m.phase is Phase.RUNNING and m.edge not in taken]
        emptying = [m for m in machines if m.phase is Phase.EMPTYING and m.edge not in taken]
        starting = [m for m in machines if m.phase is Phase.STARTING and m.edge not in taken]
        if not others and not running:
            return steps  # nothing is known yet, or nothing works: more nodes don't help
        carried = sum(others) + sum(each.load for each in seen.values()) + waiting
        have = len(others) + len(running) + len(starting)
        full = carried > policy.above * have and asked
        settled = all(machine.phase is Phase.RUNNING for machine in machines)
        spare = settled and not waiting and carried < policy.below * (have - 1)
        self._pressed = None if not full else now if self._pressed is None else self._pressed
        self._slack = None if not spare else now if self._slack is None else self._slack
        if self._pressed is not None and now - self._pressed >= policy.wait_s:
            steps += self._more(math.ceil(carried / policy.above) - have, machines, starting, emptying)
        if self._slack is not None and now - self._slack >= policy.idle_s and running:
            least = min(running, key=lambda m: (seen[m.edge].live if m.edge in seen else 0, -m.edge))
            steps.append(Step(least.edge, Phase.EMPTYING, "there is room without it"))
        return steps

    def _follow(self, now: float, machine: Machine, seen: dict[int, Seen]) -> Step | None:
        """What a machine's own state asks for."""
        edge, age = machine.edge, now - machine.since
        if edge not in self._policy.edges and machine.phase in (Phase.STARTING, Phase.RUNNING):
            return Step(edge, Phase.EMPTYING, "its number isn't in use any more")
        match machine.phase:
            case Phase.STARTING if edge in seen:
                return Step(edge, Phase.RUNNING, "it has joined")
            case Phase.STARTING if age > self._policy.ready_s:
                return Step(edge, Phase.STOPPING, f"it hasn't joined for {age:.0f} s")
            case Phase.RUNNING | Phase.EMPTYING if edge not in seen:
                return Step(edge, Phase.STOPPING, "it was lost")
            case Phase.EMPTYING if not seen[edge].live:
                return Step(edge, Phase.STOPPING, "it is empty")
        return None

    def _more(
        self, count: int, machines: list[Machine], starting: list[Machine], emptying: list[Machine]
    ) -> list[Step]:
        kept = [Step(machine.edge, Phase.RUNNING, "it is needed after all") for machine in emptying[: max(count, 0)]]
        used = {machine.edge for machine in machines}
        free = [edge for edge in self._policy.edges if edge not in used]
        room = max(0, min(count - len(kept), self._policy.most_at_once - len(starting)))
        return [*kept, *(Step(edge, Phase.STARTING, "the nodes are full") for edge in free[:room])]

"""The life of a sandbox: one table, state x event -> state. Whoever moves a sandbox asks `next_state`.

An event that isn't in the table for a state is a bug of the caller's (`LookupError`), except that ended stays ended.
"""

from __future__ import annotations

from enum import StrEnum

from dsec.spec.sandbox import State


class Event(StrEnum):
    """What can happen to a sandbox."""

    ADMITTED = "admitted"
    STARTED = "started"
    FAILED = "failed"
    PAUSE = "pause"
    RESUME = "resume"
    END = "end"  # a caller, a TTL, a lease or an operator ends it
    GONE = "gone"  # it ended by itself
    CLEANED = "cleaned"


TABLE: dict[tuple[State, Event], State] = {
    (State.QUEUED, Event.ADMITTED): State.STARTING,
    (State.QUEUED, Event.FAILED): State.ENDED,
    (State.QUEUED, Event.END): State.ENDED,
    (State.STARTING, Event.STARTED): State.RUNNING,
    (State.STARTING, Event.FAILED): State.ENDING,
    (State.STARTING, Event.END): State.ENDING,
    (State.STARTING, Event.GONE): State.ENDING,
    (State.RUNNING, Event.END): State.ENDING,
    (State.RUNNING, Event.GONE): State.ENDING,
    (State.RUNNING, Event.PAUSE): State.PAUSED,
    (State.PAUSED, Event.RESUME): State.RUNNING,
    (State.PAUSED, Event.END): State.ENDING,
    (State.PAUSED, Event.GONE): State.ENDING,
    (State.ENDING, Event.END): State.ENDING,
    (State.ENDING, Event.GONE): State.ENDING,
    (State.ENDING, Event.FAILED): State.ENDING,
    (State.ENDING, Event.STARTED): State.ENDING,
    (State.ENDING, Event.CLEANED): State.ENDED,
}


def next_state(state: State, event: Event) -> State:
    """The state after `event`. Raises LookupError where the table has no such move."""
    if state is State.ENDED:
        return state
    try:
        return TABLE[state, event]
    except KeyError:
        raise LookupError(f"a {state} sandbox cannot take the event {event}") from None

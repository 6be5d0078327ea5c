"""What an edge makes of a sandbox that an earlier one left: whether it is paused, and when it is due.

The earlier edge may have died between a freeze and its record, between a thaw and its record, or while a sandbox stood
still for a capture. So what is frozen is paused where that is on record or in its event log, and goes on otherwise;
what runs, though it is paused on record, runs on, unless a tripwire paused it: then it is frozen again.
"""

from __future__ import annotations

from msgspec.structs import replace

from dsec.edge.notes import Notes
from dsec.edge.sandbox import Sandbox
from dsec.ports import Clock, PausableHost
from dsec.spec.events import EventType
from dsec.spec.sandbox import Paused, PausedBy, State


def adopt_pause(sandbox: Sandbox, notes: Notes, clock: Clock) -> None:
    """Settle its state, `due` and `paused_at`; its instance is there."""
    record, instance = sandbox.record, sandbox.instance
    now, wall = clock.monotonic(), clock.now()
    paused = record.paused
    pausable = instance if isinstance(instance, PausableHost) else None
    frozen = pausable is not None and pausable.frozen
    if paused is None and frozen:
        paused = _in_log(sandbox.id, notes, wall)
    if record.expires_at is not None:
        sandbox.due = now + (record.expires_at - (wall if paused is None else paused.at))
    if paused is not None:
        sandbox.paused_at, sandbox.record = now, replace(sandbox.record, state=State.PAUSED, paused=paused)
    if pausable is None or frozen == (paused is not None):
        return
    if paused is None:
        pausable.freeze(False)
    elif paused.by is PausedBy.TRIPWIRE:
        pausable.freeze(True)
    else:
        sandbox.rouse()


def _in_log(sandbox_id: str, notes: Notes, wall: float) -> Paused | None:
    """The pause that the event log ends with."""
    moves = [e for e in notes.events.read(sandbox_id) if e.type in (EventType.PAUSED, EventType.RESUMED)]
    if not moves or moves[-1].type != EventType.PAUSED:
        return None
    return Paused(wall, PausedBy(moves[-1].data.get("by", PausedBy.CALLER)), str(moves[-1].data.get("rule", "")))

"""Event logs of all sandboxes of a node: kept outside of them, so that nothing inside can read or change them.

Owns what is not saved yet; `dsec.journal.event_store` owns the rest. Invariants: `add` does no I/O and costs less than
a microsecond, for it is on the path of every command; what was added is saved within `SAVE_S`, or sooner where there is
much of it; a sandbox keeps its last `KEPT` events; a reader that follows sees every event once, in order, and the log's
end after the sandbox's.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable
from typing import Any

from dsec.journal.event_store import EventStore, Row
from dsec.news import News
from dsec.ports import Clock
from dsec.spec.events import EventType, SandboxEvent

SAVE_S = 1.0
SAVE_AT = 256
"""Unsaved events of one sandbox that are saved at once."""
SAVE_WIDTH = 128
"""Sandboxes that are saved in one go; between two, the event loop gets a turn."""
KEPT = 2000
LOST_MOST = 1000
"""After a crash numbers go on so much higher: more than could be unsaved."""
_AGAIN_S = 5.0
_REFUSALS = frozenset({EventType.REFUSED, EventType.NAME_REFUSED})

log = logging.getLogger("dsec.edge")


class _Log:
    """One sandbox's."""

    __slots__ = ("news", "over", "seq", "trimmed", "unsaved")

    def __init__(self, seq: int = 0) -> None:
        self.seq = seq
        self.trimmed = seq
        self.unsaved: list[SandboxEvent] = []
        self.news = News()
        self.over = False


class Events:
    """For the event loop; `close` last."""

    def __init__(self, store: EventStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._now = clock.now
        self._logs: dict[str, _Log] = {}
        self._dirty: dict[str, _Log] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._known: dict[str, int] | None = None
        self._failing = False
        """The last attempt to save came to nothing: wait for the next one's time."""
        self._closed = False
        self.on_refused: Callable[[str, str], None] | None = None
        """Told of each connection or name that the network policy refused a sandbox."""
        self.on_event: Callable[[str, EventType, dict[str, Any]], None] | None = None
        """Told of every event."""

    # --- writing ---

    def add(self, sandbox_id: str, kind: EventType, data: dict[str, Any]) -> None:
        """Something happened to a sandbox. `data` is kept as it is: don't change it afterwards."""
        found = self._logs.get(sandbox_id)
        if found is None:
            found = self._logs[sandbox_id] = _Log()
        found.seq += 1
        found.unsaved.append(SandboxEvent(found.seq, self._now(), kind, data))
        self._dirty[sandbox_id] = found
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SAVE_S, self._save_due)
        if len(found.unsaved) >= SAVE_AT:
            if not self._failing:
                self._save([(sandbox_id, found)])
            elif len(found.unsaved) >= 2 * SAVE_AT:
                del found.unsaved[:-SAVE_AT]
        found.news.tell()
        if self.on_event is not None:
            self.on_event(sandbox_id, kind, data)
        if kind in _REFUSALS and self.on_refused is not None:
            self.on_refused(sandbox_id, str(data.get("name") or data.get("address") or ""))

    def end(self, sandbox_id: str, data: dict[str, Any]) -> None:
        """Nothing is left of it: the last event."""
        self.add(sandbox_id, EventType.ENDED, data)
        found = self._logs[sandbox_id]
        found.over = True
        found.news.tell()

    def resume(self, sandbox_id: str) -> None:
        """A sandbox that an earlier edge has written about."""
        if self._known is None:
            self._known = self._store.last()
        self._logs[sandbox_id] = _Log(self._known.get(sandbox_id, 0) + (0 if self._store.whole else LOST_MOST))

    def resumed(self) -> None:
        """All sandboxes of the earlier edge are known."""
        self._known = None

    # --- reading ---

    def read(self, sandbox_id: str, after: int = 0) -> list[SandboxEvent]:
        """Its events above `after`, as far as they are kept."""
        found = self._logs.get(sandbox_id)
        unsaved = found.unsaved if found is not None else []
        events = [] if unsaved and unsaved[0].seq <= after + 1 else self._store.load(sandbox_id, after)
        events += [event for event in unsaved if event.seq > after]
        return events[-KEPT:]

    async def follow(self, sandbox_id: str, after: int = 0) -> AsyncGenerator[SandboxEvent, None]:
        """Its events above `after`, those to come too; ends after the sandbox's end, or with this edge."""
        while not self._closed:
            events = self.read(sandbox_id, after)
            for event in events:
                after = event.seq
                yield event
            found = self._logs.get(sandbox_id)
            if found is None:
                return
            if events and found.seq > after:
                continue  # more came meanwhile
            if found.over:
                return
            after = max(after, found.seq)  # what can't be read any more was dropped
            await found.news.wait()

    # --- saving ---

    def _save_due(self) -> None:
        self._timer = None
        some = list(self._dirty.items())[:SAVE_WIDTH]
        delay_s = SAVE_S if self._save(some) else _AGAIN_S
        if self._dirty:
            delay_s = 0.01 if delay_s == SAVE_S else delay_s
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._save_due)

    def _save(self, logs: list[tuple[str, _Log]]) -> bool:
        rows: list[Row] = [(sandbox_id, each.unsaved) for sandbox_id, each in logs if each.unsaved]
        try:
            if rows:
                self._store.save(rows)
            for sandbox_id, each in logs:
                if each.seq - each.trimmed > 2 * KEPT:
                    each.trimmed = each.seq - KEPT
                    self._store.trim(sandbox_id, each.trimmed)
        except sqlite3.Error as error:
            if not self._failing:
                log.warning("events can't be saved: %s", error)
            self._failing = True
            return False
        self._failing = False
        for sandbox_id, each in logs:
            each.unsaved = []
            self._dirty.pop(sandbox_id, None)
            if each.over:
                self._logs.pop(sandbox_id, None)
        return True

    def prune(self, before: float) -> None:
        """Forget ended sandboxes whose last event is older."""
        try:
            self._store.prune(before, self._logs.__contains__)
        except sqlite3.Error as error:
            log.warning("old events can't be removed: %s", error)

    def close(self) -> None:
        """Save what there is; who follows is let go. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        self._closed = True
        whole = self._save(list(self._dirty.items()))
        for each in self._logs.values():
            each.over = True
            each.news.tell()
        self._logs.clear()
        if whole:
            self._store.close()

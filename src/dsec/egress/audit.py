"""What goes into a sandbox's event log about its network, and how much of it.

Owns the bound. Invariants: every connection and refusal is counted in some event; up to `BURST` events in `WINDOW_S`
are written one by one, what is beyond is added up and written once when the window ends, so that neither a port scan
nor a thousand look-ups a second can push anything else out of the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dsec.spec.events import EventType

WINDOW_S = 5.0
BURST = 40
KINDS = 32
"""Sums that are kept apart in one window."""
SHOWN = 16
_DETAILS = ("name", "address", "port")

Note = Callable[[EventType, dict[str, Any]], None]


class Audit:
    """One sandbox's."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._written = 0
        self._sums: dict[tuple[EventType, str, str], dict[str, Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, kind: EventType, data: dict[str, Any]) -> None:
        """An event, now or in a sum. Nothing any more after `close`: a log ends with its sandbox's end."""
        if self._closed:
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._over)
        self._written += 1
        if self._written <= BURST:
            self._note(kind, data)
        else:
            self._sum(kind, data)

    def close(self) -> None:
        """Write what was added up. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._over()

    def _sum(self, kind: EventType, data: dict[str, Any]) -> None:
        key = (kind, str(data.get("reason", "")), str(data.get("permission", "")))
        if key not in self._sums and len(self._sums) >= KINDS:
            key = (kind, "", "")
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = {"count": 0}
            found |= {name: value for name, value in (("reason", key[1]), ("permission", key[2])) if value}
        found["count"] += 1
        for name in _DETAILS:
            if name in data:
                seen = found.setdefault(f"{name}s" if name != "address" else "addresses", [])
                if len(seen) < SHOWN and data[name] not in seen:
                    seen.append(data[name])
        for name in ("out", "in", "bytes", "input_tokens", "output_tokens"):
            if name in data:
                found[name] = found.get(name, 0) + data[name]

    def _over(self) -> None:
        self._timer = None
        self._written = 0
        sums, self._sums = self._sums, {}
        for (kind, _, _), data in sums.items():
            self._note(kind, data)

"""Shell sessions done again by a rebuild: opened as they were, and given the same commands in the same order.

A command is done again where what became of it is on record and nothing but the command made it so: not where somebody
typed into it, or stopped it. Those are said to be left out, and what follows in their session is done all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsec.edge.client import EdgeClient
from dsec.edge.recorder import bytes_of
from dsec.edge.session import Session
from dsec.edge.sessions import Sessions
from dsec.edge.shell import Run
from dsec.spec.sessions import MIB, SessionSpec
from dsec.spec.trajectory import Entry, EntryType

PATIENCE = 10.0
"""A command gets so many times as long as it took."""
LEAST_S = 60.0

Differs = Callable[[int, str, str, str], None]
"""Told of a difference: seq, what, expected, got."""
Compare = Callable[[int, str, dict[str, Any], bytes], None]


class SessionReplay:
    """The sessions of one rebuild."""

    def __init__(
        self, edge: EdgeClient, entries: list[Entry], blob: Callable[[str], bytes | None], compare: Compare
    ) -> None:
        """`compare`: told of the output of entry `seq`, as it was described and as it is now."""
        self._sessions = Sessions(edge)
        self._blob = blob
        self._compare = compare
        self._open: dict[str, Session] = {}
        self._running: dict[int, tuple[Session, Run]] = {}
        self._began = {entry.seq: entry.time for entry in entries}
        self.recorded = any(entry.type == EntryType.SESSION_OPENED for entry in entries)
        """Whether there is anything on record of sessions."""
        self._left_out = _left_out(entries)

    async def open(self, box: str, data: dict[str, Any], env: dict[str, str]) -> None:
        """As it was."""
        spec = SessionSpec(name=data["session"], cwd=data.get("cwd"), user=data.get("user"), env=env)
        self._open[spec.name], _ = await self._sessions.open(box, spec)

    async def close(self, box: str, name: str) -> None:
        """Idempotent."""
        self._open.pop(name, None)
        await self._sessions.close(box, name)

    async def run(self, box: str, entry: Entry) -> str | None:
        """Begin a command; else why it is left out."""
        session = self._open.get(entry.data["session"])
        why = self._left_out.get(entry.seq)
        command = bytes_of(entry.data["command"], self._blob)
        if why is not None or session is None or command is None:
            return why or "commands of sessions that are not on record"
        text = command.decode("utf-8", "surrogateescape")
        run, _ = await self._sessions.start(box, session, text, key=entry.data.get("key"), room=MIB)
        self._running[entry.seq] = session, run
        return None

    async def result(self, box: str, entry: Entry, differs: Differs) -> bool:
        """Wait for a command's end and compare; False: it wasn't begun."""
        seq = entry.data["run"]
        running = self._running.pop(seq, None)
        if running is None:
            return False
        session, run = running
        patience_s = max(LEAST_S, PATIENCE * (entry.time - self._began.get(seq, entry.time)))
        stopped = await self._sessions.finish(box, session, run, patience_s)
        if stopped is not None:
            differs(seq, "cause", "it ended by itself", "it had to be stopped")
        elif run.code != entry.data.get("exit_code"):
            differs(seq, "exit_code", str(entry.data.get("exit_code")), str(run.code))
        if not entry.data.get("more"):
            self._compare(seq, "output", entry.data.get("output", {"bytes": 0}), run.take())
        if session.ended:
            self._open.pop(session.name, None)
        return True


def _left_out(entries: list[Entry]) -> dict[int, str]:
    """Commands that aren't done again, and why."""
    found: dict[int, str] = {}
    current: dict[str, int] = {}
    open_runs: set[int] = set()
    for entry in entries:
        data = entry.data
        match entry.type:
            case EntryType.SESSION_RUN:
                current[data["session"]] = entry.seq
                open_runs.add(entry.seq)
            case EntryType.SESSION_INPUT if data["session"] in current:
                found[current[data["session"]]] = "commands of sessions that somebody typed into"
            case EntryType.SESSION_RESULT:
                open_runs.discard(data["run"])
                if data.get("stopped"):
                    found[data["run"]] = "commands of sessions that were stopped"
            case _:
                continue
    return found | dict.fromkeys(open_runs, "commands of sessions without a result")

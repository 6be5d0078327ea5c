"""Event logs on disk: SQLite, `events.db` in the state directory, beside the records and not in them, because a lost
event is no lost sandbox.

Owns the schema: one row for the events of one sandbox that were saved together, as a JSON array. Invariants: rows are
only added, and removed from the old end; the file says whether it was closed in order (`user_version`), so that the
next edge knows whether events may be missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from dsec.spec.events import SandboxEvent

_SCHEMA = """
create table if not exists events (
    id text not null, seq integer not null, last integer not null, at real not null, body blob not null,
    primary key (id, seq)
) without rowid;
create index if not exists by_time on events (at);
"""
_CLOSED, _OPEN = 1, 2
_PRUNE_STEP = 1000

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[SandboxEvent]).decode

Row = tuple[str, list[SandboxEvent]]


class EventStore:
    """For the event loop: every call is short. Raises `sqlite3.Error` where the disk refuses."""

    def __init__(self, path: Path) -> None:
        """Open or make it. A damaged file is begun afresh: events are worth less than a server that starts."""
        try:
            self._connection = _open(path)
        except sqlite3.DatabaseError:
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                path.with_name(name).unlink(missing_ok=True)
            self._connection = _open(path)
        self.whole = self._connection.execute("pragma user_version").fetchone()[0] != _OPEN
        """The last edge closed it in order: it lacks nothing."""
        self._connection.execute(f"pragma user_version = {_OPEN}")

    def save(self, rows: Iterable[Row]) -> None:
        """Add events, each sandbox's own together."""
        values = [(i, events[0].seq, events[-1].seq, events[-1].time, _encode(events)) for i, events in rows]
        self._connection.execute("begin immediate")
        try:
            self._connection.executemany("insert or replace into events values (?, ?, ?, ?, ?)", values)
            self._connection.execute("commit")
        except BaseException:
            self._connection.execute("rollback")
            raise

    def load(self, sandbox_id: str, after: int = 0) -> list[SandboxEvent]:
        """Events above `after`."""
        rows = self._connection.execute(
            "select body from events where id = ? and last > ? order by seq", (sandbox_id, after)
        )
        return [event for (body,) in rows for event in _decode(body) if event.seq > after]

    def last(self) -> dict[str, int]:
        """The highest `seq` of each sandbox."""
        return dict(self._connection.execute("select id, max(last) from events group by id").fetchall())

    def trim(self, sandbox_id: str, below: int) -> None:
        """Drop a sandbox's events below a `seq`."""
        self._connection.execute("delete from events where id = ? and last < ?", (sandbox_id, below))

    def prune(self, before: float, keep: Callable[[str], bool]) -> int:
        """Drop sandboxes without events since `before` (seconds since the epoch) unless `keep` wants them; how many
        went."""
        found = self._connection.execute(
            "select distinct id from events where at < ? limit ?", (before, _PRUNE_STEP)
        ).fetchall()
        gone = [row for row in found if not keep(row[0])]
        if gone:
            self._connection.executemany("delete from events where id = ?", gone)
        return len(gone)

    def close(self) -> None:
        """Say that it is whole. Idempotent."""
        try:
            self._connection.execute(f"pragma user_version = {_CLOSED}")
        except sqlite3.Error:
            return  # closed already, or the disk refuses: then it isn't whole
        self._connection.close()


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = off")  # survives the edge; what the machine takes along may go
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    path.chmod(0o600)
    return connection

"""Runs on record: SQLite, `runs.db` in the state directory. Each write is on disk, or in the kernel at the least, when
the call returns: runs are few, and change with their clients."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from dsec.spec.runs import RunInfo

_SCHEMA = """
create table if not exists runs (
    project text not null, name text not null, epoch integer not null, lease_s real not null, on_lapse text not null,
    created_at real not null, expires_at real not null, lapsed integer not null, primary key (project, name)
) without rowid;
"""


class RunStore:
    """For one thread."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_SCHEMA)
        path.chmod(0o600)

    def all(self) -> dict[tuple[str, str], RunInfo]:
        """By project and name."""
        rows = self._db.execute(
            "select project, name, epoch, lease_s, on_lapse, created_at, expires_at, lapsed from runs"
        )
        return {
            (project, name): RunInfo(
                name=name,
                epoch=epoch,
                lease_s=lease_s,
                on_lapse=on_lapse,
                created_at=created_at,
                expires_at=expires_at,
                lapsed=bool(lapsed),
            )
            for project, name, epoch, lease_s, on_lapse, created_at, expires_at, lapsed in rows
        }

    def put(self, project: str, run: RunInfo) -> None:
        """Make or replace it."""
        self._db.execute(
            "insert or replace into runs values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                project,
                run.name,
                run.epoch,
                run.lease_s,
                run.on_lapse,
                run.created_at,
                run.expires_at,
                int(run.lapsed),
            ),
        )

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

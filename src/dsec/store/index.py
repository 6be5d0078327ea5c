"""Which chunks a store holds, and where: a cache on this node, in SQLite, filled from the store's own manifests and
placements. Losing it costs the time to read those again; a stale entry is noticed before it is used, because a pack's
presence is checked by whoever places a chunk in it."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

from dsec.store.format import Chunk, Place


class ChunkIndex:
    """Chunk -> place, for one store."""

    def __init__(self, path: Path, store_url: str) -> None:
        """`store_url`: another one than last time empties it. A damaged file is begun afresh."""
        self._lock = threading.Lock()
        try:
            self._db = self._open(path, store_url)
        except sqlite3.DatabaseError:
            path.unlink(missing_ok=True)
            self._db = self._open(path, store_url)

    @staticmethod
    def _open(path: Path, store_url: str) -> sqlite3.Connection:
        db = sqlite3.connect(path, check_same_thread=False, timeout=30.0)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        with db:
            db.execute("CREATE TABLE IF NOT EXISTS store (url TEXT)")
            db.execute("CREATE TABLE IF NOT EXISTS layers (layer TEXT PRIMARY KEY) WITHOUT ROWID")
            db.execute("CREATE TABLE IF NOT EXISTS packs (id INTEGER PRIMARY KEY, pack TEXT UNIQUE)")
            columns = "digest BLOB PRIMARY KEY, pack INTEGER, offset INTEGER"
            db.execute(f"CREATE TABLE IF NOT EXISTS chunks ({columns}) WITHOUT ROWID")
            if db.execute("SELECT url FROM store").fetchall() != [(store_url,)]:
                for table in ("store", "layers", "packs", "chunks"):
                    db.execute(f"DELETE FROM {table}")
                db.execute("INSERT INTO store VALUES (?)", (store_url,))
        return db

    def close(self) -> None:
        self._db.close()

    def unseen(self, layers: Iterable[str]) -> set[str]:
        """Those that were not added yet."""
        with self._lock:
            known = {row[0] for row in self._db.execute("SELECT layer FROM layers")}
        return set(layers) - known

    def add(self, layer: str, chunks: Iterable[Chunk], places: Iterable[Place]) -> None:
        """Remember where a layer's chunks lie."""
        with self._lock, self._db:
            ids: dict[str, int] = {}
            rows = []
            for chunk, place in zip(chunks, places, strict=True):
                if place.pack not in ids:
                    self._db.execute("INSERT OR IGNORE INTO packs (pack) VALUES (?)", (place.pack,))
                    found = self._db.execute("SELECT id FROM packs WHERE pack = ?", (place.pack,)).fetchone()
                    ids[place.pack] = found[0]
                rows.append((chunk.digest, ids[place.pack], place.offset))
            self._db.executemany("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", rows)
            self._db.execute("INSERT OR IGNORE INTO layers VALUES (?)", (layer,))

    def find(self, digests: Iterable[bytes]) -> dict[bytes, Place]:
        """Where these lie, as far as is known."""
        found = {}
        with self._lock:
            for digest in digests:
                row = self._db.execute(
                    "SELECT packs.pack, offset FROM chunks JOIN packs ON packs.id = chunks.pack WHERE digest = ?",
                    (digest,),
                ).fetchone()
                if row:
                    found[digest] = Place(row[0], row[1])
        return found

    def forget_pack(self, pack: str) -> None:
        """It isn't in the store any more."""
        with self._lock, self._db, contextlib.suppress(sqlite3.DatabaseError):
            self._db.execute("DELETE FROM chunks WHERE pack = (SELECT id FROM packs WHERE pack = ?)", (pack,))
            self._db.execute("DELETE FROM packs WHERE pack = ?", (pack,))

    def forget_layers(self, layers: Iterable[str]) -> None:
        """They aren't in the store any more."""
        with self._lock, self._db:
            self._db.executemany("DELETE FROM layers WHERE layer = ?", [(layer,) for layer in layers])

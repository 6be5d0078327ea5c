"""Group commit: one thread that writes to SQLite what the event loop hands it, a transaction a batch.

Owns the write connection. Invariants: writes become durable in the order they were submitted (those of one batch
together); a record submitted twice before its batch is written is written once, as it was last; a write that fails
alone (a constraint) fails no other.

Why one statement a batch: each call into SQLite gives the interpreter's lock away and has to win it back from a busy
event loop. A batch of records therefore travels as one JSON document that SQLite takes apart (`json_each`).
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from dsec.errors import DsecError, Internal, Unavailable

BATCHES_PER_S = 500
"""A batch costs ten times what a row does, so they are spaced. One client's creations in a row don't notice."""
BUSY_BATCHES_PER_S = 150
"""The same where many write at once: then each batch holds more."""
BURST = 8
"""So many batches may follow each other at once."""
BUSY_WRITES = 70
"""More waiting writes than this in a window are many."""
_WINDOW_S = 0.1
LAZY_S = 0.005
"""How long a write that nobody waits for may wait for company."""

Statement = tuple[str, tuple[Any, ...]]


class Batch:
    """What is written together."""

    __slots__ = ("rows", "statements", "waiters")

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.rows: dict[str, msgspec.Struct] = {}
        self.waiters: list[tuple[asyncio.Future[None], Statement | str]] = []
        """Who waits for which statement, or for the row of which id."""

    def __len__(self) -> int:
        return len(self.statements) + len(self.rows)


class Writer:
    """Submit from the event loop, written by a thread."""

    def __init__(self, connection: sqlite3.Connection, upsert: str) -> None:
        """`upsert`: one statement that takes a JSON array of rows as its only parameter."""
        self._connection = connection
        self._upsert = upsert
        self._encoder = msgspec.json.Encoder()
        self._loop = asyncio.get_running_loop()
        self._batch = Batch()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._busy = False
        self._allowed = float(BURST)
        self._allowed_at = self._loop.time()
        self._per_s = BATCHES_PER_S
        self._window_at = self._loop.time()
        self._window_writes = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dsec-journal", daemon=True)
        self._thread.start()

    def put(self, row_id: str, row: msgspec.Struct) -> asyncio.Future[None]:
        """Write a row; the future resolves when it is durable. Raises `Unavailable` after `close`."""
        self._check()
        self._batch.rows[row_id] = row
        return self._wait_for(row_id)

    def put_lazily(self, row_id: str, row: msgspec.Struct) -> None:
        """Write a row soon; before any later write."""
        self._check()
        self._batch.rows[row_id] = row
        self._schedule(LAZY_S)

    def execute(self, sql: str, parameters: tuple[Any, ...]) -> asyncio.Future[None]:
        """Run a statement, in a batch before its rows."""
        self._check()
        statement = (sql, parameters)
        self._batch.statements.append(statement)
        return self._wait_for(statement)

    async def call(self, function: Callable[[sqlite3.Connection], int]) -> int:
        """Run `function` in the thread, in a transaction of its own; what it returns."""
        self._check()
        done: asyncio.Future[int] = self._loop.create_future()

        def work() -> None:
            try:
                result = function(self._connection)
            except sqlite3.Error as error:
                failure = explain(error)
                self._post(lambda: None if done.done() else done.set_exception(failure))
            else:
                self._post(lambda: None if done.done() else done.set_result(result))

        self._queue.put(work)
        return await done

    async def close(self) -> None:
        """Write what was submitted, then end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._flush()
            await self._idle.wait()
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check(self) -> None:
        if self._closed:
            raise Unavailable("the server is stopping", remedy="Try again when it is back.")

    def _wait_for(self, what: Statement | str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._batch.waiters.append((future, what))
        self._schedule(self._spacing_s())
        return future

    def _spacing_s(self) -> float:
        """How long the next batch has to wait for its turn."""
        now = self._loop.time()
        self._window_writes += 1
        if now - self._window_at > _WINDOW_S:
            busy = self._window_writes > BUSY_WRITES and now - self._window_at < 2 * _WINDOW_S
            self._per_s = BUSY_BATCHES_PER_S if busy else BATCHES_PER_S
            self._window_at, self._window_writes = now, 0
        self._allowed = min(BURST, self._allowed + (now - self._allowed_at) * self._per_s)
        self._allowed_at = now
        return 0.0 if self._allowed >= 1 else (1 - self._allowed) / self._per_s

    def _schedule(self, delay_s: float) -> None:
        if self._busy:
            return  # _written goes on with what has come in the meantime
        at = self._loop.time() + delay_s
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._busy or not len(self._batch):
            return
        batch, self._batch = self._batch, Batch()
        self._busy = True
        self._idle.clear()
        self._allowed -= 1
        self._queue.put(lambda: self._write(batch))

    def _written(self, batch: Batch, failures: dict[Statement | str, DsecError]) -> None:
        self._busy = False
        for future, what in batch.waiters:
            if future.done():
                continue
            failure = failures.get(what) if failures else None
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
        if not len(self._batch):
            self._idle.set()
        elif self._closed:
            self._flush()
        elif self._batch.waiters:
            self._schedule(self._spacing_s())
        else:
            self._schedule(LAZY_S)

    # --- the thread ---

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _post(self, callback: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _write(self, batch: Batch) -> None:
        failures: dict[Statement | str, DsecError] = {}
        try:
            self._transact(batch.statements, list(batch.rows.values()))
        except (sqlite3.Error, OverflowError, ValueError, TypeError):
            for statement in batch.statements:
                self._write_alone(failures, statement, [statement], [])
            for row_id, row in batch.rows.items():
                self._write_alone(failures, row_id, [], [row])
        self._post(lambda: self._written(batch, failures))

    def _write_alone(
        self,
        failures: dict[Statement | str, DsecError],
        what: Statement | str,
        statements: list[Statement],
        rows: list[msgspec.Struct],
    ) -> None:
        try:
            self._transact(statements, rows)
        except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
            failures[what] = explain(error)

    def _transact(self, statements: list[Statement], rows: list[msgspec.Struct]) -> None:
        connection = self._connection
        alone = not statements  # then the one statement is its own transaction
        if not alone:
            connection.execute("begin immediate")
        try:
            for sql, parameters in statements:
                connection.execute(sql, parameters)
            if rows:
                connection.execute(self._upsert, (self._encoder.encode(rows).decode(),))
            if not alone:
                connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise


def explain(error: Exception) -> DsecError:
    """What a failure of SQLite's means for the caller."""
    if isinstance(error, sqlite3.IntegrityError):
        return Internal(
            f"a record contradicts one on disk: {error}", remedy="Report this: the edge should have refused it."
        )
    return Unavailable(
        f"the server can't write its records: {error}",
        remedy="Look at the free space and health of the state directory's disk.",
    )

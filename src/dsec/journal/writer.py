"""Group commit: what the event loop hands over is written to SQLite a transaction a batch.

Owns the write connection. Invariants: writes become durable in the order they were submitted (those of one batch
together); a record submitted twice before its batch is written is written once, as it was last; a write that fails
alone (a constraint) fails no other.

Batches are written by the event loop itself: one takes about 10 us and 12 us a row, with no wait for the disk (the
write-ahead log is synced at checkpoints only), where a thread's turn costs several times that, because the threads
then fight for the interpreter's lock. What may take long is a thread's: checkpoints, which stop no writer, and `call`,
for whose time writes wait.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dsec.errors import DsecError, Internal, Unavailable

BATCHES_PER_S = 1000
"""A batch costs as much as a few rows, so they are spaced. One client's creations in a row don't notice."""
BURST = 8
"""So many batches may follow each other at once."""
LAZY_S = 0.005
"""How long a write that nobody waits for may wait for company."""
CHECKPOINT_BATCHES = 1000
"""Batches from one checkpoint to the next: a few MB of log."""

log = logging.getLogger(__name__)

Statement = tuple[str, tuple[Any, ...]]
Row = TypeVar("Row")


class Batch(Generic[Row]):
    """What is written together."""

    __slots__ = ("rows", "statements", "waiters")

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.rows: dict[str, Row] = {}
        self.waiters: list[tuple[asyncio.Future[None], Statement | str]] = []
        """Who waits for which statement, or for the row of which id."""

    def __len__(self) -> int:
        return len(self.statements) + len(self.rows)


class Writer(Generic[Row]):
    """For the event loop. `close` last."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        upsert: str,
        values: Callable[[Row], tuple[Any, ...]],
        checkpoint: Callable[[], None],
    ) -> None:
        """`upsert`: a statement that takes the `values` of a row. `checkpoint`: moves the log into the database
        without stopping writers; called in a thread, never twice at the same time."""
        self._connection = connection
        self._upsert = upsert
        self._values = values
        self._checkpoint = checkpoint
        self._loop = asyncio.get_running_loop()
        self._batch: Batch[Row] = Batch()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._allowed = float(BURST)
        self._allowed_at = self._loop.time()
        self._closed = False
        self._turn = asyncio.Lock()
        """Held by whoever uses the connection in a thread."""
        self._unchecked = 0
        self._checkpointing: asyncio.Task[None] | None = None

    def put(self, row_id: str, row: Row) -> asyncio.Future[None]:
        """Write a row; the future resolves when it is durable. Raises `Unavailable` after `close`."""
        self._check()
        self._batch.rows[row_id] = row
        return self._wait_for(row_id)

    def put_lazily(self, row_id: str, row: Row) -> None:
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

    @property
    def connection_busy(self) -> bool:
        """A thread has the connection."""
        return self._turn.locked()

    async def call(self, function: Callable[[sqlite3.Connection], int]) -> int:
        """Run `function` in a thread, in a transaction of its own; what it returns. Writes wait meanwhile."""
        self._check()
        async with self._turn:
            try:
                return await asyncio.to_thread(function, self._connection)
            except sqlite3.Error as error:
                raise explain(error) from error
            finally:
                self._loop.call_soon(self._flush)  # when the turn is over

    async def close(self) -> None:
        """Write what was submitted. Idempotent."""
        self._closed = True
        async with self._turn:
            pass
        self._flush()
        if self._checkpointing is not None:
            await self._checkpointing

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
        self._allowed = min(BURST, self._allowed + (now - self._allowed_at) * BATCHES_PER_S)
        self._allowed_at = now
        return 0.0 if self._allowed >= 1 else (1 - self._allowed) / BATCHES_PER_S

    def _schedule(self, delay_s: float) -> None:
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
        if self._turn.locked() or not len(self._batch):
            return  # `call` and `close` go on with what has come in the meantime
        batch, self._batch = self._batch, Batch()
        self._allowed -= 1
        failures = self._write(batch)
        for future, what in batch.waiters:
            if future.done():
                continue
            failure = failures.get(what) if failures else None
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
        self._unchecked += 1
        if self._unchecked >= CHECKPOINT_BATCHES and self._checkpointing is None and not self._closed:
            self._unchecked = 0
            self._checkpointing = self._loop.create_task(self._move_log())

    async def _move_log(self) -> None:
        try:
            await asyncio.to_thread(self._checkpoint)
        except sqlite3.Error as error:
            log.warning("the journal's log cannot be moved into the database: %s", error)
        finally:
            self._checkpointing = None

    def _write(self, batch: Batch[Row]) -> dict[Statement | str, DsecError]:
        """Write it whole, or each write by itself; returns those that failed."""
        failures: dict[Statement | str, DsecError] = {}
        try:
            self._transact(batch.statements, list(batch.rows.values()))
        except (sqlite3.Error, OverflowError, ValueError, TypeError):
            for statement in batch.statements:
                self._write_alone(failures, statement, [statement], [])
            for row_id, row in batch.rows.items():
                self._write_alone(failures, row_id, [], [row])
        return failures

    def _write_alone(
        self,
        failures: dict[Statement | str, DsecError],
        what: Statement | str,
        statements: list[Statement],
        rows: list[Row],
    ) -> None:
        try:
            self._transact(statements, rows)
        except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
            failures[what] = explain(error)

    def _transact(self, statements: list[Statement], rows: list[Row]) -> None:
        connection = self._connection
        alone = len(statements) + len(rows) == 1  # then the one statement is its own transaction
        if not alone:
            connection.execute("begin immediate")
        try:
            for sql, parameters in statements:
                connection.execute(sql, parameters)
            for row in rows:
                connection.execute(self._upsert, self._values(row))
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

"""Sandbox records, API keys and idempotency keys of one edge: SQLite, `edge.db` in the state directory.

Owns the schema. Invariants:

- A record is durable before what it names exists, and goes to `ended` only when nothing of it is left; after a crash
  the records say what to look for. Durable means: survives the death of every process. The write-ahead log is synced
  at checkpoints only (synchronous = NORMAL), for when the machine itself dies, its sandboxes die too; with `lasting`
  at each write (FULL), for a machine that is expected to die (a shield's) and whose callers ask what became of them.
- Among sandboxes that have not ended, (project, run, name) is unique.
- Tokens and API keys are on disk as SHA-256 only.
- Ended records are kept for `keep_s` and at most `keep_count` of them; idempotency keys as long as any of their
  sandboxes, and `keep_s`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dsec.errors import Internal
from dsec.journal.writer import Writer
from dsec.ports import Handle
from dsec.spec.causes import Cause
from dsec.spec.network import KeyPolicy, Network
from dsec.spec.sandbox import Paused, SandboxSpec, State

SCHEMA_VERSION = 4
PRUNE_STEP = 2000

_SCHEMA = """
create table sandboxes (
    id text primary key, project text not null, run text not null, name text, backend text not null, state text not
    null, spec text not null, handle text not null, cause text, message text not null, created_at real not null,
    expires_at real, ended_at real, token text not null, create_ms real, queue_ms real not null
) without rowid;
create unique index live_names on sandboxes (project, run, name) where name is not null and state != 'ended';
create index by_end on sandboxes (ended_at) where ended_at is not null;
create table api_keys (hash text primary key, project text not null, label text not null, created_at real not null,
revoked_at real); create table batches (
    project text not null, key text not null, digest text not null, ids text not null, created_at real not null,
    primary key (project, key)
) without rowid;
"""
_SECOND = """
alter table sandboxes add column network text;
alter table api_keys add column policy text;
create table stand_ins (
    sandbox text not null, address integer not null, name text not null, primary key (sandbox, address)
) without rowid;
"""
"""What version 2 added: the network."""

_THIRD = """
alter table sandboxes add column paused text;
"""
"""What version 3 added: paused sandboxes."""
_FOURTH = """
alter table sandboxes add column charged_to text not null default '';
"""
"""What version 4 added: on whose share of a quota a sandbox counts."""
_STEPS = (_SCHEMA, _SECOND, _THIRD, _FOURTH)


class Record(Struct, frozen=True, kw_only=True, array_like=True):
    """One sandbox on record; the order of the fields is that of the columns."""

    id: str
    project: str
    run: str = ""
    name: str | None = None
    backend: str = "container"
    state: State
    spec: SandboxSpec
    handle: Handle
    cause: Cause | None = None
    message: str = ""
    created_at: float
    expires_at: float | None = None
    ended_at: float | None = None
    token: str
    """SHA-256 of the sandbox token, in hex."""
    create_ms: float | None = None
    queue_ms: float = 0.0
    network: Network | None = None
    """What it may reach now; `spec` has what it began with."""
    paused: Paused | None = None
    charged_to: str = ""
    """In a cluster: the apiserver on whose share of a quota it counts."""


class KeyRecord(Struct, frozen=True, kw_only=True):
    """An API key on record, by its SHA-256 in hex."""

    hash: str
    project: str
    label: str
    created_at: float
    revoked_at: float | None = None
    policy: KeyPolicy | None = None


class BatchRecord(Struct, frozen=True, kw_only=True):
    """What an idempotency key of `create` or `create_many` made."""

    project: str
    key: str
    digest: str
    ids: list[str]
    created_at: float


_COLUMNS = Record.__struct_fields__
_CHANGES = (
    "state",
    "handle",
    "cause",
    "message",
    "expires_at",
    "ended_at",
    "token",
    "create_ms",
    "queue_ms",
    "network",
    "paused",
)
_UPSERT = (
    f"insert into sandboxes ({','.join(_COLUMNS)}) values ({','.join('?' * len(_COLUMNS))}) "
    f"on conflict (id) do update set {','.join(f'{c}=excluded.{c}' for c in _CHANGES)}"
)
_SELECT = f"select {','.join(_COLUMNS)} from sandboxes"
_spec_decoder = msgspec.json.Decoder(SandboxSpec)
_handle_decoder = msgspec.json.Decoder(dict[str, Any])
_network_decoder = msgspec.json.Decoder(Network)
_paused_decoder = msgspec.json.Decoder(Paused)
_policy_decoder = msgspec.json.Decoder(KeyPolicy)
_encode = msgspec.json.Encoder().encode


class Journal:
    """The records of one edge. Writes are awaited where durability matters; reads see what is durable."""

    def __init__(
        self, path: Path, *, keep_s: float = 86400.0, keep_count: int = 100_000, lasting: bool = False
    ) -> None:
        """Open or make the database. Call within the event loop. Raises `Internal` where it is damaged or of a newer
        schema."""
        self._keep_s = keep_s
        self._keep_count = keep_count
        self._path = path
        connection = _open(path)
        if lasting:
            connection.execute("pragma synchronous = full")
        self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._reader.execute("pragma query_only = 1")
        self._writer = Writer(connection, _UPSERT, _values, self._checkpoint)
        self._connection = connection

    def _read(self, sql: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """By the writer's connection where that is free: its pages are in memory."""
        return (self._reader if self._writer.connection_busy else self._connection).execute(sql, parameters)

    # --- sandboxes ---

    def put(self, record: Record) -> asyncio.Future[None]:
        """Write or replace a record; resolves when it is durable. Raises `Unavailable` (the future, too) where that
        can't be."""
        return self._writer.put(record.id, record)

    def put_lazily(self, record: Record) -> None:
        """Write a record soon, and before any later write."""
        self._writer.put_lazily(record.id, record)

    def get(self, sandbox_id: str) -> Record | None:
        """A record by id, ended ones included."""
        row = self._read(f"{_SELECT} where id = ?", (sandbox_id,)).fetchone()
        return _record(row) if row else None

    def live(self) -> list[Record]:
        """All records that have not ended."""
        return [_record(row) for row in self._read(f"{_SELECT} where state != 'ended'")]

    def ended_by(self, cause: Cause) -> list[Record]:
        """All ended records of a cause."""
        return [_record(row) for row in self._read(f"{_SELECT} where state = 'ended' and cause = ?", (cause.value,))]

    async def ended(self, project: str, *, run: str | None, after: str, limit: int) -> list[Record]:
        """Ended records of a project in the order of ids, from above `after`."""

        def read() -> list[Record]:
            connection = sqlite3.connect(self._path, isolation_level=None)
            try:
                connection.execute("pragma query_only = 1")
                where, parameters = "id > ? and state = 'ended' and project = ?", [after, project]
                if run is not None:
                    where, parameters = f"{where} and run = ?", [*parameters, run]
                cursor = connection.execute(f"{_SELECT} where {where} order by id limit ?", (*parameters, limit))
                return [_record(row) for row in cursor]
            finally:
                connection.close()

        return await asyncio.to_thread(read)

    # --- API keys ---

    def api_keys(self) -> list[KeyRecord]:
        sql = "select hash, project, label, created_at, revoked_at, policy from api_keys order by created_at"
        return [
            KeyRecord(
                hash=digest,
                project=project,
                label=label,
                created_at=created_at,
                revoked_at=revoked_at,
                policy=_policy_decoder.decode(policy) if policy else None,
            )
            for digest, project, label, created_at, revoked_at, policy in self._read(sql)
        ]

    def put_key(self, key: KeyRecord) -> asyncio.Future[None]:
        return self._writer.execute(
            "insert into api_keys (hash, project, label, created_at, revoked_at, policy) values (?, ?, ?, ?, ?, ?) "
            "on conflict (hash) do update set revoked_at = excluded.revoked_at",
            (
                key.hash,
                key.project,
                key.label,
                key.created_at,
                key.revoked_at,
                None if key.policy is None else _encode(key.policy).decode(),
            ),
        )

    # --- names inside sandboxes ---

    def stand_ins(self, sandbox_id: str) -> list[tuple[str, int]]:
        """Names and the addresses that stand for them, in one sandbox."""
        return list(self._read("select name, address from stand_ins where sandbox = ?", (sandbox_id,)))

    def put_stand_in(self, sandbox_id: str, name: str, address: int) -> asyncio.Future[None]:
        """This address stands for this name from now on."""
        return self._writer.execute(
            "insert or replace into stand_ins (sandbox, address, name) values (?, ?, ?)", (sandbox_id, address, name)
        )

    def drop_stand_ins(self, sandbox_id: str) -> asyncio.Future[None]:
        """The sandbox has ended."""
        return self._writer.execute("delete from stand_ins where sandbox = ?", (sandbox_id,))

    # --- idempotency keys ---

    def batch(self, project: str, key: str) -> BatchRecord | None:
        row = self._read(
            "select digest, ids, created_at from batches where project = ? and key = ?", (project, key)
        ).fetchone()
        if row is None:
            return None
        return BatchRecord(
            project=project, key=key, digest=row[0], ids=msgspec.json.decode(row[1], type=list[str]), created_at=row[2]
        )

    def put_batch(self, batch: BatchRecord) -> asyncio.Future[None]:
        """Durable before any record that is put after it."""
        return self._writer.execute(
            "insert into batches (project, key, digest, ids, created_at) values (?, ?, ?, ?, ?)",
            (batch.project, batch.key, batch.digest, _encode(batch.ids).decode(), batch.created_at),
        )

    def replace_batch(self, batch: BatchRecord) -> asyncio.Future[None]:
        """The same for one that is on record: it has other ids now."""
        return self._writer.execute(
            "update batches set ids = ? where project = ? and key = ?",
            (_encode(batch.ids).decode(), batch.project, batch.key),
        )

    # --- upkeep ---

    def _checkpoint(self) -> None:
        """By a connection of its own, so that writes go on meanwhile."""
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            connection.execute("pragma wal_checkpoint(passive)")
        finally:
            connection.close()

    async def prune(self, now: float) -> int:
        """Drop what need not be kept any longer, at most `PRUNE_STEP` records; how many records went."""
        before, keep = now - self._keep_s, self._keep_count

        def work(connection: sqlite3.Connection) -> int:
            gone = connection.execute(
                "delete from sandboxes where id in (select id from sandboxes where ended_at < ? limit ?)",
                (before, PRUNE_STEP),
            ).rowcount
            if gone < PRUNE_STEP:
                gone += connection.execute(
                    "delete from sandboxes where id in (select id from sandboxes where ended_at is not null "
                    "order by ended_at desc limit ? offset ?)",
                    (PRUNE_STEP - gone, keep),
                ).rowcount
            connection.execute(
                "delete from batches where created_at < ? and not exists "
                "(select 1 from json_each(batches.ids) as item join sandboxes on sandboxes.id = item.value)",
                (before,),
            )
            return gone

        return await self._writer.call(work)

    async def close(self) -> None:
        """Write what was put, then close. Idempotent."""
        await self._writer.close()
        self._reader.close()
        self._connection.close()


def _values(record: Record) -> tuple[Any, ...]:
    """Its row; by hand, because JSON that SQLite takes apart costs twice as much."""
    return (
        record.id,
        record.project,
        record.run,
        record.name,
        record.backend,
        record.state.value,
        _encode(record.spec).decode(),
        _encode(record.handle).decode(),
        None if record.cause is None else record.cause.value,
        record.message,
        record.created_at,
        record.expires_at,
        record.ended_at,
        record.token,
        record.create_ms,
        record.queue_ms,
        _encode(record.network).decode() if record.network is not None else None,
        _encode(record.paused).decode() if record.paused is not None else None,
        record.charged_to,
    )


def _record(row: tuple[Any, ...]) -> Record:
    (
        sandbox_id,
        project,
        run,
        name,
        backend,
        state,
        spec,
        handle,
        cause,
        message,
        created,
        expires,
        ended,
        token,
        create_ms,
        queue_ms,
        network,
        paused,
        charged_to,
    ) = row
    return Record(
        id=sandbox_id,
        project=project,
        run=run,
        name=name,
        backend=backend,
        state=State(state),
        spec=_spec_decoder.decode(spec),
        handle=_handle_decoder.decode(handle),
        cause=Cause(cause) if cause else None,
        message=message,
        created_at=created,
        expires_at=expires,
        ended_at=ended,
        token=token,
        create_ms=create_ms,
        queue_ms=queue_ms,
        network=_network_decoder.decode(network) if network else None,
        paused=_paused_decoder.decode(paused) if paused else None,
        charged_to=charged_to,
    )


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        version = connection.execute("pragma user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise Internal(
                f"{path} was written by a newer version of dsec (schema {version}; this one knows {SCHEMA_VERSION})",
                remedy="Run the newer version, or set DSEC_STATE to another directory.",
            )
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.execute("pragma wal_autocheckpoint = 0")  # the writer's business: it would wait for the disk
        findings = connection.execute("pragma quick_check(1)").fetchone()[0]
        if findings != "ok":
            raise sqlite3.DatabaseError(findings)
        if version < SCHEMA_VERSION:
            steps = "".join(_STEPS[version:])
            connection.executescript(f"begin immediate; {steps} pragma user_version = {SCHEMA_VERSION}; commit;")
    except sqlite3.DatabaseError as error:
        connection.close()
        raise Internal(
            f"{path} is damaged: {error}",
            remedy="Restore it from a backup, or move it away: the sandboxes on record are then removed at the next "
            "start.",
        ) from error
    except BaseException:
        connection.close()
        raise
    path.chmod(0o600)
    return connection

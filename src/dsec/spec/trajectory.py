"""The trajectory of a sandbox: what was done to it and what came of it, as a chain of entries.

Owns the form of an entry and of the chain, so that a server, a client and anybody else check it alike. Pure. An entry
is a `SandboxEvent` (`seq`, `time`, `type`, `data`) with `prev`, the hash of the one before, and its own `hash`: SHA-256
of the entry without it, as JSON with its members in that order, the keys within `data` sorted at every depth and no
space between tokens. The first one's `prev` is `root_of` its sandbox's id, so that one log can't be taken for
another's. Numbers begin at 1 and have no gaps. What a chain alone can't say is whether its end was cut off: a whole one
of an ended sandbox ends with `end`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

import msgspec
from msgspec import Struct

from dsec.spec.sandbox import SandboxInfo
from dsec.spec.short_hash import sha256

INLINE_BYTES = 8 << 10
"""Of a command's output, both streams together, in its entry; more goes into blobs."""


class EntryType(StrEnum):
    """What an entry can be, besides the events that are taken over under their own names (connections, tripwires,
    pauses, snapshots, forks, renewals)."""

    CREATE = "create"  # sandbox, project, run, name, environment, layers, spec (`env` by digest), request_id
    # `restored`, of `exec` and `result`: the number in the log that a rebuild took them over from, without doing it
    EXEC = "exec"  # argv, cwd, user, defaults, env (a digest), key, request (a digest), options: before it runs
    RESULT = "result"  # exec (the entry's seq), key, status, stdout, stderr, stdin: before the caller sees it
    REFUSED = "exec_refused"  # exec, code, message: it didn't start, its key is free
    WRITE = "file_written"  # path, bytes, sha256, mode, user, append, blob
    MOVE = "file_moved"  # path, to, user, exclusive
    MKDIR = "directory_made"  # path, user, mode, parents
    REMOVE = "file_removed"  # path, user, recursive
    SESSION_OPENED = "session_opened"  # session, cwd, user, env (a digest): its shell is ready
    SESSION_RUN = "session_run"  # session, command or command_blob, key, mark, shell (its pid), typed (where in the
    # shell's input the command ends): before it is typed
    SESSION_INPUT = "session_input"  # session, bytes: typed into what runs there
    SESSION_RESULT = "session_result"  # run (the entry's seq), exit_code, output, stopped: before the caller sees it
    SESSION_CLOSED = "session_closed"  # session
    NETWORK = "network"  # policy: what it may reach from now on
    MUTED = "events_muted"  # taken_over: from here on what agents cause is in the event log alone
    REBUILT = (
        "rebuilt"  # generation, entries, snapshots: it was made again here, under its id, from its log on another node
    )
    END = "end"  # cause, infra, message: the last one


DEEDS = frozenset(
    {
        EntryType.EXEC, EntryType.WRITE, EntryType.MOVE, EntryType.MKDIR, EntryType.REMOVE, EntryType.SESSION_OPENED,
        EntryType.SESSION_RUN, EntryType.SESSION_INPUT, EntryType.SESSION_CLOSED,
    }
)  # fmt: skip
"""Entries of what may change a sandbox's files."""


class Entry(Struct, frozen=True):
    """One entry."""

    seq: int
    time: float
    """Seconds since the epoch."""
    type: str
    data: dict[str, Any]
    prev: str
    hash: str


class RebuildStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rebuild came out different: entry `seq` of the original."""

    seq: int
    what: str
    """`exit_code`, `cause`, `stdout`, `stderr`, `error` or `not_kept`."""
    expected: str = ""
    got: str = ""


class Rebuilt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `rebuild` made and found."""

    sandbox: SandboxInfo
    original: str
    replayed: int
    """Operations that were done again."""
    base: str = ""
    """The environment that it began from: the original's, or that of its last snapshot."""
    diverged: RebuildStep | None = None
    """The first difference; None: all outputs were as recorded, but for what the normalisers allow."""
    differences: int = 0
    not_replayed: list[str] = []
    """Kinds of entries that a rebuild doesn't do again."""


class RebuildRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/sandboxes:rebuild`."""

    sandbox: str
    on_divergence: Literal["go_on", "stop"] = "go_on"
    upto: int | None = None
    """Entries up to this number."""
    from_start: bool = False
    """Do everything again, from the environment on, whatever snapshots there are."""


class Broken(ValueError):
    """A chain that doesn't hold; the message says where and why."""

    def __init__(self, seq: int, why: str) -> None:
        super().__init__(f"entry {seq}: {why}")
        self.seq = seq


_encode = msgspec.json.Encoder(order="sorted").encode
_plain = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


def root_of(sandbox_id: str) -> str:
    """`prev` of a sandbox's first entry."""
    return sha256(b"dsec trajectory 1\n" + sandbox_id.encode()).hexdigest()


def seal(seq: int, time: float, kind: str, data: dict[str, Any], prev: str) -> tuple[bytes, str]:
    """An entry as a line, with its newline, and its hash. Raises `UnicodeEncodeError` for text that has no bytes."""
    body = _body(seq, time, kind, data, prev)
    found = sha256(body + b"}").hexdigest()
    return b'%s,"hash":"%s"}\n' % (body, found.encode()), found


def hash_of(entry: Entry) -> str:
    """What its hash has to be."""
    return sha256(_body(entry.seq, entry.time, entry.type, entry.data, entry.prev) + b"}").hexdigest()


def _body(seq: int, time: float, kind: str, data: dict[str, Any], prev: str) -> bytes:
    values = (seq, _plain(time), _plain(kind), _encode(data), _plain(prev))
    return b'{"seq":%d,"time":%s,"type":%s,"data":%s,"prev":%s' % values


def parse(line: bytes) -> Entry:
    """One line. Raises `Broken`."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise Broken(0, f"not an entry: {error}") from None


def check(entry: Entry, seq: int, prev: str) -> None:
    """Whether it is what comes next. Raises `Broken`."""
    if entry.seq != seq:
        raise Broken(entry.seq, f"number {seq} is due here")
    if entry.prev != prev:
        raise Broken(entry.seq, "it doesn't follow the entry before it (or isn't this sandbox's)")
    if entry.hash != hash_of(entry):
        raise Broken(entry.seq, "it was changed: its hash is another")


def verify(lines: Iterable[bytes], sandbox_id: str | None = None) -> list[Entry]:
    """A whole chain from its first entry on. `sandbox_id` None: the one that its `create` names. Raises `Broken`."""
    entries: list[Entry] = []
    prev = None if sandbox_id is None else root_of(sandbox_id)
    for line in lines:
        if not line.strip():
            continue
        entry = parse(line)
        if prev is None:
            prev = root_of(str(entry.data.get("sandbox", "")))
        check(entry, len(entries) + 1, prev)
        entries.append(entry)
        prev = entry.hash
    return entries

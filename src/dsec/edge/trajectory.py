"""The trajectory of every sandbox of a node: which fact goes into which entry, and which key has which result.

Owns the index of keys (of a live sandbox in memory, made from its log when it is first asked for). Invariants: a
command's `exec` is written before the guest is asked, its `result` before any caller sees it, both by `write(2)`; a key
names at most one command that ran; what a caller asked for and could not be written down isn't done, and fails as
`unavailable`; what agents cause alone (connections, tripwires) is bounded. On the path of every command: some 40 us.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from dsec.edge.config import EdgeConfig
from dsec.edge.context import REQUEST_ID
from dsec.edge.recorder import Recorder, Stream, bytes_of, digest_of, env_bytes, printable
from dsec.edge.requests import HALF_KEY, hash_of
from dsec.errors import Conflict, DsecError
from dsec.journal.records import Record
from dsec.journal.trajectory import TrajectoryStore
from dsec.news import News
from dsec.ports import Clock
from dsec.spec.events import EventType
from dsec.spec.network import Network
from dsec.spec.sandbox import ExecSpec, ExecStatus
from dsec.spec.trajectory import DEEDS, INLINE_BYTES, Entry, EntryType, parse

AGENT_ENTRIES = 10_000
"""Entries of one sandbox that agents cause by what they do inside, without any operation of a caller's."""
KEYS_KEPT = 1_000_000
"""Keys of all sandboxes in memory; beyond it those of sandboxes that asked first are read from disk again."""
REUSABLE = "dsec.session/"
"""Keys of the server's own that begin so are free again once they are released: sessions."""
_OWN = frozenset(
    {
        EventType.CREATED, EventType.COMMAND_STARTED, EventType.COMMAND_ENDED, EventType.FIRST_EXEC, EventType.LIMIT,
        EventType.FILE_WRITTEN, EventType.FILE_MOVED, EventType.FILE_REMOVED, EventType.ENDING, EventType.ENDED,
        EventType.ADOPTED, EventType.NETWORK,
    }
)  # fmt: skip
"""Events whose facts have entries of their own, or are about this server and not about the sandbox."""
_AGENTS = frozenset(
    {EventType.CONNECTION, EventType.REFUSED, EventType.NAME_REFUSED, EventType.GATEWAY, EventType.TRIPWIRE}
)

log = logging.getLogger("dsec.edge")
_plain = msgspec.json.Encoder().encode


class Ship(Protocol):
    """Where logs are copied to, in a cluster."""

    def note(self, sandbox_id: str) -> None: ...
    def shipped(self, sandbox_id: str) -> asyncio.Future[None]: ...


class Recorded(Struct, frozen=True):
    """A command's result as it is on record."""

    key: str
    request: str
    status: ExecStatus
    stdout: bytes
    stderr: bytes
    stdin_bytes: int
    seq: int


class _Log:
    """One sandbox's, as far as this edge has met it."""

    __slots__ = ("agents", "blob_bytes", "deed", "keys", "news", "saved")

    def __init__(self) -> None:
        self.keys: dict[bytes, int] | None = None
        """Hash of a key -> where its `result` begins in the log; `-seq` of its `exec` while there is none."""
        self.agents = 0
        self.blob_bytes = 0
        self.deed = 0
        """The number of the last entry that may have changed its files."""
        self.saved = 0
        """Up to which entry the last snapshot of everything holds what came of them."""
        self.news = News()


class Trajectories:
    """For the event loop."""

    def __init__(self, store: TrajectoryStore, clock: Clock, config: EdgeConfig) -> None:
        self.store = store
        self.ship: Ship | None = None
        self._now = clock.now
        self._config = config
        self._logs: dict[str, _Log] = {}
        self._keys = 0
        self._closed = False

    # --- a sandbox's life ---

    def create(self, record: Record, *, again: bool = False) -> None:
        """It is about to be made. `again`: perhaps not for the first time. Raises `Unavailable`."""
        spec = msgspec.to_builtins(record.spec)
        data: dict[str, Any] = {
            "sandbox": record.id, "project": record.project, "environment": record.spec.environment,
            "layers": spec.pop("layers", []), "spec": spec, "created_at": record.created_at,
        }  # fmt: skip
        self.store.check_room()
        self.store.begin(record.id, again=again)
        if "env" in spec:  # the record has it, for as long as this log can be read here
            spec["env"] = (digest_of if self.ship is None else functools.partial(self._digest_env, record.id))(
                spec["env"]
            )
        if record.run:
            data["run"] = record.run
        if record.name is not None:
            data["name"] = record.name
        self._append(record.id, EntryType.CREATE, _with_request(data))

    def end(self, record: Record) -> None:
        """Its end is decided. Never raises."""
        try:
            chain = self.store.chain(record.id)
            if chain is not None and chain.last != EntryType.END:
                cause = record.cause
                data: dict[str, Any] = {"cause": cause, "infra": cause is not None and cause.infra}
                if record.message:
                    data["message"] = record.message
                self._append(record.id, EntryType.END, _with_request(data), last_room=True)
        except DsecError as error:
            log.warning("sandbox %s: its end is not in its trajectory: %s", record.id, error)
        found = self._logs.pop(record.id, None)
        if found is not None:
            self._keys -= len(found.keys or ())
            found.news.tell()
        self.store.forget(record.id)

    def event(self, sandbox_id: str, kind: EventType, data: dict[str, Any]) -> None:
        """Something that the event log was told of: taken over, unless it has an entry of its own. Never raises."""
        if kind in _OWN or self._closed:
            return
        if kind in _AGENTS:
            found = self._log(sandbox_id)
            found.agents += 1
            if found.agents > AGENT_ENTRIES:
                return
            if found.agents == AGENT_ENTRIES:
                self._mute(sandbox_id)
                return
        try:
            chain = self.store.chain(sandbox_id)
            if chain is not None and chain.seq and chain.last != EntryType.END:
                self._append(sandbox_id, kind, data, last_room=True)
                if kind == EventType.SNAPSHOT and data["at"] and not data["removed"]:
                    self._log(sandbox_id).saved = data["at"]
        except DsecError as error:
            log.debug("sandbox %s: %s is not in its trajectory: %s", sandbox_id, kind, error)

    def network(self, sandbox_id: str, network: Network) -> None:
        """Another policy, whole. Never raises."""
        with contextlib.suppress(DsecError):
            self._append(sandbox_id, EntryType.NETWORK, _with_request({"policy": network}), last_room=True)

    def _mute(self, sandbox_id: str) -> None:
        with contextlib.suppress(DsecError):
            self._append(sandbox_id, EntryType.MUTED, {"taken_over": AGENT_ENTRIES}, last_room=True)

    # --- commands ---

    def begins(self, sandbox_id: str, spec: ExecSpec, user: str, cwd: str, guest_key: bytes | None) -> int:
        """A command is about to be asked for; the number of its entry. Raises `Unavailable`: then it must not be."""
        store = self.store
        store.check_room()
        data: dict[str, Any] = {"argv": spec.argv, "user": user, "cwd": cwd}
        if len(spec.argv) > 1 and sum(map(len, spec.argv)) > INLINE_BYTES:
            data["argv"] = [argument[:200] for argument in spec.argv[:20]]
            data["argv_blob"] = self._blob(sandbox_id, _plain(spec.argv))
        defaults = [name for name, own in (("user", spec.user), ("cwd", spec.cwd)) if own is None]
        if defaults:
            data["defaults"] = defaults
        if spec.env:
            data["env"] = self._digest_env(sandbox_id, spec.env)
        if guest_key is not None:
            data["key"] = spec.key
            data["request"] = guest_key[HALF_KEY:].hex()
        if spec.stdin:
            data["stdin"] = True
        if spec.merge_stderr:
            data["merge_stderr"] = True
        if spec.kill_leftovers:
            data["kill_leftovers"] = True
        if spec.pty is not None:
            data["pty"] = True
        if spec.command_timeout_s is not None:
            data["command_timeout_s"] = spec.command_timeout_s
        if spec.output_bytes is not None:
            data["output_bytes"] = spec.output_bytes
        seq = self._append(sandbox_id, EntryType.EXEC, _with_request(data))
        if guest_key is not None:
            self._index(sandbox_id, guest_key[:HALF_KEY], -seq)
        return seq

    def refused(self, sandbox_id: str, seq: int, guest_key: bytes | None, error: DsecError) -> None:
        """It didn't start and never will: its key is free. Never raises."""
        if guest_key is not None:
            keys = self._log(sandbox_id).keys
            if keys is not None and keys.get(guest_key[:HALF_KEY]) == -seq:
                del keys[guest_key[:HALF_KEY]]
                self._keys -= 1
        with contextlib.suppress(DsecError):
            data = {"exec": seq, "code": error.code, "message": error.message[:1000]}
            self._append(sandbox_id, EntryType.REFUSED, data, last_room=True)

    def result(
        self, sandbox_id: str, seq: int, guest_key: bytes | None, status: ExecStatus, recorder: Recorder | None
    ) -> None:
        """A command has ended. Raises `Unavailable`: then nobody may be told, and it is tried again later."""
        chain = self.store.chain(sandbox_id)
        if chain is None or chain.last == EntryType.END:
            return  # it ends: whoever waits for the command is told that
        offset = chain.size
        data: dict[str, Any] = {"exec": seq, "status": status}
        if recorder is not None:
            data.update(recorder.entry(lambda kept: self._blob(sandbox_id, kept)))
        self._append(sandbox_id, EntryType.RESULT, data, last_room=True)
        if guest_key is not None:
            self._index(sandbox_id, guest_key[:HALF_KEY], offset)

    def restore(self, blob: Callable[[str], bytes | None], sandbox_id: str, began: Entry, result: Entry) -> None:
        """Take a command with a key, and its result, over from the log of a sandbox of whose files this one's are;
        `blob`: of its bytes. Raises `Unavailable`."""
        for name in ("argv_blob", "env"):
            self._copy_blob(blob, sandbox_id, began.data.get(name))
        for name in ("stdout", "stderr", "stdin"):
            self._copy_blob(blob, sandbox_id, result.data.get(name, {}).get("blob"))
        seq = self._append(sandbox_id, EntryType.EXEC, began.data | {"restored": began.seq})
        chain = self.store.chain(sandbox_id)
        offset = chain.size if chain is not None else 0
        self._append(sandbox_id, EntryType.RESULT, result.data | {"exec": seq, "restored": result.seq})
        self._index(sandbox_id, hash_of(began.data["key"]), offset)

    def _copy_blob(self, blob: Callable[[str], bytes | None], sandbox_id: str, digest: str | None) -> None:
        data = blob(digest) if digest else None
        if data is not None:
            self._blob(sandbox_id, data)

    def find(self, sandbox_id: str, key_hash: bytes) -> Recorded | int | None:
        """What is on record of a key: its result; the number of its `exec`, which has none; or nothing. Raises
        `Internal` where the log is damaged."""
        at = self._known(sandbox_id).get(key_hash)
        if at is None or at < 0:
            return None if at is None else -at
        _, line = next(self.store.lines(sandbox_id, at))
        return self._recorded(sandbox_id, parse(line))

    def find_ended(self, sandbox_id: str, key: str) -> Recorded | int | None:
        """The same of a sandbox that has ended."""
        try:
            return self.find(sandbox_id, hash_of(key))
        finally:
            self._drop(sandbox_id)

    def _recorded(self, sandbox_id: str, result: Entry) -> Recorded:
        began = self._entry(sandbox_id, result.data["exec"])
        status = msgspec.convert(result.data["status"], ExecStatus)
        parts = []
        missing = 0
        for name in ("stdout", "stderr"):
            stream = result.data.get(name, {})
            kept = bytes_of(stream, lambda digest: self.store.blob(sandbox_id, digest)) or b""
            missing += stream.get("bytes", 0) - len(kept)
            parts.append(kept)
        if missing:
            status = msgspec.structs.replace(status, truncated=True, dropped_bytes=status.dropped_bytes + missing)
        taken = result.data.get("stdin", {}).get("bytes", 0)
        return Recorded(
            began.data.get("key", ""), began.data.get("request", ""), status, parts[0], parts[1], taken, began.seq
        )

    def _entry(self, sandbox_id: str, seq: int) -> Entry:
        needle = b'{"seq":%d,' % seq
        return next(parse(line) for _, line in self.store.lines(sandbox_id) if line.startswith(needle))

    # --- sessions ---

    def session(self, sandbox_id: str, kind: EntryType, data: dict[str, Any], env: dict[str, str] | None) -> int:
        """An entry about a shell session; bytes in it become streams. The entry's number, 0 where the log has ended.
        Raises `Unavailable`."""
        chain = self.store.chain(sandbox_id)
        if chain is None or chain.last == EntryType.END:
            return 0
        if kind is EntryType.SESSION_RUN:
            self.store.check_room()
        described: dict[str, Any] = {}
        for name, value in data.items():
            if isinstance(value, bytes):
                stream = Stream(self._config.trajectory_output_bytes)
                stream.feed(value)
                described[name] = stream.entry(len(value) <= INLINE_BYTES, lambda kept: self._blob(sandbox_id, kept))
            elif value is not None:
                described[name] = value
        if env:
            described["env"] = self._digest_env(sandbox_id, env)
        return self._append(sandbox_id, kind, _with_request(described), last_room=kind is not EntryType.SESSION_RUN)

    # --- files ---

    def passing(self) -> Stream:
        """For the content of a file that is written."""
        self.store.check_room()
        return Stream(self._config.trajectory_output_bytes)

    def file(self, sandbox_id: str, kind: EntryType, data: dict[str, Any], content: Stream | None = None) -> None:
        """A file call has done its work. `data`: what isn't the default. Raises `Unavailable`."""
        if content is not None:
            data["bytes"], data["sha256"] = content.size, content.sha256
            blob = self._blob(sandbox_id, bytes(content.kept)) if content.size == len(content.kept) else None
            if blob is not None:
                data["blob"] = blob
        given = {name: value for name, value in data.items() if value not in (None, False)}
        self._append(sandbox_id, kind, _with_request(given), last_room=True)

    def rebuilt(self, sandbox_id: str, generation: int, entries: int, snapshots: list[str]) -> None:
        """All of another node's log has been done again here, from these `snapshots`. Raises `Unavailable`."""
        data: dict[str, Any] = {"generation": generation, "entries": entries}
        self._append(sandbox_id, EntryType.REBUILT, data | ({"snapshots": snapshots} if snapshots else {}))

    def saved(self, sandbox_id: str) -> bool:
        """Whether a snapshot, made by this edge, holds all that came of what was done to it."""
        found = self._log(sandbox_id)
        return found.deed <= found.saved != 0

    def settled(self, sandbox_id: str) -> asyncio.Future[Any]:
        """All of this log is on disk, and in the cluster where there is one. Fails with `Unavailable`."""
        synced = self.store.synced()
        return synced if self.ship is None else asyncio.gather(synced, self.ship.shipped(sandbox_id))

    # --- reading ---

    def read(self, sandbox_id: str, after: int = 0) -> Iterator[bytes]:
        """Entries above the number `after`, as lines."""
        for _, line in self.store.lines(sandbox_id):
            if not after or parse(line).seq > after:
                yield line

    async def follow(self, sandbox_id: str, after: int = 0) -> AsyncGenerator[bytes, None]:
        """The same and those to come; ends after `end`, or with this edge."""
        offset = 0
        while True:
            over = False
            for end, line in self.store.lines(sandbox_id, offset):
                offset = end
                entry = parse(line)
                over = entry.type == EntryType.END
                if entry.seq > after:
                    yield line
            chain = self.store.chain(sandbox_id)
            if over or chain is None or chain.last == EntryType.END or self._closed:
                return
            if chain.size > offset:
                continue
            found = self._log(sandbox_id)
            await found.news.wait()

    async def prune(self, before: float, keep: Any) -> None:
        """Forget the logs that were last written before a time, unless `keep` wants them."""
        try:
            await self.store.prune(before, keep)
        except OSError as error:
            log.warning("old trajectories can't be removed: %s", error)

    async def close(self) -> None:
        """Write what there is. Idempotent."""
        self._closed = True
        for found in self._logs.values():
            found.news.tell()
        await self.store.close()

    # --- inside ---

    def _append(self, sandbox_id: str, kind: str, data: dict[str, Any], *, last_room: bool = False) -> int:
        try:
            seq = self.store.append(sandbox_id, self._now(), kind, data, last_room=last_room)
        except UnicodeEncodeError:  # arguments that aren't Unicode, from a caller in process
            seq = self.store.append(sandbox_id, self._now(), kind, printable(data), last_room=last_room)
        if self.ship is not None:
            self.ship.note(sandbox_id)
        found = self._logs.get(sandbox_id)
        if kind in DEEDS:
            found = found or self._log(sandbox_id)
            found.deed = seq
        if found is not None:
            found.news.tell()
        return seq

    def _log(self, sandbox_id: str) -> _Log:
        found = self._logs.get(sandbox_id)
        if found is None:
            found = self._logs[sandbox_id] = _Log()
        return found

    def _known(self, sandbox_id: str) -> dict[bytes, int]:
        found = self._log(sandbox_id)
        if found.keys is None:
            found.keys = self._read_keys(sandbox_id)
            self._keys += len(found.keys)
            if self._keys > KEYS_KEPT:
                self._make_room(found)
        return found.keys

    def _index(self, sandbox_id: str, key_hash: bytes, at: int) -> None:
        keys = self._known(sandbox_id)
        self._keys += key_hash not in keys
        keys[key_hash] = at

    def _make_room(self, wanted: _Log) -> None:
        for found in self._logs.values():
            if found.keys and found is not wanted:
                self._keys -= len(found.keys)
                found.keys = None
                if self._keys <= KEYS_KEPT // 2:
                    return

    def _read_keys(self, sandbox_id: str) -> dict[bytes, int]:
        keys: dict[bytes, int] = {}
        chain = self.store.chain(sandbox_id)
        if chain is not None and chain.seq <= 1:
            return keys  # there is `create` alone
        began: dict[int, bytes] = {}
        at = 0
        for end, line in self.store.lines(sandbox_id):
            entry = parse(line)
            if entry.type == EntryType.EXEC and "key" in entry.data:
                began[entry.seq] = key_hash = hash_of(entry.data["key"])
                keys[key_hash] = -entry.seq
            elif entry.type in (EntryType.RESULT, EntryType.REFUSED):
                found = began.pop(entry.data["exec"], None)
                if found is not None and entry.type == EntryType.RESULT:
                    keys[found] = at
                elif found is not None:
                    keys.pop(found, None)
            at = end
        return keys

    def _drop(self, sandbox_id: str) -> None:
        found = self._logs.pop(sandbox_id, None)
        if found is not None:
            self._keys -= len(found.keys or ())
        self.store.forget(sandbox_id)

    def _digest_env(self, sandbox_id: str, env: dict[str, str]) -> str:
        """Values may be secrets: the entry has their digest, the blob that a rebuild needs stays on the node."""
        self._blob(sandbox_id, env_bytes(env))
        return digest_of(env)

    def _blob(self, sandbox_id: str, data: bytes) -> str | None:
        found = self._log(sandbox_id)
        if found.blob_bytes + len(data) > self._config.trajectory_blob_bytes:
            return None
        found.blob_bytes += len(data)
        try:
            return self.store.put_blob(sandbox_id, data)
        except DsecError as error:  # its size and digest are in the entry all the same
            log.warning("sandbox %s: output is not kept: %s", sandbox_id, error)
            return None


def check_same(recorded: Recorded, guest_key: bytes) -> None:
    """Raises `Conflict` where a key's command was a different one."""
    if recorded.request != guest_key[HALF_KEY:].hex():
        raise Conflict(
            f"the key {recorded.key!r} was used for a different command",
            remedy="A key goes with one request; use a new one.",
            key_used=True,
        )


def _with_request(data: dict[str, Any]) -> dict[str, Any]:
    request_id = REQUEST_ID.get()
    if request_id:
        data["request_id"] = request_id
    return data

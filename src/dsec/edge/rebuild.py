"""A sandbox once more: made from what its trajectory begins with, then done again what its callers did.

Owns the order: entries are done in the order in which they were written, so that commands that ran side by side do so
again; a command is waited for where its result stands. Keys are the same, so that whoever holds one finds its result in
the new sandbox too. What is compared, and what is not done again, is in docs/TRAJECTORY.md.

Where there is a snapshot that holds all that came of the entries up to one of them (`Base`), it begins there: what came
before isn't done again, but its results are on record in the new sandbox, so that no key of it runs a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, cast

import msgspec
from msgspec import Struct

from dsec.edge.client import EdgeClient, Execution
from dsec.edge.rebuild_sessions import SessionReplay
from dsec.edge.recorder import Stream, bytes_of, digest_of
from dsec.errors import Conflict, DsecError, InvalidRequest
from dsec.plan.divergence import differ
from dsec.spec.causes import Cause
from dsec.spec.events import EventType
from dsec.spec.network import Network
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, SandboxSpec
from dsec.spec.trajectory import DEEDS, Broken, Entry, EntryType, RebuildRequest, RebuildStep, Rebuilt, verify

LABEL = "dsec.rebuilt_from"
SESSION = "dsec.session/"
RESTORED = "restored"
"""In entries that were taken over from another sandbox's trajectory: their number there."""
_OPTIONS = ("cwd", "user", "stdin", "merge_stderr", "kill_leftovers", "command_timeout_s", "output_bytes", "key")
_SILENT = frozenset({EntryType.CREATE, EntryType.RESULT, EntryType.REFUSED, EntryType.END, EntryType.MUTED})

Blob = Callable[[str], bytes | None]
Restore = Callable[[str, Entry, Entry], None]
"""Puts a command and its result on record in the sandbox of an id."""


class Base(Struct, frozen=True):
    """A snapshot to begin from."""

    name: str
    layer: str
    at: int
    """The number of the last entry that it holds what came of."""


class _Stopped(Exception):
    """It was asked to stop at a difference."""


class Replay:
    """One rebuild."""

    def __init__(
        self,
        edge: EdgeClient,
        entries: list[Entry],
        request: RebuildRequest,
        *,
        blob: Blob,
        keep: int,
        restore: Restore,
        base: Base | None = None,
        in_place: bool = False,
    ) -> None:
        """`blob`: bytes of the original by digest. `keep`: of each stream, for comparing. `in_place`: it stands for the
        original, whose id and name it has."""
        self._in_place = in_place
        self._restore = restore
        self._base = base
        self._edge = edge
        self._request = request
        self._blob = blob
        self._keep = keep
        self._entries = entries if request.upto is None else entries[: request.upto]
        self._results = {entry.data["exec"]: entry for entry in self._entries if entry.type == EntryType.RESULT}
        self._running: dict[int, tuple[Execution, asyncio.Task[tuple[Stream, Stream, ExecStatus]]]] = {}
        self._box = ""
        self._names: dict[bytes, bytes] = {}
        self._first: RebuildStep | None = None
        self._differences = 0
        self._done = 0
        self._skipped: set[str] = set()
        self._sessions = SessionReplay(edge, self._entries, blob, self._compare_bytes)

    def spec(self) -> SandboxSpec:
        """The sandbox to make. Raises `Conflict` where too little is on record."""
        create = self._entries[0].data
        forks = (entry.data for entry in self._entries if entry.type == EventType.FORKED)
        parent = next((data["parent"] for data in forks if "parent" in data), None)
        if parent is not None and self._base is None:
            raise Conflict(
                f"sandbox {create['sandbox']} began with the files of {parent}, of which it was forked",
                remedy="Rebuild that one, fork it, and repeat what was done to this one; or begin from a snapshot.",
            )
        fields = dict(create["spec"])
        if not self._in_place:
            fields.pop("name", None)
            fields["labels"] = {**fields.get("labels", {}), LABEL: create["sandbox"]}
        fields["layers"] = [*([self._base.layer] if self._base else ()), *create.get("layers", [])]
        if "env" in fields:
            fields["env"] = self._first_env(create["sandbox"], fields["env"])
        return msgspec.convert(fields, SandboxSpec)

    async def run(self, make: Callable[[SandboxSpec], Awaitable[str]]) -> Rebuilt:
        """Make it and do everything again. On an error nothing is left."""
        spec = self.spec()
        original = str(self._entries[0].data["sandbox"])
        self._box = await make(spec)
        self._names = {original.encode(): b"<sandbox>", self._box.encode(): b"<sandbox>"}
        try:
            await self._begin()
            with suppress(_Stopped):
                for entry in self._entries[1:]:
                    if self._base is None or entry.seq > self._base.at:
                        await self._step(entry)
        except BaseException:
            with suppress(DsecError):
                await asyncio.shield(self._edge.delete(self._box))
            raise
        finally:
            for _, task in self._running.values():
                task.cancel()
        return Rebuilt(
            sandbox=self._edge.get(self._box),
            original=original,
            replayed=self._done,
            base=spec.environment if self._base is None else self._base.name,
            diverged=self._first,
            differences=self._differences,
            not_replayed=sorted(self._skipped),
        )

    async def _begin(self) -> None:
        """What the snapshot doesn't hold of the entries before it: results, and what it might reach in the end."""
        at = self._base.at if self._base is not None else 0
        network = None
        for entry in self._entries[:at]:
            if entry.type == EntryType.EXEC and entry.seq in self._results and "key" in entry.data:
                self._restore(self._box, entry, self._results[entry.seq])
            elif entry.type == EntryType.NETWORK:
                network = entry.data["policy"]
        if network is not None:
            await self._edge.set_network(self._box, msgspec.convert(network, Network))

    async def _step(self, entry: Entry) -> None:
        data = entry.data
        try:
            match entry.type:
                case EntryType.EXEC:
                    if not await self._exec(entry):
                        return
                case EntryType.RESULT:
                    await self._result(entry)
                    return
                case EntryType.WRITE:
                    await self._write(entry)
                case EntryType.MOVE:
                    await self._edge.move_file(
                        self._box, _path(data["path"]), _path(data["to"]), user=data.get("user"),
                        exclusive=data.get("exclusive", False),
                    )  # fmt: skip
                case EntryType.MKDIR:
                    await self._edge.make_directory(
                        self._box, _path(data["path"]), user=data.get("user"), mode=data.get("mode"),
                        parents=data.get("parents", False),
                    )  # fmt: skip
                case EntryType.REMOVE:
                    await self._edge.remove_file(
                        self._box, _path(data["path"]), user=data.get("user"), recursive=data.get("recursive", False)
                    )
                case EntryType.SESSION_OPENED:
                    await self._sessions.open(self._box, data, self._env(data["env"]) if "env" in data else {})
                case EntryType.SESSION_CLOSED:
                    await self._sessions.close(self._box, data["session"])
                case EntryType.SESSION_RUN:
                    left_out = await self._sessions.run(self._box, entry)
                    if left_out is not None:
                        self._skipped.add(left_out)
                        return
                case EntryType.SESSION_RESULT:
                    await self._sessions.result(self._box, entry, self._differs)
                    return
                case EntryType.SESSION_INPUT:
                    return
                case EntryType.NETWORK:
                    await self._edge.set_network(self._box, msgspec.convert(data["policy"], Network))
                case _:
                    if entry.type not in _SILENT:
                        self._skipped.add(entry.type)
                    return
        except DsecError as error:
            if error.infra:
                raise
            self._differs(entry.seq, "error", "", f"{error.code}: {error.message}")
        self._done += 1

    async def _exec(self, entry: Entry) -> bool:
        """Begin it; False: it isn't done again."""
        data = entry.data
        if str(data.get("key", "")).startswith(SESSION):
            if not self._sessions.recorded:
                self._skipped.add("sessions")
            return False
        if entry.seq not in self._results:
            self._skipped.add("exec without a result")
            return False
        if RESTORED in data:  # the snapshot that the original began from holds what came of it
            self._restore(self._box, entry, self._results[entry.seq])
            return False
        if data.get("pty"):
            self._skipped.add("terminals")
            return False
        argv = data["argv"]
        if "argv_blob" in data:
            argv = msgspec.json.decode(self._need(data["argv_blob"]), type=list[str])
        defaults = data.get("defaults", ())
        fields = {name: data[name] for name in _OPTIONS if name in data and name not in defaults}
        if "env" in data:
            fields["env"] = self._env(data["env"])
        execution = await self._edge.exec(self._box, ExecSpec(argv=argv, **fields))
        self._running[entry.seq] = (execution, asyncio.ensure_future(self._read(execution)))
        if data.get("stdin"):
            given = self._results[entry.seq].data.get("stdin", {"bytes": 0})
            await execution.write_stdin(self._kept(given), 0)
            await execution.close_stdin()
        return True

    async def _read(self, execution: Execution) -> tuple[Stream, Stream, ExecStatus]:
        streams = (Stream(self._keep), Stream(self._keep))
        async with aclosing(cast("AsyncGenerator[Chunk | ExecStatus]", execution.events())) as events:
            async for event in events:
                if isinstance(event, ExecStatus):
                    return *streams, event
                streams[event.stderr].feed(event.data)
        raise Conflict("a command's output ended without its status")

    async def _result(self, entry: Entry) -> None:
        running = self._running.pop(entry.data["exec"], None)
        if running is None:
            return
        execution, task = running
        was = msgspec.convert(entry.data["status"], ExecStatus)
        if was.cause is Cause.KILLED:
            await self._edge.signal(self._box, execution.key, 9, "all")
        stdout, stderr, status = await task
        if was.cause is Cause.KILLED:
            return  # when it was ended is nothing that can be done again
        seq = entry.data["exec"]
        if status.exit_code != was.exit_code:
            self._differs(seq, "exit_code", str(was.exit_code), str(status.exit_code))
        elif status.cause is not was.cause:
            self._differs(seq, "cause", was.cause, status.cause)
        for name, stream in (("stdout", stdout), ("stderr", stderr)):
            self._compare(seq, name, entry.data.get(name, {"bytes": 0}), stream)

    def _compare(self, seq: int, name: str, expected: dict[str, Any], got: Stream) -> None:
        if expected.get("holes"):
            return
        if expected.get("sha256") == got.sha256:
            return
        kept = bytes_of(expected, self._blob)
        if kept is None:
            self._differs(seq, name, expected.get("sha256", ""), got.sha256)
            return
        whole = len(kept) == expected["bytes"] and len(got.kept) == got.size
        found = differ(kept, bytes(got.kept), self._names)
        if found is None and not whole and expected["bytes"] != got.size:
            found = (f"{expected['bytes']} bytes", f"{got.size} bytes")
        if found is not None:
            self._differs(seq, name, *found)

    def _compare_bytes(self, seq: int, name: str, expected: dict[str, Any], got: bytes) -> None:
        kept = bytes_of(expected, self._blob)
        found = None if kept is None or expected["bytes"] != len(kept) else differ(kept, got, self._names)
        if found is not None:
            self._differs(seq, name, *found)

    async def _write(self, entry: Entry) -> None:
        data = entry.data
        content = self._blob(data["blob"]) if "blob" in data else None
        if content is None:
            self._differs(entry.seq, "not_kept", f"{data['bytes']} bytes of {data['path']}", "")
            return

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield content

        await self._edge.write_file(
            self._box, _path(data["path"]), pieces(), user=data.get("user"), mode=data.get("mode"),
            parents=data.get("parents", False), append=data.get("append", False),
            exclusive=data.get("exclusive", False),
        )  # fmt: skip

    def _differs(self, seq: int, what: str, expected: str, got: str) -> None:
        self._differences += 1
        if self._first is None:
            self._first = RebuildStep(seq=seq, what=what, expected=expected, got=got)
        if self._request.on_divergence == "stop":
            raise _Stopped

    def _kept(self, stream: dict[str, Any]) -> bytes:
        found = bytes_of(stream, self._blob)
        if found is None or len(found) != stream.get("bytes", 0):
            raise Conflict("what was typed into a command was too long to be kept")
        return found

    def _env(self, digest: str) -> dict[str, str]:
        return msgspec.json.decode(self._need(digest), type=dict[str, str])

    def _first_env(self, sandbox_id: str, digest: str) -> dict[str, str]:
        """The original's own, which are in its record where it was made here."""
        env = {} if self._in_place else self._edge.get(sandbox_id).spec.env
        return env if digest_of(env) == digest else self._env(digest)

    def _need(self, digest: str) -> bytes:
        found = self._blob(digest)
        if found is None:
            raise Conflict(
                f"bytes that the trajectory names are not kept: {digest}", remedy="Nothing can be rebuilt from it."
            )
        return found


def chain_of(lines: list[bytes], sandbox_id: str) -> list[Entry]:
    """The whole chain. Raises `Conflict` where it doesn't hold or is empty."""
    try:
        entries = verify(lines, sandbox_id)
    except Broken as error:
        raise Conflict(f"the trajectory of {sandbox_id} doesn't hold: {error}") from error
    if not entries or entries[0].type != EntryType.CREATE:
        raise InvalidRequest(f"sandbox {sandbox_id} has no trajectory to rebuild it from")
    return entries


def starts_of(entries: list[Entry], request: RebuildRequest) -> list[Base | None]:
    """What a rebuild may begin from, the best first: snapshots of everything that was there, taken while nothing was
    under way, the last one first; then its environment (None). One that left its node in good order has the snapshot
    that was taken for that, and nothing else: without it what nobody can do again would be lost without a word."""
    if request.from_start:
        return [None]
    wanted = entries[: request.upto]
    found = [entry.data for entry in wanted if entry.type == EventType.SNAPSHOT]
    bases = [
        Base(data["name"], data["layer"], data["at"])
        for data in reversed(found)
        if data.get("at") and not data.get("removed")
    ]
    left = bool(bases) and wanted[-1].type == EntryType.END and wanted[-1].data["cause"] == Cause.MOVED
    if left and not any(entry.type in DEEDS for entry in wanted[bases[0].at :]):
        return [bases[0]]
    return [*bases, None]


def grounds_of(entries: list[Entry]) -> list[str]:
    """Snapshots that it was made from when it was rebuilt on nodes before: its layers are known by these names."""
    return [name for entry in entries if entry.type == EntryType.REBUILT for name in entry.data.get("snapshots", ())]


def networks_of(entries: list[Entry]) -> list[Network]:
    """All that it was ever allowed to reach: whoever rebuilds it has to be able to grant that."""
    found = [entries[0].data["spec"].get("network") or {}]
    found += [entry.data.get("policy") or {} for entry in entries if entry.type == EntryType.NETWORK]
    return [msgspec.convert(each, Network) for each in found if isinstance(each, dict)]


def _path(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")

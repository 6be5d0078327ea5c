"""Watching directories: WatchDir as a stream, and watchers that are asked for their events.

Owns the watchers that were made and not yet removed. Invariants: a watcher keeps at most `MAX_EVENTS` events until it
is asked, and then says that some were lost; one that nobody asked for `FORGET_S` is removed, and so are those of a
sandbox that ended; there are at most `MAX_WATCHERS` in all.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from dsec.api.e2b import rpc
from dsec.api.e2b.call import Call
from dsec.api.e2b.errors import GONE, RpcError
from dsec.api.e2b.filesystem import Entry, FilesystemService, text_of
from dsec.api.e2b.users import Users
from dsec.edge.client import EdgeClient, FileWatch
from dsec.errors import DsecError, FileError, FileMissing, InvalidRequest, PermissionDenied
from dsec.spec.sandbox import FileEvent
from dsec.wire.connect import Code

MAX_EVENTS = 10_000
MAX_WATCHERS = 20_000
FORGET_S = 3600.0
KEEPALIVE = b'{"keepalive":{}}'
_encode = msgspec.json.Encoder().encode


class WatchRequest(Struct, rename="camel"):
    """CreateWatcher, WatchDir."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class WatcherRequest(Struct, rename="camel"):
    """GetWatcherEvents, RemoveWatcher."""

    watcher_id: str = ""


class SeenEvent(Struct, frozen=True, omit_defaults=True):
    """An event in the client's terms."""

    name: str
    type: str
    entry: Entry | None = None


class Seen(Struct, frozen=True):
    """Answer to GetWatcherEvents."""

    events: list[SeenEvent]


class _Watcher:
    """A watch that collects until it is asked."""

    __slots__ = ("asked_at", "error", "events", "lost", "sandbox_id", "task")

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.events: list[SeenEvent] = []
        self.lost = False
        self.error: DsecError | RpcError | None = None
        self.asked_at = time.monotonic()
        self.task: asyncio.Task[None] | None = None


class WatcherService:
    """Handlers by the RPC's name."""

    def __init__(self, edge: EdgeClient, users: Users, files: FilesystemService) -> None:
        self._edge = edge
        self._users = users
        self._files = files
        self._watchers: dict[str, _Watcher] = {}
        self.unary = {
            "CreateWatcher": self.create,
            "GetWatcherEvents": self.events,
            "RemoveWatcher": self.remove,
        }
        self.streams = {"WatchDir": self.watch_dir}

    async def watch_dir(self, sandbox_id: str, call: Call) -> None:
        """Stream what happens in a directory."""
        request = await rpc.single(call.x, WatchRequest)
        timeout_s = call.timeout_s()
        path, user, watch = await self._watch(sandbox_id, call, request)

        async def events() -> AsyncGenerator[dict[str, Any]]:
            try:
                yield {"start": {}}
                async for event in self._read(watch, sandbox_id, path, user, request.include_entry):
                    yield {"filesystem": event}
            finally:
                await watch.aclose()

        await rpc.stream(call, events(), _encode, keepalive=KEEPALIVE, deadline_s=timeout_s)

    async def create(self, sandbox_id: str, call: Call) -> WatcherRequest:
        """Begin to collect."""
        request = await rpc.unary(call.x, WatchRequest)
        self._forget()
        if len(self._watchers) >= MAX_WATCHERS:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"there are {MAX_WATCHERS} watchers already; stop some")
        path, user, watch = await self._watch(sandbox_id, call, request)
        watcher, watcher_id = _Watcher(sandbox_id), secrets.token_hex(8)
        watcher.task = asyncio.create_task(self._collect(watcher, watch, path, user, request.include_entry))
        self._watchers[watcher_id] = watcher
        return WatcherRequest(watcher_id)

    async def events(self, sandbox_id: str, call: Call) -> Seen:
        """What was collected since the last time."""
        watcher = self._find(sandbox_id, (await rpc.unary(call.x, WatcherRequest)).watcher_id)
        watcher.asked_at = time.monotonic()
        if watcher.lost:
            watcher.lost = False
            watcher.events.clear()
            raise RpcError(
                Code.RESOURCE_EXHAUSTED, f"more than {MAX_EVENTS} events came since the last call, and were dropped"
            )
        if watcher.error is not None and not watcher.events:
            raise watcher.error
        events, watcher.events = watcher.events, []
        return Seen(events)

    async def remove(self, sandbox_id: str, call: Call) -> dict[str, Any]:
        """Stop collecting."""
        watcher_id = (await rpc.unary(call.x, WatcherRequest)).watcher_id
        await self._stop(self._find(sandbox_id, watcher_id))
        del self._watchers[watcher_id]
        return {}

    # --- inside ---

    def _find(self, sandbox_id: str, watcher_id: str) -> _Watcher:
        watcher = self._watchers.get(watcher_id)
        if watcher is None or watcher.sandbox_id != sandbox_id:
            raise RpcError(Code.NOT_FOUND, f"watcher {watcher_id[:40]} not found")
        return watcher

    async def _watch(self, sandbox_id: str, call: Call, request: WatchRequest) -> tuple[bytes, str | None, FileWatch]:
        path, user = await self._users.path(sandbox_id, request.path, call.user())
        info = await self._edge.stat_file(sandbox_id, path, user=user, follow=True)
        if info.type != "directory":
            raise InvalidRequest(f"{request.path} is not a directory")
        return path, user, await self._edge.watch(sandbox_id, path, user=user, recursive=request.recursive)

    async def _read(
        self, watch: FileWatch, sandbox_id: str, path: bytes, user: str | None, with_entry: bool
    ) -> AsyncGenerator[SeenEvent]:
        """Events in the client's terms. Raises `RpcError` where some were lost."""
        async for event in watch:
            for name, kind in _client_events(event):
                entry = None
                if with_entry:
                    with suppress(FileMissing, FileError, PermissionDenied):
                        entry = await self._files.entry(sandbox_id, posixpath.join(path, os.fsencode(name)), user)
                yield SeenEvent(text_of(os.fsencode(name)), kind, entry)

    async def _collect(
        self, watcher: _Watcher, watch: FileWatch, path: bytes, user: str | None, with_entry: bool
    ) -> None:
        try:
            async for event in self._read(watch, watcher.sandbox_id, path, user, with_entry):
                if len(watcher.events) >= MAX_EVENTS:
                    watcher.lost = True
                    watcher.events.clear()
                watcher.events.append(event)
        except (DsecError, RpcError) as error:
            watcher.error = error
        finally:
            await watch.aclose()

    async def _stop(self, watcher: _Watcher) -> None:
        if watcher.task is not None:
            watcher.task.cancel()
            await asyncio.wait([watcher.task])

    def _forget(self) -> None:
        """Drop watchers whose sandbox is gone or whom nobody asked for long."""
        now = time.monotonic()
        for watcher_id, watcher in list(self._watchers.items()):
            if now - watcher.asked_at > FORGET_S or isinstance(watcher.error, GONE):
                if watcher.task is not None:
                    watcher.task.cancel()
                del self._watchers[watcher_id]


_KINDS = {
    "create": "EVENT_TYPE_CREATE",
    "write": "EVENT_TYPE_WRITE",
    "remove": "EVENT_TYPE_REMOVE",
    "rename": "EVENT_TYPE_RENAME",
    "chmod": "EVENT_TYPE_CHMOD",
}


def _client_events(event: FileEvent) -> list[tuple[str, str]]:
    """Name and type as the client knows them: a rename is told at its old name, and created at its new one. Raises
    `RpcError` where events were lost: the client has no event for that."""
    if event.kind == "overflow":
        raise RpcError(Code.DATA_LOSS, "events were lost: too many at once; list the directory and watch again")
    if event.kind == "rename" and event.from_path is not None:
        return [(event.from_path, _KINDS["rename"]), (event.path, _KINDS["create"])]
    return [(event.path, _KINDS[event.kind])]

"""The filler's control socket: JSON, a line a message. Calls `{"id", "call", "layer"?}` are answered, each when it is
done, with `{"id", "ok": {...}}` or `{"id", "error": ErrorBody}`; whoever is connected also hears
`{"failed": layer, "message"}` when reads of a layer fail.

| call | answer |
|---|---|
| `attach` | the layer's metadata is here and its data may be read: `{"metadata_bytes", "data_bytes", "complete"}` |
| `release` | nothing is mounted of it: its directory may be evicted |
| `complete` | returns when all of the layer is here |
| `stop` | it ends (without a holder, whose end is its own) |
| `status` | bytes by layer, and counts of reads |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from dsec.errors import DsecError, Internal

log = logging.getLogger(__name__)


class Control:
    """The connections, and what they have to hear."""

    def __init__(self, call: Callable[[str, str], Awaitable[dict[str, Any]]]) -> None:
        """`call`: carries a call out; raises DsecError, or OSError of the cache."""
        self._carry_out = call
        self._listeners: set[asyncio.StreamWriter] = set()
        self._unheard: deque[dict[str, Any]] = deque(maxlen=1000)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, path: Path) -> asyncio.Server:
        """Listen for the server's calls."""
        await asyncio.to_thread(path.unlink, missing_ok=True)
        old = os.umask(0o077)
        try:
            return await asyncio.start_unix_server(self._connected, path, limit=1 << 16)
        finally:
            os.umask(old)

    def push(self, event: dict[str, Any]) -> None:
        """Tell who is connected, or the next who is."""
        if not self._listeners:
            self._unheard.append(event)
        for writer in self._listeners:
            writer.write(msgspec.json.encode(event) + b"\n")

    async def close(self) -> None:
        """No call goes on when it returns."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listeners.add(writer)
        while self._unheard:
            self.push(self._unheard.popleft())
        try:
            while line := await reader.readline():
                task = asyncio.create_task(self._answer(msgspec.json.decode(line, type=dict[str, Any]), writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (ConnectionError, msgspec.MsgspecError, ValueError) as error:
            log.warning("control connection: %r", error)
        except asyncio.CancelledError:  # the filler ends; a cancelled handler is a traceback of asyncio's in the log
            pass
        finally:
            self._listeners.discard(writer)
            writer.close()

    async def _answer(self, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any]
        name, layer = str(call.get("call")), str(call.get("layer", ""))
        try:
            answer = {"ok": await self._carry_out(name, layer)}
        except DsecError as error:
            answer = {"error": error.body()}
        except OSError as error:
            answer = {"error": Internal(f"the cache of lazy layers: {error}").body()}
        except Exception as error:  # a bug: who called waits for an answer all the same, and a layer's lock with it
            log.exception("call %s of layer %s failed", name, layer)
            what = f"the filler's call {name!r} failed: {type(error).__name__}: {error}"
            answer = {"error": Internal(what, remedy="Report this together with the server's log.").body()}
        writer.write(msgspec.json.encode({"id": call.get("id"), **answer}) + b"\n")

"""Full machines from outside: screen, keys and mouse, serial console, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from dsec.errors import RequestTimeout
from dsec.sdk._transport import Transport, timed_out
from dsec.spec.sandbox import SandboxInfo
from dsec.spec.screen import Checkpoint, ConsolePiece, Input

_JSON = {"Content-Type": "application/json"}
_WAIT_S = 20.0
T = TypeVar("T")


class _Listed(Struct, frozen=True):
    checkpoints: list[Checkpoint]


class Screen:
    """What `AsyncSandbox.screenshot` and the like are made of."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}"

    async def picture(self, request_timeout_s: float | None) -> bytes:
        """A PNG."""
        url = self._transport.url(f"{self._path}/screen")
        try:
            async with asyncio.timeout(request_timeout_s):
                return await (await self._transport.send("GET", url)).read()
        except TimeoutError:
            raise timed_out(request_timeout_s or 0.0) from None

    async def send(self, inputs: Sequence[Input], request_timeout_s: float | None) -> None:
        """Not repeated where the connection breaks: what was typed twice is typed twice."""
        await self._transport.call(
            "POST",
            self._transport.url(f"{self._path}/input"),
            type(None),
            body=msgspec.json.encode({"inputs": list(inputs)}),
            headers=_JSON,
            replay=False,
            request_timeout_s=request_timeout_s,
        )


class AsyncConsole:
    """A full machine's serial console; `sandbox.console`. Calls raise `Unsupported` where a sandbox has none,
    `SandboxNotFound`, `SandboxEnded`, `Unavailable`, and `RequestTimeout` after `request_timeout_s`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        """Not for callers: use `sandbox.console`."""
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/console"

    async def read(
        self, after: int = -1, *, wait_s: float = 0.0, request_timeout_s: float | None = None
    ) -> ConsolePiece:
        """What was printed from the offset `after` on (-1: all that the server kept, 256 KiB at most). `wait_s`: wait
        so long, 60 s at most, for a first byte. What was printed while no server was there is lost."""
        url = self._transport.url(self._path, after=after, wait_s=wait_s)
        return await self._transport.call("GET", url, ConsolePiece, request_timeout_s=request_timeout_s)

    async def write(self, data: str | bytes, *, request_timeout_s: float | None = None) -> None:
        """Type on it. Not repeated where the connection breaks (`OutcomeUnknown`)."""
        typed = data.encode() if isinstance(data, str) else data
        await self._transport.call(
            "POST",
            self._transport.url(self._path),
            type(None),
            body=msgspec.json.encode({"data": typed}),
            headers=_JSON,
            replay=False,
            request_timeout_s=request_timeout_s,
        )

    async def wait_for(self, text: str, *, after: int = -1, timeout_s: float = 60.0) -> str:
        """All that was printed from `after` on once it holds `text`. Raises `RequestTimeout` where that takes longer
        than `timeout_s`, with the last of it."""
        printed = b""
        try:
            async with asyncio.timeout(timeout_s):
                while text.encode() not in printed:
                    piece = await self.read(after, wait_s=_WAIT_S)
                    printed, after = printed + piece.data, piece.offset + len(piece.data)
        except TimeoutError:
            last = printed.decode(errors="replace")[-500:]
            raise RequestTimeout(
                f"the console didn't print {text!r} within {timeout_s:g} s; its last: {last!r}"
            ) from None
        return printed.decode(errors="replace")


class AsyncCheckpoints:
    """What a full machine can go back to; `sandbox.checkpoints`. Calls raise `Unsupported` where a sandbox can't,
    `SandboxNotFound`, `SandboxEnded`, `Unavailable`, and `RequestTimeout` after `request_timeout_s`. They need an API
    key."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        """Not for callers: use `sandbox.checkpoints`."""
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/checkpoints"

    async def create(self, name: str, *, request_timeout_s: float | None = None) -> Checkpoint:
        """Keep memory, devices and disk as they are now; the machine stands still for some tens of milliseconds. They
        end with the sandbox, and with the server. Raises `Conflict` where the name is taken, `QuotaExceeded`."""
        return await self._ask("POST", "", Checkpoint, {"name": name}, request_timeout_s)

    async def all(self, *, request_timeout_s: float | None = None) -> list[Checkpoint]:
        """In the order in which they were made."""
        return (await self._ask("GET", "", _Listed, None, request_timeout_s)).checkpoints

    async def delete(self, name: str, *, request_timeout_s: float | None = None) -> None:
        """Raises `NotFound`."""
        await self._ask("DELETE", f"/{name}", type(None), None, request_timeout_s)

    async def revert(self, name: str, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Go back: what happened inside since then is undone, commands that ran then go on. Raises `NotFound`."""
        return await self._ask("POST", f"/{name}/revert", SandboxInfo, None, request_timeout_s)

    async def _ask(self, method: str, path: str, kind: type[T], body: Any, request_timeout_s: float | None) -> T:
        return await self._transport.call(
            method,
            self._transport.url(self._path + path),
            kind,
            body=None if body is None else msgspec.json.encode(body),
            headers=None if body is None else _JSON,
            replay=method != "POST",
            request_timeout_s=request_timeout_s,
        )

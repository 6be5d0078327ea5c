"""A client for an HTTP/1.1 server on a unix socket that speaks JSON, one request at a time: Firecracker's API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from dsec.errors import Unavailable

MOST_BODY = 1 << 20
_ANSWER_S = 60.0


class UnixHttp:
    """One connection. All calls raise `Unavailable` where the server is gone, refuses, or talks nonsense."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path) -> UnixHttp:
        """Connect."""
        try:
            return cls(*await asyncio.open_unix_connection(str(path)))
        except OSError as error:
            raise Unavailable(f"the VMM's API can't be reached: {error}") from None

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's content; None where it has none."""
        content = b"" if body is None else msgspec.json.encode(body)
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Accept: application/json"]
        if content:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        async with self._turn:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
                    await self._writer.drain()
                    status, found = await self._answer()
            except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError) as error:
                self.close()  # what comes next would be this request's answer
                raise Unavailable(f"the VMM did not answer {method} {path}: {error or type(error).__name__}") from None
            except asyncio.CancelledError:
                self.close()
                raise
        if status >= 300:
            why = found.get("fault_message", found) if isinstance(found, dict) else found
            raise Unavailable(f"the VMM refused {method} {path} ({status}): {str(why)[:500]}")
        return found

    async def _answer(self) -> tuple[int, Any]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int([*head[0].split(" "), ""][1])
        size = 0
        for line in head[1:]:
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-length":
                size = int(value)
        if not 0 <= size <= MOST_BODY:
            raise ValueError(f"an answer of {size} bytes")
        body = await self._reader.readexactly(size)
        return status, msgspec.json.decode(body) if body else None

    def close(self) -> None:
        """Idempotent."""
        self._writer.close()

"""A sandbox's event log and its trajectory, read line by line over as many connections as it takes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import TypeVar

from dsec.sdk._answers import cut_errors, decoded
from dsec.sdk._transport import Retry, Transport
from dsec.spec.events import EventType, SandboxEvent
from dsec.spec.trajectory import Entry, EntryType

Line = TypeVar("Line", SandboxEvent, Entry)


def follow_events(transport: Transport, path: str, after: int, follow: bool) -> AsyncGenerator[SandboxEvent, None]:
    """Events above the number `after`, each once. `follow`: until the last one has come."""
    return _lines(transport, path, after, follow, (SandboxEvent, EventType.ENDED))


def follow_trajectory(transport: Transport, path: str, after: int, follow: bool) -> AsyncGenerator[Entry, None]:
    """The same of the entries of a trajectory."""
    return _lines(transport, path, after, follow, (Entry, EntryType.END))


async def _lines(
    transport: Transport, path: str, after: int, follow: bool, what: tuple[type[Line], str]
) -> AsyncGenerator[Line, None]:
    kind, last = what
    retry = Retry(transport)
    while True:
        url = transport.url(path, after=after or None, follow=follow or None)
        response = await transport.open("GET", url, retry=retry)
        began = time.monotonic()
        cut: BaseException = ConnectionResetError("the answer was cut")
        whole = False
        rest = b""
        try:
            while not whole:
                try:
                    data = await response.content.readany()
                except cut_errors() as error:
                    cut = error
                    break
                whole = not data
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = decoded(line, kind)
                    after = event.seq
                    retry = Retry(transport)
                    yield event
                    if event.type == last:
                        return
        finally:
            response.close()
        if whole and not follow:
            return
        # A server that stops ends the answer too: go on with the next one.
        await retry.wait(cut, stood_s=time.monotonic() - began)

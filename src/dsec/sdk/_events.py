"""A sandbox's event log, read line by line over as many connections as it takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from dsec.sdk._transport import Retry, Transport, cut_errors, decoded
from dsec.spec.events import EventType, SandboxEvent


async def follow_events(
    transport: Transport, path: str, after: int, follow: bool
) -> AsyncGenerator[SandboxEvent, None]:
    """Events above the number `after`, each once. `follow`: until the last one has come."""
    retry = Retry(transport)
    while True:
        url = transport.url(path, after=after or None, follow=follow or None)
        response = await transport.open("GET", url, retry=retry)
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
                    event = decoded(line, SandboxEvent)
                    after = event.seq
                    retry = Retry(transport)
                    yield event
                    if event.type == EventType.ENDED:
                        return
        finally:
            response.close()
        if whole and not follow:
            return
        await retry.wait(cut)  # a server that stops ends the answer too: go on with the next one

"""The edge's end of what a machine's guest tells of its programs, from `start` to `stop`.

The guest is hostile, and so is whatever it says; that it says nothing proves nothing. Invariants: a turn of the event
loop takes a bounded number of records; a record that no guest may send ends the operation; an operation that somebody
inside has ended is begun again, ever more slowly, and each time that is told; after `stop` no task or operation of this
is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from dsec.errors import DsecError, Unavailable, Unsupported
from dsec.ports import GuestChannel, Operation
from dsec.spec.operations import EndKind, Kind, OpEnd, OpRequest, Stage
from dsec.wire.frames import ProtocolError
from dsec.wire.looks import Look, LookDecoder, LookKind

Seen = Callable[[Look | str], None]
"""A record; or why something may have been missed."""

READY_S = 20.0
RECORDS_A_TURN = 64
PAUSE_S = 0.005
_AGAIN_S = (0.1, 30.0)
"""Before it is begun again: at first, and at most."""
_GOOD_S = 60.0
"""After so long it is at first again."""

log = logging.getLogger(__name__)


class MachineLook:
    """One machine's."""

    def __init__(self, sandbox_id: str, channel: GuestChannel, wanted: Sequence[bytes], seen: Seen) -> None:
        """`wanted`: as native/common/wire.h has it."""
        self._sandbox_id = sandbox_id
        self._channel = channel
        self._request = OpRequest(kind=Kind.LOOK, argv=tuple(wanted))
        self._seen = seen
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on, as soon as the guest does."""
        self._task = asyncio.create_task(self._serve(), name=f"lookout of {self._sandbox_id}")

    async def ready(self) -> None:
        """Wait until it does. Raises `Unsupported` where its kernel can't, `Unavailable` where it says nothing."""
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise Unavailable("the machine's guest tells nothing of its programs") from None

    def stop(self) -> None:
        """Let go of it; its operation is released. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if not self._ready.done():
            self._ready.cancel()

    async def _serve(self) -> None:
        loop, wait_s = asyncio.get_running_loop(), _AGAIN_S[0]
        while True:
            began = loop.time()
            operation: Operation | None = None
            try:
                operation = await self._channel.start(self._request)
                why = await self._listen(operation)
            except DsecError as error:  # the channel is gone, or there is no guest of ours
                self._failed(error)
                return
            except ProtocolError as error:
                why = str(error)
            finally:
                if operation is not None:
                    await operation.release()
            if not self._ready.done():
                self._failed(Unsupported(f"of this machine's programs nothing can be told: {why}", field="tripwires"))
                return
            log.info("sandbox %s: what tells of its programs ended inside: %s", self._sandbox_id, why)
            self._seen(f"what looks out inside was ended ({why}); it is begun again")
            wait_s = _AGAIN_S[0] if loop.time() - began > _GOOD_S else wait_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _AGAIN_S[1])

    def _failed(self, error: DsecError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps nobody waits

    async def _listen(self, operation: Operation) -> str:
        """Until the guest's side ends: why."""
        decoder, taken = LookDecoder(), 0
        async for item in operation.read():
            if isinstance(item, OpEnd):
                return _why(item)
            if item.stderr:
                continue
            for record in decoder.feed(item.data):
                self._take(record)
                taken += 1
                if taken % RECORDS_A_TURN == 0:
                    await asyncio.sleep(PAUSE_S)
        return "it said no more"

    def _take(self, record: Look) -> None:
        if record.kind is LookKind.READY:
            if not self._ready.done():
                self._ready.set_result(None)
        elif record.kind is LookKind.LOST:
            self._seen("more happened inside than could be told")
        else:
            self._seen(record)


def _why(end: OpEnd) -> str:
    if end.kind is EndKind.START_FAILED and end.stage is Stage.LOOK:
        return f"{end.message}; it takes fanotify of Linux 5.17 or later"
    return end.message or f"{end.kind.name.lower()} {end.code}"

"""The edge's end of what a machine's guest tells of its programs, from `start` to `stop`.

The guest is hostile, and so is whatever it says; that it says nothing proves nothing. Invariants: a turn of the event
loop takes a bounded number of records; a record that no guest may send ends the operation; one that somebody inside has
ended is begun again (`standing.py`), and each time that is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dsec.errors import Unsupported
from dsec.ports import GuestChannel, Operation
from dsec.spec.operations import Kind, OpRequest, Stage
from dsec.vmm.standing import Pace, Standing, Terms
from dsec.wire.looks import Look, LookDecoder, LookKind

Seen = Callable[[Look | str], None]
"""A record; or why something may have been missed."""

RECORDS_A_TURN = 64
PAUSE_S = 0.005
TERMS = Terms(
    what="what tells of its programs",
    stage=Stage.LOOK,
    takes="fanotify of Linux 5.17 or later",
    silent="tell of its programs",
    refused=lambda why: Unsupported(f"of this machine's programs nothing can be told: {why}", field="tripwires"),
    pace=Pace(first_s=0.1, most_s=30.0, good_s=60.0),
)


class MachineLook:
    """One machine's."""

    def __init__(self, sandbox_id: str, channel: GuestChannel, wanted: Sequence[bytes], seen: Seen) -> None:
        """`wanted`: as native/common/wire.h has it."""
        self._seen = seen
        self._decoder = LookDecoder()
        self._taken = 0
        request = OpRequest(kind=Kind.LOOK, argv=tuple(wanted))
        self._standing = Standing(sandbox_id, channel, request, self, TERMS)

    def start(self) -> None:
        """From now on, as soon as the guest does."""
        self._standing.start(lambda why: self._seen(f"what looks out inside was ended ({why}); it is begun again"))

    async def ready(self) -> None:
        """Wait until it does. Raises `Unsupported` where its kernel can't, `Unavailable` where it says nothing."""
        await self._standing.ready()

    def stop(self) -> None:
        """Let go of it; its operation is released. Idempotent."""
        self._standing.stop()

    def begin(self, _operation: Operation) -> None:
        """As in `standing.Listener`."""
        self._decoder = LookDecoder()

    async def hear(self, data: bytes) -> None:
        """As in `standing.Listener`."""
        for record in self._decoder.feed(data):
            self._take(record)
            self._taken += 1
            if self._taken % RECORDS_A_TURN == 0:
                await asyncio.sleep(PAUSE_S)

    def over(self) -> None:
        """As in `standing.Listener`: nothing is held for it."""

    def _take(self, record: Look) -> None:
        if record.kind is LookKind.READY:
            self._standing.note_ready()
        elif record.kind is LookKind.LOST:
            self._seen("more happened inside than could be told")
        else:
            self._seen(record)

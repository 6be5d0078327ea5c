"""The edge's end of a machine's way out: flows of its channel, turned into connections for whoever serves them.

A machine has no network card. Its guest tells, by records on one operation (native/common/wire.h, WAYS OUT), what its
programs connect to and ask; each connection becomes one end of a socket pair for `connected`, as an accepted one of a
container's. Nothing here connects to anything.

The guest is hostile, and whatever it says is a wish. Invariants: flows, bytes held for each and bytes queued for the
guest are bounded; while too much is queued nothing more is heard; a turn of the event loop takes a bounded number of
wishes; a record that no guest may send ends all flows of this machine and nothing else, and the operation is begun
again (`standing.py`); after `stop` no socket, task or operation of this is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from dsec.errors import DsecError, Unsupported
from dsec.ports import GuestChannel, Operation
from dsec.spec.operations import Kind, OpRequest, Stage
from dsec.vmm.flow import Connected, Flow
from dsec.vmm.standing import READY_S, Pace, Standing, Terms
from dsec.wire.flows import MAX_FLOWS, FlowDecoder, FlowKind, FlowRecord, encode
from dsec.wire.frames import MAX_DATA, ProtocolError

Query = Callable[[bytes], bytes | asyncio.Future[bytes] | None]
"""The answer, now or later (its maker bounds how many wait); None: silence."""

WISHES_A_TURN = 32
PAUSE_S = 0.005
"""After so many connections and queries that a guest wishes for: it pays nothing for them, the node does."""
QUEUE_HIGH = 128 << 10
"""Bytes for the guest that wait here; above, nothing more is heard or read for it."""
OPEN_FILES = MAX_FLOWS + 64
TERMS = Terms(
    what="its way out",
    stage=Stage.WAY_OUT,
    takes="nf_tables with tproxy and socket",
    silent="lead its programs out",
    refused=lambda why: Unsupported(
        f"this machine can't be given a network: {why}",
        remedy="Import its kernel again (`dsec kernel import`), or give the disk its kernel's modules.",
        field="network",
    ),
    pace=Pace(first_s=0.1, most_s=10.0, good_s=2.0),
)

log = logging.getLogger(__name__)


class MachineNetwork:
    """One machine's, from `start` to `stop`."""

    def __init__(self, sandbox_id: str, channel: GuestChannel, connected: Connected, query: Query) -> None:
        self._sandbox_id = sandbox_id
        self._flows: dict[int, Flow] = {}
        self._last = 0
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._thirsty: set[Flow] = set()
        """Those that have something for the guest, but there is too much in the queue."""
        self._decoder = FlowDecoder()
        self._writing: asyncio.Task[None] | None = None
        self._wishes = 0
        self._operations = 0
        """How many there were: an answer that comes late is for the one that asked."""
        request = OpRequest(kind=Kind.WAY_OUT, open_files=OPEN_FILES)
        self._standing = Standing(sandbox_id, channel, request, self, TERMS)
        self.set_callbacks(connected, query)

    def set_callbacks(self, connected: Connected, query: Query) -> None:
        """Whom to tell from now on."""
        self._connected = connected
        self._query = query

    def start(self) -> None:
        """From now on programs inside can connect, as soon as the guest leads them here."""
        self._standing.start()

    async def ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it does. Raises `Unsupported` where its kernel can't, `Unavailable` where it says nothing."""
        await self._standing.ready(timeout_s)

    def stop(self) -> None:
        """Let go of everything; its operation is released. Idempotent."""
        self._standing.stop()
        self.over()

    @property
    def flows(self) -> int:
        """Connections now."""
        return len(self._flows)

    # --- the operation ---

    def begin(self, operation: Operation) -> None:
        """As in `standing.Listener`."""
        self._decoder = FlowDecoder()
        self._writing = asyncio.create_task(self._write(operation))

    async def hear(self, data: bytes) -> None:
        """As in `standing.Listener`."""
        for record in self._decoder.feed(data):
            self._take(record)
            if self._wishes >= WISHES_A_TURN:
                self._wishes = 0
                await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(0)
        await self._room.wait()

    def over(self) -> None:
        """As in `standing.Listener`: all flows are reset."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        self._operations += 1
        for flow in list(self._flows.values()):
            flow.cut()
        self._last = self._queued = 0
        self._queue.clear()
        self._thirsty.clear()
        self._some.clear()
        self._room.set()

    async def _write(self, operation: Operation) -> None:
        while True:
            await self._some.wait()
            data = self._next()
            with contextlib.suppress(DsecError):  # whoever reads hears of it too
                await operation.write(data)

    def _next(self) -> bytes:
        """Some of what is queued for the guest."""
        parts: list[bytes] = []
        size = 0
        while self._queue and size < MAX_DATA:
            parts.append(self._queue.popleft())
            size += len(parts[-1])
        self._queued -= size
        if not self._queue:
            self._some.clear()
        if self._queued < QUEUE_HIGH:
            self._room.set()
            thirsty, self._thirsty = self._thirsty, set()
            for flow in thirsty:
                flow.read_on()
        return b"".join(parts)

    # --- for the flows ---

    def say(self, record: bytes) -> None:
        """To the guest, when it has room."""
        self._queue.append(record)
        self._queued += len(record)
        self._some.set()
        if self._queued >= QUEUE_HIGH:
            self._room.clear()

    def has_room(self, flow: Flow) -> bool:
        """Whether a flow may read more for the guest; else it is told later."""
        if self._queued < QUEUE_HIGH:
            return True
        self._thirsty.add(flow)
        return False

    def gone(self, flow: Flow) -> None:
        """Nothing is left of it."""
        self._flows.pop(flow.id, None)
        self._thirsty.discard(flow)

    # --- what the guest says ---

    def _take(self, record: FlowRecord) -> None:
        """Raises `ProtocolError`."""
        kind = record.kind
        if kind is FlowKind.READY:
            self._standing.note_ready()
        elif kind is FlowKind.QUERY:
            self._answer(record)
        elif kind is FlowKind.OPEN:
            self._open(record)
        elif record.flow > self._last:
            raise ProtocolError("a record of a flow that wasn't opened")
        elif (flow := self._flows.get(record.flow)) is not None:
            match kind:
                case FlowKind.DATA:
                    flow.give(record.data)
                case FlowKind.CREDIT:
                    flow.credit(record.number)
                case FlowKind.END:
                    flow.end()
                case _:
                    flow.cut()

    def _answer(self, record: FlowRecord) -> None:
        self._wishes += 1
        try:
            answer = self._query(record.data)
        except Exception:
            log.exception("sandbox %s: a query was dropped", self._sandbox_id)
            return
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(partial(self._answer_late, self._operations, record.flow))
        elif answer is not None:
            self.say(encode(FlowKind.ANSWER, record.flow, answer))

    def _answer_late(self, operation: int, flow: int, answer: asyncio.Future[bytes]) -> None:
        if operation == self._operations and not answer.cancelled() and answer.exception() is None:
            self.say(encode(FlowKind.ANSWER, flow, answer.result()))

    def _open(self, record: FlowRecord) -> None:
        self._wishes += 1
        if record.flow <= self._last:
            raise ProtocolError("a flow was opened twice")
        self._last = record.flow
        if len(self._flows) >= MAX_FLOWS:
            self.say(encode(FlowKind.RESET, record.flow))
            return
        try:
            flow = Flow(self, record.flow)
        except OSError as error:
            log.warning("sandbox %s: a connection was refused: %s", self._sandbox_id, error)
            self.say(encode(FlowKind.RESET, record.flow))
            return
        self._flows[flow.id] = flow
        try:
            flow.hand_over(self._connected, record.address, record.number)
        except Exception:
            log.exception("sandbox %s: a connection was dropped", self._sandbox_id)
            flow.fail()

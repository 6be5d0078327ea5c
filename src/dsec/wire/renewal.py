"""A session that goes on over another connection: the one before was cut with nothing of ours under way, and both sides
are still there.

What the guest had said and we didn't hear it says again, as at any resync; operations, their offsets and what they were
told stay. The guest is as hostile as ever: what it says then has to agree with what it said before.
"""

from __future__ import annotations

from dsec.wire import messages
from dsec.wire.frames import MAX_OPS, PROTOCOL_VERSION, WINDOW, Frame, FrameType, ProtocolError, encode
from dsec.wire.messages import OpState
from dsec.wire.session import HELLO, WELCOME, Event, Op, Phase, Session, Started

_REPEATED = frozenset((FrameType.OUT, FrameType.STARTED, FrameType.EXIT))


class RenewableSession(Session):
    """As `Session`."""

    _renewing = False
    _listed: frozenset[int] = frozenset()
    _over: frozenset[int] = frozenset()
    """Those that had ended before: their guest says so once more."""

    def renew(self, incarnation: int) -> bytes:
        """HELLO once more. Until the answer is complete nothing may be started; whatever else is to be sent comes
        after it."""
        if self._phase is not Phase.LIVE:
            raise RuntimeError("the channel is not live")
        self._phase, self.incarnation = Phase.GREETED, incarnation
        self._renewing, self._listed, self._keys = True, frozenset(), set()
        self._over = frozenset(op for op, state in self._ops.items() if state.phase is Phase.ENDED)
        return encode(FrameType.HELLO, 0, HELLO.pack(PROTOCOL_VERSION, 0, 0, incarnation))

    def _receive_channel(self, frame: Frame) -> Event | None:
        done = super()._receive_channel(frame)
        if self._renewing and frame.type is FrameType.SYNCED:
            lost = {op for op, state in self._ops.items() if not state.refused} - self._listed
            if lost:
                raise ProtocolError(f"the guest doesn't know operation {min(lost)} any more")
            self._renewing, self._synced_ops = False, self._synced_ops | self._listed
        return done

    def _welcome(self, payload: bytes) -> None:
        if not self._renewing:
            super()._welcome(payload)
            return
        version, zero, count, incarnation, highest = WELCOME.unpack(payload)
        if version != PROTOCOL_VERSION or zero or incarnation != self.incarnation:
            raise ProtocolError("WELCOME answers another HELLO")
        if count > MAX_OPS or highest >= self._next:
            raise ProtocolError("WELCOME with absurd counts")
        self._expected = count

    def _opstate(self, frame: Frame) -> Event | None:
        if not self._renewing:
            return super()._opstate(frame)
        if not self._expected:
            raise ProtocolError("more operations than WELCOME said")
        self._expected -= 1
        found = messages.decode_opstate(frame.payload)
        if not 0 < frame.op < self._next or frame.op in self._listed:
            raise ProtocolError(f"operation {frame.op} is above the highest, or there twice")
        self._listed |= {frame.op}
        op = self._ops.get(frame.op)
        if op is None:
            return None  # released meanwhile: that waits to be sent
        _check(frame.op, op, found)
        op.stdin_acked = found.stdin_offset
        if op.phase is Phase.STARTING and found.pid:
            op.phase, op.pid, op.resumed = Phase.RUNNING, found.pid, True
            return Started(frame.op, found.pid)
        op.resumed = op.phase is Phase.RUNNING
        return None

    def _receive_op(self, frame: Frame) -> Event | None:
        if frame.op in self._over and frame.type in _REPEATED and self._phase is Phase.LIVE:
            return None
        return super()._receive_op(frame)


def _check(number: int, op: Op, found: OpState) -> None:
    bases, ends = (found.stdout_base, found.stderr_base), (found.stdout_end, found.stderr_end)
    streams = zip(bases, op.acked, op.ends, ends, strict=True)
    good = all(base <= acked <= had <= end for base, acked, had, end in streams)
    good = good and sum(ends) - sum(bases) <= WINDOW and (not found.pid or op.pid in (0, found.pid))
    if not good or not op.stdin_acked <= found.stdin_offset <= op.stdin_sent:
        raise ProtocolError(f"operation {number} is another than it was")

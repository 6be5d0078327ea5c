"""Connect RPCs over an exchange: bodies in, messages out, errors by code, keep-alives on streams that stand still.

Invariants: a stream's answer ends with its last envelope or is cut; a client that goes away ends its stream, not what
the stream told of; what is sent together within a moment leaves as one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec

from dsec.api.e2b.call import Call
from dsec.api.e2b.errors import RpcError, rpc_error
from dsec.api.exchange import Exchange
from dsec.api.held import HOLD_S, HeldAnswer
from dsec.errors import DsecError, InvalidRequest
from dsec.wire.connect import STREAM_TYPE, Code, Decoder, encode, encode_end
from dsec.wire.frames import ProtocolError

T = TypeVar("T")
E = TypeVar("E")
MEDIA = STREAM_TYPE.encode()
_UNARY = b"application/json"
_encode_json = msgspec.json.Encoder().encode


def decode(data: bytes, kind: type[T]) -> T:
    """A message from JSON. Raises `InvalidRequest`."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the message is not JSON: {error}") from None


async def unary(x: Exchange, kind: type[T]) -> T:
    """The message of a unary call. Raises `InvalidRequest`, `RpcError`."""
    if x.content_type != _UNARY:
        raise RpcError(Code.INVALID_ARGUMENT, "unary calls are application/json here")
    return decode(await x.body(), kind)


async def single(x: Exchange, kind: type[T]) -> T:
    """The one message of a server-streaming call. Raises `InvalidRequest`, `RpcError`."""
    async with aclosing(messages(x)) as items:
        async for payload in items:
            async for _ in items:
                raise InvalidRequest("one message was expected, and several came")
            return decode(payload, kind)
    raise InvalidRequest("the body holds no message")


async def messages(x: Exchange) -> AsyncGenerator[bytes]:
    """The messages of a client-streaming call. Raises `InvalidRequest`, `RpcError`."""
    if x.content_type != MEDIA:
        raise RpcError(Code.INVALID_ARGUMENT, f"streams are {STREAM_TYPE} here")
    decoder = Decoder()
    try:
        async for data in x.chunks():
            for payload in decoder.feed(data):
                yield payload
        decoder.end()
    except ProtocolError as error:
        raise InvalidRequest(f"bad envelopes: {error}") from None


async def stream(
    call: Call,
    events: AsyncGenerator[E],
    message: Callable[[E], bytes],
    *,
    keepalive: bytes,
    deadline_s: float | None,
    hold_s: float = HOLD_S,
) -> None:
    """Answer with a stream: `message` makes a message's JSON of an event. `deadline_s`: from now, when the stream ends
    with `deadline_exceeded` (None: never). `hold_s`: how long a message may wait for others to leave with it."""
    held = HeldAnswer(call.x, MEDIA, hold_s=hold_s)
    pulse = _Pulse(held, encode(keepalive), call.keepalive_s())
    async with held, aclosing(events):
        try:
            async with asyncio.timeout(deadline_s):
                async for event in events:
                    pulse.beat()
                    held.push(encode(message(event)))
                    if held.full:
                        await held.flush()
            pulse.stop()
            await held.finish(encode_end())
        except TimeoutError:
            pulse.stop()
            await held.finish(encode_end(Code.DEADLINE_EXCEEDED, "the time of Connect-Timeout-Ms is over"))
        except (DsecError, RpcError) as error:
            pulse.stop()
            await held.finish(encode_end(*rpc_error(error)))
        finally:
            pulse.stop()


class _Pulse:
    """Sends a keep-alive whenever nothing was sent for so long. A timer, no task: idle streams are many."""

    __slots__ = ("_held", "_interval_s", "_last", "_loop", "_part", "_timer")

    def __init__(self, held: HeldAnswer, part: bytes, interval_s: float) -> None:
        self._held = held
        self._part = part
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(interval_s, self._due)

    def beat(self) -> None:
        """Something is being sent."""
        self._last = self._loop.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        now = self._loop.time()
        left = self._last + self._interval_s - now
        if left <= 0:
            self._held.push(self._part)
            self._last, left = now, self._interval_s
        self._timer = self._loop.call_later(left, self._due)


async def fail_stream(x: Exchange, error: DsecError | RpcError) -> None:
    """An answer that is an error from its start."""
    if x.began:
        await x.cut()
        return
    await x.drain()
    await x.begin(200, MEDIA)
    await x.finish(encode_end(*rpc_error(error)))


async def finish_single(x: Exchange, body: object) -> None:
    """The answer to a client-streaming call."""
    await x.begin(200, MEDIA)
    await x.finish(encode(_encode_json(body)) + encode_end())

"""Commands over HTTP: start, attach, stdin, signal, release. Raw ASGI, because these are the calls that must be cheap.

Invariants: the answer to `exec` ends with an END or ERROR frame or is cut; a client that vanishes, or reads slowly,
changes nothing for the command but its back-pressure; stdin is taken once, however often it is sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

from dsec.api.exchange import ClientGone, Exchange
from dsec.api.held import HOLD_S, HeldAnswer
from dsec.edge.client import EdgeClient, Execution
from dsec.errors import DsecError, InvalidRequest
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, Key, ProcessInfo, PtySize
from dsec.wire.exec_stream import MEDIA_TYPE, ClientDecoder, ClientKind, ServerKind, encode
from dsec.wire.frames import ProtocolError

MEDIA = MEDIA_TYPE.encode()
MAX_RELEASES = 256
MAX_HOLD_MS = 1000
_LONGEST_HOLD = b"hold_ms=%d" % MAX_HOLD_MS
"""What the SDK's `run` asks for, with every command: to take it apart each time costs more than the rest of routing."""
PATIENT_S = 0.1
"""A caller whose answer may be held for so long wants the result alone."""


class Started(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Payload of the first frame of an exec answer."""

    key: str
    """Names the command in the other calls."""
    pid: int | None = None
    """Inside the sandbox; absent where it could not be started."""
    attached: bool = False
    """The key was known: this is an earlier request's command."""


class SignalRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a signal call."""

    signal: Annotated[int, Meta(ge=0, le=64)] = 15
    scope: Literal["leader", "group", "all"] = "leader"


class StdinTaken(Struct, frozen=True):
    """Answer to a stdin call."""

    offset: int
    """Bytes of stdin taken so far."""


class ReleaseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a release call for several commands."""

    keys: Annotated[list[Key], Meta(max_length=1024)]


class Processes(Struct, frozen=True):
    """Answer to a list of commands."""

    processes: list[ProcessInfo]


_SPEC = msgspec.json.Decoder(ExecSpec)
_SIGNAL = msgspec.json.Decoder(SignalRequest)
_SIZE = msgspec.json.Decoder(PtySize)
_RELEASE = msgspec.json.Decoder(ReleaseRequest)
_ENCODER = msgspec.json.Encoder()


async def start(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """POST .../exec"""
    hold_s = HOLD_S
    query = x.scope["query_string"]
    if query == _LONGEST_HOLD:
        hold_s = MAX_HOLD_MS / 1000
    elif query:
        x.check_query("hold_ms")
        hold_s = _hold_s(x)
    if x.content_type == MEDIA:
        await _start_framed(edge, sandbox_id, x, hold_s)
    else:
        spec = x.decode(_SPEC, await x.body())
        if x.release:  # before it, so that the guest is told of both at once
            await _release_finished(edge, sandbox_id, x)
        execution = await edge.exec(sandbox_id, spec, patient=hold_s >= PATIENT_S)
        await _stream(execution, x, hold_s=hold_s)


async def attach(edge: EdgeClient, sandbox_id: str, key: str, x: Exchange) -> None:
    """GET .../exec/{key}"""
    x.check_query("stdout_from", "stderr_from", "hold_ms")
    stdout_from, stderr_from = x.natural("stdout_from") or 0, x.natural("stderr_from") or 0
    hold_s = _hold_s(x)
    await _stream(await edge.attach(sandbox_id, key), x, stdout_from, stderr_from, hold_s=hold_s)


async def stdin(edge: EdgeClient, sandbox_id: str, key: str, x: Exchange) -> None:
    """POST .../exec/{key}/stdin"""
    x.check_query("offset", "eof")
    offset = x.natural("offset")
    eof = x.value("eof", bool, False)
    execution = await edge.attach(sandbox_id, key)
    taken = execution.stdin_offset
    at = taken if offset is None else offset
    async for data in x.chunks():
        taken = await execution.write_stdin(data, at)
        at += len(data)
    if eof:
        await execution.close_stdin()
    await x.answer(200, StdinTaken(taken))


async def signal(edge: EdgeClient, sandbox_id: str, key: str, x: Exchange) -> None:
    """POST .../exec/{key}/signal"""
    request = x.decode(_SIGNAL, await x.body() or b"{}")
    await edge.signal(sandbox_id, key, request.signal, request.scope)
    await x.empty()


async def resize(edge: EdgeClient, sandbox_id: str, key: str, x: Exchange) -> None:
    """POST .../exec/{key}/resize"""
    size = x.decode(_SIZE, await x.body())
    await edge.resize(sandbox_id, key, size.cols, size.rows)
    await x.empty()


async def processes(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET .../exec"""
    x.check_query()
    await x.answer(200, Processes(edge.processes(sandbox_id)))


async def release(edge: EdgeClient, sandbox_id: str, key: str, x: Exchange) -> None:
    """DELETE .../exec/{key}"""
    await edge.release(sandbox_id, key)
    await x.empty()


async def release_many(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """POST .../exec:release"""
    for key in x.decode(_RELEASE, await x.body()).keys:
        await edge.release(sandbox_id, key)
    await x.empty()


async def _start_framed(edge: EdgeClient, sandbox_id: str, x: Exchange, hold_s: float) -> None:
    decoder = ClientDecoder()
    chunks = x.chunks()
    frames: list[tuple[ClientKind, bytes]] = []
    while not frames:
        data = await anext(chunks, None)
        if data is None:
            raise InvalidRequest("the body ended before the first frame, the ExecSpec")
        frames = _feed(decoder, data)
    spec = x.decode(_SPEC, frames[0][1])
    if x.release:
        await _release_finished(edge, sandbox_id, x)
    execution = await edge.exec(sandbox_id, spec, patient=hold_s >= PATIENT_S)

    async def pump() -> None:
        """Stdin from the request; a body that breaks the protocol ends the command's stdin, as a closed pipe would."""
        at = 0
        batch = frames[1:]
        while True:
            for kind, payload in batch:
                if kind is ClientKind.STDIN:
                    await execution.write_stdin(payload, at)
                    at += len(payload)
                else:
                    await execution.close_stdin()
            data = await anext(chunks, None)
            if data is None:
                if not decoder.finished:
                    await execution.close_stdin()
                return
            batch = _feed(decoder, data)

    async def reader() -> None:
        try:
            await pump()
        except ClientGone:
            raise
        except DsecError:  # the command's own stream says what happened; its stdin can't go on
            await execution.close_stdin()
            async for _ in chunks:
                pass

    await _stream(execution, x, reader=reader, hold_s=hold_s)


def _hold_s(x: Exchange) -> float:
    """`hold_ms`: how long output may be held so that it leaves together; for callers who want the result alone."""
    hold_ms = x.natural("hold_ms")
    return HOLD_S if hold_ms is None else min(hold_ms, MAX_HOLD_MS) / 1000


async def _release_finished(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """`x-dsec-release`: keys of commands whose results the client has, so that releasing them takes no request of its
    own."""
    for key in x.release.split(b",")[:MAX_RELEASES]:
        await edge.release(sandbox_id, key.decode("latin-1"))


def _feed(decoder: ClientDecoder, data: bytes) -> list[tuple[ClientKind, bytes]]:
    try:
        return decoder.feed(data)
    except ProtocolError as error:
        raise InvalidRequest(f"bad exec frames: {error}") from None


async def _stream(
    execution: Execution,
    x: Exchange,
    stdout_from: int = 0,
    stderr_from: int = 0,
    reader: Callable[[], Awaitable[None]] | None = None,
    *,
    hold_s: float,
) -> None:
    async def first() -> bytes:
        try:
            pid = await execution.started()
        except DsecError:  # `events` raises it too
            pid = None
        return encode(
            ServerKind.STARTED,
            _ENCODER.encode(Started(key=execution.key, pid=pid, attached=execution.attached)),
        )

    held = HeldAnswer(x, MEDIA, first=first, reader=reader, hold_s=hold_s)
    events = cast("AsyncGenerator[Chunk | ExecStatus]", execution.events(stdout_from, stderr_from))
    async with held, aclosing(events):
        try:
            async for event in events:
                if type(event) is Chunk:
                    held.push(encode(ServerKind.STDERR if event.stderr else ServerKind.STDOUT, event.data))
                    if held.full:
                        await held.flush()
                else:
                    await held.finish(encode(ServerKind.END, _ENCODER.encode(event)))
        except DsecError as error:
            await held.finish(encode(ServerKind.ERROR, _ENCODER.encode(error.body())))

"""Shell sessions over HTTP.

Invariants: a caller that goes away changes nothing for the session; a command that is asked for again under its key
runs once.
"""

from __future__ import annotations

import base64

import msgspec
from msgspec import Struct

from dsec.api.exchange import Exchange
from dsec.edge.session import Session
from dsec.edge.sessions import Sessions, Stop
from dsec.edge.shell import Run
from dsec.errors import Conflict, InvalidRequest
from dsec.spec.sessions import (
    SessionCommand,
    SessionInfo,
    SessionInput,
    SessionInterrupt,
    SessionResult,
    SessionSpec,
)

MAX_LOG_BYTES = 16 << 20
LOG_BYTES = 1 << 20
_SPEC = msgspec.json.Decoder(SessionSpec)
_COMMAND = msgspec.json.Decoder(SessionCommand)
_INPUT = msgspec.json.Decoder(SessionInput)
_INTERRUPT = msgspec.json.Decoder(SessionInterrupt)


class SessionList(Struct, frozen=True):
    """Answer to a list call."""

    sessions: list[SessionInfo]


async def collection(sessions: Sessions, sandbox_id: str, x: Exchange) -> None:
    """POST and GET .../sessions"""
    x.check_query()
    if x.scope["method"] == "GET":
        await x.answer(200, SessionList(await sessions.list(sandbox_id)))
        return
    session, existed = await sessions.open(sandbox_id, x.decode(_SPEC, await x.body() or b"{}"))
    await x.answer(200 if existed else 201, session.info())


async def one(sessions: Sessions, sandbox_id: str, name: str, x: Exchange) -> None:
    """GET and DELETE .../sessions/{name}"""
    x.check_query()
    if x.scope["method"] == "DELETE":
        await sessions.close(sandbox_id, name)
        await x.empty()
        return
    session = await sessions.get(sandbox_id, name)
    await session.catch_up()
    await x.answer(200, session.info())


async def run(sessions: Sessions, sandbox_id: str, name: str, x: Exchange) -> None:
    """POST .../sessions/{name}/run"""
    x.check_query()
    request = x.decode(_COMMAND, await x.body())
    session = await sessions.get(sandbox_id, name)
    room = request.output_bytes
    started, known = await sessions.start(sandbox_id, session, request.command, key=request.key, room=room)
    # A repeated request limits it too: who asked first may be gone with an earlier server.
    stopped = await sessions.finish(sandbox_id, session, started, request.command_timeout_s)
    data, truncated = bytes(started.output), started.dropped > 0
    if truncated and known and started.done:  # another answer had it, or an earlier server
        data = await sessions.output(session, started, request.output_bytes)
        truncated = started.size > request.output_bytes
    await x.answer(200, _result(session, started, stopped, data, truncated=truncated))


async def send(sessions: Sessions, sandbox_id: str, name: str, x: Exchange) -> None:
    """POST .../sessions/{name}/input"""
    x.check_query()
    request = x.decode(_INPUT, await x.body())
    session = await sessions.get(sandbox_id, name)
    await session.catch_up()
    if not session.busy:
        raise Conflict(
            f"nothing runs in session {name!r} that could read this",
            remedy="Run a command first; text for the shell itself goes through run.",
        )
    await sessions.input(sandbox_id, session, request.data)
    await x.empty()


async def interrupt(sessions: Sessions, sandbox_id: str, name: str, x: Exchange) -> None:
    """POST .../sessions/{name}/interrupt"""
    x.check_query()
    request = x.decode(_INTERRUPT, await x.body() or b"{}")
    session = await sessions.get(sandbox_id, name)
    await session.catch_up()
    current = session.machine.current
    if current is not None and not session.ended:
        await sessions.stop(sandbox_id, session, current, request.grace_s)
    await x.answer(200, session.info())


async def log(sessions: Sessions, sandbox_id: str, name: str, x: Exchange) -> None:
    """GET .../sessions/{name}/log"""
    x.check_query("offset", "limit")
    offset, limit = x.natural("offset") or 0, x.value("limit", int, LOG_BYTES)
    if not 1 <= limit <= MAX_LOG_BYTES:
        raise InvalidRequest(f"limit is 1 to {MAX_LOG_BYTES}")
    session = await sessions.get(sandbox_id, name)
    data, after = await sessions.log(session, offset, limit)
    await x.begin(
        200,
        b"application/octet-stream",
        (b"content-length", b"%d" % len(data)),
        (b"x-dsec-next-offset", b"%d" % after),
    )
    await x.finish(data)


VERBS = {"run": ("POST", run), "input": ("POST", send), "interrupt": ("POST", interrupt), "log": ("GET", log)}


def _result(session: Session, started: Run, stopped: Stop | None, data: bytes, *, truncated: bool) -> SessionResult:
    try:
        text, raw = data.decode(), None
    except UnicodeDecodeError:
        text, raw = data.decode("utf-8", "replace"), base64.b64encode(data).decode("ascii")
    code = started.code
    if code is None and session.ended:
        code = session.info().exit_code
    begin = session.machine.size if started.start is None else started.start
    return SessionResult(
        exit_code=code,
        output=text,
        output_b64=raw,
        timed_out=stopped is Stop.TIMEOUT,
        output_limit=stopped is Stop.OUTPUT,
        truncated=truncated,
        ended=session.ended,
        log_from=begin,
        log_to=session.machine.size if started.end is None else started.end,
    )

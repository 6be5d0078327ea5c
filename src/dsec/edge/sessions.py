"""Shell sessions: named bashes on terminals, each one keyed command of its sandbox.

Owns the table of sessions that this edge has met. Invariants: a session's truth is its command's log, so that an edge
that takes over finds it again by its key; at most one command runs in a session at a time; what is about to be typed is
on record, with where in the terminal's input it ends, so that an edge that takes over doesn't type it again; nothing
reads the log while nobody waits for anything, so that an idle session costs no task and no descriptor; a session that
could not be brought back to its prompt is ended and says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from enum import Enum
from typing import Any, cast
from weakref import WeakValueDictionary

from dsec.edge.client import EdgeClient, Execution
from dsec.edge.session import INTERRUPT, READY_S, Session, size_of
from dsec.edge.shell import MAX_COMMAND_BYTES, Output, Parser, Run, lines, name_of, probe, secret_of, setup
from dsec.edge.tasks import Tasks
from dsec.errors import Conflict, DsecError, InvalidRequest, NotFound, Unavailable, Unsupported
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, PtySize
from dsec.spec.sessions import SessionInfo, SessionSpec
from dsec.spec.trajectory import EntryType, parse

GRACE_S = 2.0
"""How long ^C may take to work."""
PROMPT_S = 10.0
"""So long at least a stopped shell may take to be back at its prompt: a host that stands still a while ends none."""
LOG_BYTES = 256 << 20
"""A session's output in all; beyond it the session is ended."""
COMMAND_BYTES = 64 << 20
"""One command's output; beyond it the command is stopped."""
LIFE_S = 365 * 86400.0
HEAD_BYTES = 64 << 10
"""The shell is ready within so much of its log."""
_KEY = "dsec.session/"
_SHELL = ["bash", "--noprofile", "--norc", "--noediting", "-i"]
_FORGET_LINE = b"\x15"
"""^U: what a server that was killed had typed of a line is not part of the next one."""
_SWEEP = 1024
_KILL = """IFS= read -r line < "/proc/$1/stat" || exit 4
set -- "$1" ${line##*) }
[ "$7" = "$1" ] && exit 3
kill -9 -- "-$7"
"""
"""Ends what is in the foreground of the terminal of a shell ($1, its process): exit code 3: the shell itself is."""


class Stop(Enum):
    """Why a command was stopped."""

    TIMEOUT = 1
    OUTPUT = 2


class Sessions:
    """The sessions of an edge's sandboxes."""

    def __init__(self, edge: EdgeClient) -> None:
        self._edge = edge
        self._known: dict[tuple[str, str], Session] = {}
        self._finding: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """One at a time looks for a session that isn't known."""
        self._others: set[tuple[str, str]] = set()
        """Terminals of an earlier edge's that are no sessions."""
        self._tasks = Tasks()
        self._sweep_at = _SWEEP

    async def open(self, sandbox_id: str, spec: SessionSpec) -> tuple[Session, bool]:
        """A session of this name, and whether it was there already. One whose shell has ended is replaced.

        Raises `Unsupported` where the image has no bash, `InvalidRequest` for a user or directory that can't be,
        `Conflict` where a session of the name was opened with another spec, and what `EdgeClient.exec` raises.
        """
        return await asyncio.shield(self._tasks.spawn(self._open(sandbox_id, spec)))

    async def _open(self, sandbox_id: str, spec: SessionSpec) -> tuple[Session, bool]:
        async with self._lock(sandbox_id, spec.name):
            return await self._open_alone(sandbox_id, spec)

    async def _open_alone(self, sandbox_id: str, spec: SessionSpec) -> tuple[Session, bool]:
        exec_spec = ExecSpec(
            argv=_SHELL,
            env={"TERM": "dumb", **spec.env},
            cwd=spec.cwd,
            user=spec.user,
            pty=PtySize(),
            command_timeout_s=LIFE_S,
            output_bytes=LOG_BYTES,
            key=_KEY + spec.name,
        )
        try:
            execution = await self._edge.exec(sandbox_id, exec_spec)
        except Conflict:
            session = await self._find(sandbox_id, spec.name)
            if session is not None and not session.ended:
                raise Conflict(
                    f"session {spec.name!r} was opened with other arguments",
                    remedy="Close it first, or use another name.",
                ) from None
            await self.close(sandbox_id, spec.name)
            execution = await self._edge.exec(sandbox_id, exec_spec)
        if execution.attached:
            session = await self._adopt(sandbox_id, spec.name, execution)
            if session is not None and not session.ended:
                return session, True
            await self.close(sandbox_id, spec.name)
            execution = await self._edge.exec(sandbox_id, exec_spec)
        session = Session(spec.name, execution, secrets.token_hex(16))
        try:
            await session.type(setup(session.machine.secret, spec.name))
            ready = await session.until(lambda: session.machine.ready, READY_S)
            if session.status is not None:
                raise _no_shell(session.status)
            if not ready:
                raise Unavailable("the session's shell didn't get ready", remedy="Is the sandbox short of CPU?")
        except BaseException:
            await self._edge.release(sandbox_id, execution.key)
            raise
        self._remember(sandbox_id, session)
        opened = {"session": spec.name, "cwd": spec.cwd, "user": spec.user}
        self._edge.note_session(sandbox_id, EntryType.SESSION_OPENED, opened, env=spec.env)
        return session, False

    async def get(self, sandbox_id: str, name: str) -> Session:
        """The session of a name, also one that an earlier edge opened. Raises `NotFound`."""
        known = self._known.get((sandbox_id, name))
        if known is not None and known.failure is None:
            return known
        async with self._lock(sandbox_id, name):
            session = await self._find(sandbox_id, name)
        if session is None:
            await self.close(sandbox_id, name)
            raise _missing(name)
        return session

    async def list(self, sandbox_id: str) -> list[SessionInfo]:
        """The sessions that this edge has met, and those that an earlier one opened and whose shells live."""
        met = {_KEY + name for owner, name in self._known if owner == sandbox_id}
        for process in self._edge.processes(sandbox_id):
            key, at = process.key, (sandbox_id, process.key)
            if process.pty and key.startswith(("~", _KEY)) and key not in met and at not in self._others:
                with suppress(NotFound, InvalidRequest):  # it ends just now; its beginning is gone, so it has no key
                    execution = await self._edge.attach(*at)
                    size, _ = await size_of(execution)
                    head = await self._head(execution, min(size, HEAD_BYTES))
                    name = name_of(head)
                    if len(head) < HEAD_BYTES if name is None else await self._is(sandbox_id, name, process.pid):
                        continue  # a session's, now or when it is ready
                self._others.add(at)
        return [session.info() for (owner, _), session in self._known.items() if owner == sandbox_id]

    async def start(
        self, sandbox_id: str, session: Session, command: str, *, key: str | None = None, room: int
    ) -> tuple[Run, bool]:
        """Begin a command; also says whether the key was known. Raises `Conflict` where one runs, or the shell has
        ended; `InvalidRequest`; `Unavailable` where it can't be written down."""
        data = command.encode("utf-8", "surrogateescape")
        if b"\0" in data or len(data) > MAX_COMMAND_BYTES:
            raise InvalidRequest(
                f"a command has no NUL bytes and at most {MAX_COMMAND_BYTES} bytes",
                remedy="Write a longer one to a file and run that.",
            )
        run = hashlib.sha256(key.encode()).hexdigest()[:16] if key is not None else secrets.token_hex(8)
        if session.busy:  # unless it has ended while nobody looked
            await session.catch_up()
        known = _met(session, run)
        if known is not None:
            return known, True
        asked = {"session": session.name, "command": data, "key": key}
        return await asyncio.shield(self._tasks.spawn(self._start(sandbox_id, session, run, asked, room)))

    async def _start(
        self, sandbox_id: str, session: Session, run: str, asked: dict[str, Any], room: int
    ) -> tuple[Run, bool]:
        execution = session.execution
        pid = await execution.started()
        async with session.typing:
            known = _met(session, run)  # whoever had the turn before
            if known is not None:
                return known, True
            typed = _FORGET_LINE + lines(session.machine.secret, run, asked["command"])
            asked |= {"mark": run, "shell": pid, "typed": execution.stdin_offset + len(typed)}
            entry = self._edge.note_session(sandbox_id, EntryType.SESSION_RUN, asked)
            begun = session.machine.begin(run, room)
            begun.entry = entry
            await execution.write_stdin(typed)
        return begun, False

    async def finish(self, sandbox_id: str, session: Session, run: Run, timeout_s: float | None) -> Stop | None:
        """Wait for a command's end; stop it where it takes too long or writes too much."""

        def over() -> bool:
            return run.done or run.size > COMMAND_BYTES

        why = None
        if not await session.until(over, timeout_s):
            why = Stop.TIMEOUT
        elif run.size > COMMAND_BYTES and not run.done:
            why = Stop.OUTPUT
        if why is not None:
            await self.stop(sandbox_id, session, run, GRACE_S)
        self.note_result(sandbox_id, session, run)
        return why

    def note_result(self, sandbox_id: str, session: Session, run: Run) -> None:
        """Put what became of a command on record: once each, by the server that began it. Raises `Unavailable`."""
        entry, run.entry = run.entry, 0
        if entry:
            data = {"run": entry, "exit_code": run.code, "output": bytes(run.output), "stopped": run.stopped or None}
            data |= {"more": run.dropped or None, "ended": session.ended or None}
            self._edge.note_session(sandbox_id, EntryType.SESSION_RESULT, data)

    async def stop(self, sandbox_id: str, session: Session, run: Run, grace_s: float) -> None:
        """End a command: ^C, half of `grace_s` later again (a shell that is just starting a program can lose one), then
        SIGKILL for what is in the foreground, and where that doesn't bring the prompt back either, the session as a
        whole."""
        run.stopped = True

        def done() -> bool:
            return run.done

        for _ in range(2):
            await session.interrupt(run)
            if await session.until(done, grace_s / 2):
                return
        unit = max(grace_s, 1.0)
        for patience_s in (unit, 2 * unit, max(3 * unit, PROMPT_S - 3 * unit)):
            killed = await self._kill_foreground(sandbox_id, session)
            if not killed:
                await session.type(INTERRUPT + probe(session.machine.secret, run.run))
            if await session.until(done, patience_s):
                return
        await self.end(sandbox_id, session)

    async def end(self, sandbox_id: str, session: Session) -> None:
        """Kill the session's shell with everything that it started; its log stays until it is closed."""
        if not session.ended:
            await self._edge.signal(sandbox_id, session.execution.key, 9, "all")
            await session.until(lambda: False, READY_S)

    async def close(self, sandbox_id: str, name: str) -> None:
        """End a session and forget its log. Idempotent."""
        if self._known.pop((sandbox_id, name), None) is not None:
            self._edge.note_session(sandbox_id, EntryType.SESSION_CLOSED, {"session": name})
        await self._edge.release(sandbox_id, _KEY + name)

    async def input(self, sandbox_id: str, session: Session, text: str) -> None:
        """Type to what runs in a session."""
        data = text.encode("utf-8", "surrogateescape")
        self._edge.note_session(sandbox_id, EntryType.SESSION_INPUT, {"session": session.name, "bytes": len(data)})
        await session.type(data)

    async def log(self, session: Session, offset: int, limit: int) -> tuple[bytes, int]:
        """The session's output from an offset of its log on, without marks and what the shell said before it was ready,
        and the offset to go on from. No bytes and the same offset mean that there is nothing more by now."""
        parser = Parser(session.machine.secret, max(offset, session.machine.ready_at))
        return await self._part(session, parser, limit), parser.passed

    async def output(self, session: Session, run: Run, limit: int) -> bytes:
        """The first bytes of what an ended command wrote, from the log."""
        if run.start is None or run.end is None:
            return b""
        size = min(limit, run.end - run.start)
        parser = Parser(session.machine.secret, run.start)
        return await self._part(session, parser, size) + parser.held if size else b""

    # --- inside ---

    async def _part(self, session: Session, parser: Parser, limit: int) -> bytes:
        """The output in the next bytes of the log, at most `limit` of them."""
        output = bytearray()
        left = min(limit, (await size_of(session.execution))[0] - parser.passed)
        events = cast("AsyncGenerator[Chunk | ExecStatus]", session.execution.events(parser.passed))
        async with aclosing(events):
            while left > 0:
                event = await anext(events)
                if isinstance(event, ExecStatus):
                    break
                data = event.data[:left]
                left -= len(data)
                for item in parser.feed(data):
                    if isinstance(item, Output):
                        output += item.data
        return bytes(output)

    def _lock(self, sandbox_id: str, name: str) -> asyncio.Lock:
        return self._finding.setdefault((sandbox_id, name), asyncio.Lock())

    async def _find(self, sandbox_id: str, name: str) -> Session | None:
        try:
            execution = await self._edge.attach(sandbox_id, _KEY + name)
        except NotFound as error:
            if type(error) is not NotFound:
                raise
            return None
        return await self._adopt(sandbox_id, name, execution)

    async def _adopt(self, sandbox_id: str, name: str, execution: Execution) -> Session | None:
        """The session whose shell this is; None: its shell never got ready."""
        known = self._known.get((sandbox_id, name))
        if known is not None and known.failure is None:
            return known
        await size_of(execution)
        secret = secret_of(await self._head(execution, HEAD_BYTES))
        if secret is None:
            return None
        session = Session(name, execution, secret)
        await session.catch_up()
        await self._expect(sandbox_id, session)
        self._remember(sandbox_id, session)
        return session

    async def _expect(self, sandbox_id: str, session: Session) -> None:
        """The command that an earlier edge typed last begins, though the log may not say so yet: where all of it was
        typed, which the record and the guest's count of what it took tell."""
        pid = await session.execution.started()
        last: dict[str, Any] = {}
        for line in self._edge.trajectory(sandbox_id):
            if b'"session_run"' in line and (entry := parse(line)).type == EntryType.SESSION_RUN:
                last = entry.data if entry.data.get("shell", 0) == pid else last
        if last and last["typed"] <= session.execution.stdin_offset:
            session.machine.expect(last["mark"])

    async def _head(self, execution: Execution, size: int) -> bytes:
        """The beginning of a log, up to where its shell is ready, at most `size` bytes and what comes in time."""
        head = bytearray()
        events = cast("AsyncGenerator[Chunk | ExecStatus]", execution.events(0))
        async with aclosing(events):
            with suppress(TimeoutError):
                async with asyncio.timeout(READY_S):
                    while secret_of(bytes(head)) is None and len(head) < size:
                        event = await anext(events)
                        if isinstance(event, ExecStatus):
                            break
                        head += event.data
        return bytes(head)

    async def _is(self, sandbox_id: str, name: str, pid: int) -> bool:
        """Whether the shell of the session of a name is this process: any program can write what a session does."""
        try:
            session = await self.get(sandbox_id, name)
        except NotFound:
            return False
        return await session.execution.started() == pid

    async def _kill_foreground(self, sandbox_id: str, session: Session) -> bool:
        """SIGKILL to the process group in the terminal's foreground; False: there is none but the shell's own."""
        pid = await session.execution.started()
        spec = ExecSpec(argv=["bash", "-c", _KILL, "bash", str(pid)], command_timeout_s=10.0, user="root")
        execution = await self._edge.exec(sandbox_id, spec)
        async for event in execution.events():
            if isinstance(event, ExecStatus):
                return event.exit_code == 0
        return False

    def _remember(self, sandbox_id: str, session: Session) -> None:
        self._known[sandbox_id, session.name] = session
        if len(self._known) > self._sweep_at:
            for at in list(self._known):
                if not self._lives(at[0]):
                    del self._known[at]
            self._others = {at for at in self._others if self._lives(at[0])}
            self._sweep_at = max(_SWEEP, 2 * len(self._known))

    def _lives(self, sandbox_id: str) -> bool:
        try:
            return self._edge.get(sandbox_id).ended_at is None
        except NotFound:
            return False


def _met(session: Session, run: str) -> Run | None:
    """The command that is named so; None: it may begin. Raises `Conflict` where it may not."""
    known = session.machine.runs.get(run)
    if known is not None:
        return known
    if session.ended:
        raise Conflict(
            f"the shell of session {session.name!r} has ended",
            remedy="Open the session again for a fresh shell.",
            session_ended=True,
        )
    if session.busy:
        raise Conflict(
            f"a command runs in session {session.name!r}",
            remedy="Wait for it, interrupt it, or use another session.",
            session_busy=True,
        )
    return None


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no session {name!r} in the sandbox", remedy="Open it first.")


def _no_shell(status: ExecStatus) -> DsecError:
    if status.exit_code == 127:
        return Unsupported(
            f"a session needs bash, which this image hasn't got: {status.message}",
            remedy="Use an environment with bash, or run commands one at a time.",
        )
    return InvalidRequest(
        f"the session's shell could not start: {status.message or f'it ended with {status.exit_code}'}"
    )

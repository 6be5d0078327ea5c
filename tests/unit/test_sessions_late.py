"""Sessions over a guest that is late: an edge that takes over waits for all that the one before it had been told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from edge_kit import PATIENCE_S, Kit, spec, until

from dsec.backends.fake import FakeGuest, commands
from dsec.edge import session as module
from dsec.edge.commands import RunningCommand
from dsec.edge.sessions import Sessions
from dsec.errors import Conflict, Unavailable
from dsec.spec.sessions import SessionSpec

LATE_S = 0.5
"""Far longer than a guest on an idle machine is silent between two frames."""


class Bash:
    """As much of a bash as a session notices: it is ready, and each command ends at once."""

    def __init__(self) -> None:
        self.began: list[bytes] = []
        self.awake = asyncio.Event()
        """Else it has read a command and says nothing yet."""
        self.awake.set()

    async def __call__(self, process: commands.Process) -> int:
        secret = b""
        while data := await process.stdin():
            for line in data.splitlines():
                if ready := re.search(rb"8888;([0-9a-f]{32});(r;[0-9a-f]+)", line):
                    secret = ready[1]
                    await process.out(b"\x1b]8888;%s;%s\x07" % (secret, ready[2]))
                elif begin := re.search(rb";b;([0-9a-f]{16})", line):
                    run = begin[1]
                    self.began.append(run)
                    await self.awake.wait()
                    marks = secret, run, len(self.began), secret, run
                    await process.out(b"\x1b]8888;%s;b;%s\x07%d\n\x1b]8888;%s;e;%s;0\x07" % marks)
        return 0


@pytest.fixture
def bash(monkeypatch: pytest.MonkeyPatch) -> Bash:
    shell = Bash()
    monkeypatch.setitem(commands.COMMANDS, b"bash", shell)
    return shell


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@asynccontextmanager
async def late(guest: FakeGuest, first: int) -> AsyncIterator[Callable[[], None]]:
    """The guest stands still in the middle of its next resync, `first` bytes into each command's output. Gives what
    makes it go on."""
    whole = guest.resync

    def half() -> None:
        for operation in guest.operations.values() if first else ():
            guest.send_output(operation, False, 0, operation.streams[0].held[:first])
        assert guest._channel is not None
        guest._channel.synced = False

    def go_on() -> None:
        assert guest._channel is not None
        guest._channel.synced = True
        whole()

    guest.resync = half  # type: ignore[method-assign]
    try:
        yield go_on
    finally:
        guest.resync = whole  # type: ignore[method-assign]


async def opened(kit: Kit) -> tuple[str, int]:
    """A sandbox with a session in which one keyed command has run, without an edge; where the shell got ready in its
    log."""
    async with kit.edge(keep=True) as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        sessions = Sessions(edge)
        session, _ = await sessions.open(box, SessionSpec())
        run, _ = await sessions.start(box, session, "once", key="k", room=1 << 20)
        assert await session.until(lambda: run.done, PATIENCE_S)
        return box, session.machine.ready_at


async def test_a_key_runs_once_though_the_guest_is_late(kit: Kit, bash: Bash) -> None:
    box, ready_at = await opened(kit)
    async with late(kit.host.guests[box], ready_at) as go_on, kit.edge() as edge:
        sessions = Sessions(edge)
        asyncio.get_running_loop().call_later(LATE_S, go_on)
        session = await sessions.get(box, "default")
        run, known = await sessions.start(box, session, "once", key="k", room=1 << 20)
        assert known
        assert run.code == 0
        assert await sessions.output(session, run, 1 << 20) == b"1\r\n"
        assert len(bash.began) == 1
        run, known = await sessions.start(box, session, "twice", key="other", room=1 << 20)
        assert not known
        assert await session.until(lambda: run.done, PATIENCE_S)
        assert len(bash.began) == 2


async def typed_before_a_kill(kit: Kit, bash: Bash, guest: FakeGuest, box: str) -> None:
    """An edge types a command with a key, and is gone before its mark."""
    bash.awake.clear()
    async with kit.edge(keep=True) as edge:
        sessions = Sessions(edge)
        session = await sessions.get(box, "default")
        _, known = await sessions.start(box, session, "true", key="typed", room=1 << 20)
        assert not known
        (shell,) = guest.operations.values()
        await until(lambda: shell.input_received == session.execution.stdin_offset)


async def test_a_key_that_was_typed_just_before_a_kill_runs_once(kit: Kit, bash: Bash) -> None:
    box, _ = await opened(kit)
    await typed_before_a_kill(kit, bash, kit.host.guests[box], box)
    async with kit.edge() as edge:
        sessions = Sessions(edge)
        session = await sessions.get(box, "default")
        with pytest.raises(Conflict):
            await sessions.start(box, session, "true", key="another", room=1 << 20)
        run, known = await sessions.start(box, session, "true", key="typed", room=1 << 20)
        bash.awake.set()
        assert await session.until(lambda: run.done, PATIENCE_S)
        assert known
        assert await sessions.output(session, run, 1 << 20) == b"2\r\n"
        run, _ = await sessions.start(box, session, "true", key="another", room=1 << 20)
        assert await session.until(lambda: run.done, PATIENCE_S)
        assert len(bash.began) == 3


async def test_a_key_of_which_a_part_was_typed_before_a_kill_runs(
    kit: Kit, bash: Bash, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, _ = await opened(kit)
    write = RunningCommand.write_stdin
    with monkeypatch.context() as patch:
        patch.setattr(RunningCommand, "write_stdin", lambda self, data: write(self, data[:10]))
        await typed_before_a_kill(kit, bash, kit.host.guests[box], box)
    bash.awake.set()
    async with kit.edge() as edge:
        sessions = Sessions(edge)
        session = await sessions.get(box, "default")
        run, known = await sessions.start(box, session, "true", key="typed", room=1 << 20)
        assert not known
        assert await session.until(lambda: run.done, PATIENCE_S)
        assert len(bash.began) == 2


async def test_a_list_has_the_sessions_of_a_guest_that_is_late(kit: Kit, bash: Bash) -> None:
    box, _ = await opened(kit)
    async with late(kit.host.guests[box], 0) as go_on, kit.edge() as edge:
        asyncio.get_running_loop().call_later(LATE_S, go_on)
        assert [info.name for info in await Sessions(edge).list(box)] == ["default"]


async def test_the_log_of_a_guest_that_is_late_is_whole(kit: Kit, bash: Bash) -> None:
    box, ready_at = await opened(kit)
    async with late(kit.host.guests[box], ready_at) as go_on, kit.edge() as edge:
        asyncio.get_running_loop().call_later(LATE_S, go_on)
        sessions = Sessions(edge)
        data, _ = await sessions.log(await sessions.get(box, "default"), ready_at, 1 << 20)
        assert data.endswith(b"1\r\n")


async def test_a_shell_that_ended_meanwhile_has_ended(kit: Kit, bash: Bash) -> None:
    box, ready_at = await opened(kit)
    guest = kit.host.guests[box]
    (shell,) = guest.operations.values()
    shell.type_in(b"", eof=True)
    await until(lambda: shell.finished is not None)
    async with late(guest, ready_at) as go_on, kit.edge() as edge:
        asyncio.get_running_loop().call_later(LATE_S, go_on)
        session = await Sessions(edge).get(box, "default")
        assert session.ended
        assert session.info().exit_code == 0
        assert len(session.machine.runs) == 1


async def test_a_guest_that_stays_away_is_the_platforms_fault_and_no_answer(
    kit: Kit, bash: Bash, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, ready_at = await opened(kit)
    async with late(kit.host.guests[box], ready_at) as go_on, kit.edge() as edge:
        sessions = Sessions(edge)
        with monkeypatch.context() as patch:
            patch.setattr(module, "RESYNC_S", LATE_S)
            for ask in (sessions.list(box), sessions.get(box, "default"), sessions.open(box, SessionSpec())):
                with pytest.raises(Unavailable) as caught:
                    await ask
                assert caught.value.infra
        go_on()
        assert [info.name for info in await sessions.list(box)] == ["default"]
        assert len(bash.began) == 1

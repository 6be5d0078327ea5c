"""Sessions in real containers, over edges that come and go."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.app import Config, open_edge, read_config
from dsec.edge import sessions
from dsec.edge.node import Edge
from dsec.edge.session import Session
from dsec.edge.sessions import Sessions
from dsec.edge.shell import Run
from dsec.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, Unsupported
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.sessions import SessionSpec
from server_kit import PATIENCE_S

pytestmark = pytest.mark.root


class Box:
    """A sandbox with a session."""

    def __init__(self, edge: Edge, sandbox_id: str) -> None:
        self.edge = edge
        self.id = sandbox_id
        self.sessions = Sessions(edge)

    async def open(self, name: str = "default", **fields: object) -> Session:
        session, existed = await self.sessions.open(self.id, SessionSpec(name=name, **fields))  # type: ignore[arg-type]
        assert not existed
        return session

    async def start(self, session: Session, command: str, *, key: str | None = None, room: int = 1 << 20) -> Run:
        return (await self.sessions.start(self.id, session, command, key=key, room=room))[0]

    async def run(self, session: Session, command: str, *, room: int = 1 << 20) -> tuple[bytes, int | None]:
        run = await self.start(session, command, room=room)
        assert await session.until(lambda: run.done, PATIENCE_S), bytes(run.output[-500:])
        return bytes(run.output), run.code


@asynccontextmanager
async def boxed(config: Config, *, keep: bool = False) -> AsyncIterator[Box]:
    async with open_edge(config, keep=keep) as edge:
        yield Box(edge, (await edge.create(SandboxSpec(environment="debian"), project="p")).sandbox.id)


@pytest.fixture
def config(debian_state: Path) -> Config:
    return read_config(debian_state)


@pytest.fixture
async def box(config: Config) -> AsyncIterator[Box]:
    async with boxed(config) as made:
        yield made


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("echo hi; false", b"hi\n", 1),
        ("printf x", b"x", 0),
        ("", b"", 0),
        ("# comment", b"", 0),
        ("cat <<EOF\na b\nEOF\necho 'é!! \\n'", "a b\né!! \\n\n".encode(), 0),
        ("cat <<EOF\na\nEOF", b"a\n", 0),
        ("for i in 1 2; do\n echo $i\ndone", b"1\n2\n", 0),
        ("printf '\\0\\377\\033\\r\\n'", b"\0\xff\x1b\r\n", 0),
        ("PS1='a> ' PS2='b> '; echo x", b"x\n", 0),
        ("PROMPT_COMMAND='echo noise'; true", b"", 0),
        ("exec >/dev/null; echo lost", b"", 0),
        ("stty raw echo; echo x", b"x\n", 0),
        ("alias printf=nope eval=nope builtin=nope; echo x", b"x\n", 0),
        ("printf() { echo mine; }; printf x", b"mine\n", 0),
        ("(exit 255)", b"", 255),
        ("kill -9 $BASHPID | cat; exit_code=3; (exit $exit_code)", b"", 3),
    ],
)
async def test_output_and_exit_code(box: Box, command: str, output: bytes, code: int) -> None:
    session = await box.open()
    assert await box.run(session, command) == (output, code)
    assert (await box.run(session, "exec >/dev/tty; true"))[1] == 0
    assert (await box.run(session, "echo on"))[0].endswith(b"on\n"), "the session goes on"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo 'unfinished", b"unexpected EOF"),
        ("if true", b"syntax error"),
        ("set -u; echo $nope; echo after", b"unbound variable"),
        ("echo ${nope?told}", b"told"),
    ],
)
async def test_errors_of_the_text_leave_the_session_usable(box: Box, command: str, said: bytes) -> None:
    session = await box.open()
    output, code = await box.run(session, command)
    assert said in output
    assert b"after" not in output
    assert code not in (0, None)
    assert await box.run(session, "set +u; echo on") == (b"on\n", 0)


async def test_state_is_kept_and_sessions_are_apart(box: Box) -> None:
    one, two = await box.open("one", env={"E": "e"}, cwd="/tmp"), await box.open("two")
    assert await box.run(one, "pwd; echo $E; cd /; f() { echo f; }; export X=1") == (b"/tmp\ne\n", 0)
    assert await box.run(one, "pwd; f; sh -c 'echo $X'") == (b"/\nf\n1\n", 0)
    assert await box.run(two, "echo $X$E") == (b"\n", 0)
    assert {info.name for info in await box.sessions.list(box.id)} == {"one", "two"}


async def test_the_terminal_is_the_commands_stdin(box: Box) -> None:
    session = await box.open()
    run = await box.start(session, "echo ready; read -r x; echo got $x; test -t 0")
    assert await session.until(lambda: run.output == b"ready\n", PATIENCE_S)
    with pytest.raises(Conflict) as caught:
        await box.start(session, "echo no")
    assert caught.value.details == {"session_busy": True}
    await session.type(b"a line\n")
    assert await session.until(lambda: run.done, PATIENCE_S)
    assert (bytes(run.output), run.code) == (b"ready\ngot a line\n", 0)


@pytest.mark.parametrize(
    ("command", "grace_s"),
    [
        ("echo begun; sleep 1000; echo next", 10.0),
        ("echo begun; while :; do :; done", 10.0),
        ("echo begun; for i in 1 2 3; do sleep 1000; done; echo next", 10.0),
        ("echo begun; bash -c 'trap \"\" INT TERM; sleep 1000'; true", 0.5),
        ("echo begun; yes > /dev/null", 10.0),
        ("PROMPT_COMMAND=; echo begun; sleep 1000", 2.0),
        ("PROMPT_COMMAND=; trap '' INT; echo begun; sleep 1000", 2.0),
    ],
)
async def test_a_command_is_stopped_and_the_session_goes_on(box: Box, command: str, grace_s: float) -> None:
    session = await box.open()
    run = await box.start(session, command)
    assert await session.until(lambda: b"begun" in run.output, PATIENCE_S)
    await box.sessions.stop(box.id, session, run, grace_s)
    assert run.done
    assert not session.ended
    assert b"next" not in run.output
    assert await box.run(session, "trap - INT; echo on") == (b"on\n", 0)


async def test_a_shell_that_comes_back_late_is_not_ended(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host that stands still for a while."""
    monkeypatch.setattr(sessions, "PROMPT_S", PATIENCE_S)
    session = await box.open()
    run = await box.start(session, "trap '' INT; mkfifo /tmp/f; echo begun; read -t 8 <>/tmp/f; true")
    assert await session.until(lambda: b"begun" in run.output, PATIENCE_S)
    await box.sessions.stop(box.id, session, run, 0.2)
    assert run.done
    assert not session.ended
    assert await box.run(session, "echo on") == (b"on\n", 0)


async def test_a_shell_that_cannot_be_stopped_is_ended_and_says_so(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PROMPT_S", 0.0)
    session = await box.open()
    run = await box.start(session, "trap '' INT; echo begun; while :; do :; done")
    assert await session.until(lambda: b"begun" in run.output, PATIENCE_S)
    await box.sessions.stop(box.id, session, run, 0.2)
    assert session.ended
    assert session.info().exit_code is None
    with pytest.raises(Conflict) as caught:
        await box.start(session, "echo no")
    assert caught.value.details == {"session_ended": True}
    assert await box.run(await box.open(), "echo fresh") == (b"fresh\n", 0)


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("set -e; false; echo x", 1), ("exec sh -c 'exit 3'", 3)])
async def test_a_shell_that_leaves(box: Box, command: str, code: int) -> None:
    session = await box.open()
    run = await box.start(session, f"echo bye; {command}")
    assert await session.until(lambda: run.done, PATIENCE_S)
    assert session.ended
    assert session.info().exit_code == code
    assert run.output.startswith(b"bye\n")
    assert await box.run(await box.open(), "echo fresh") == (b"fresh\n", 0)


async def test_background_jobs_do_not_hold_a_command(box: Box) -> None:
    session = await box.open()
    output, code = await box.run(session, "sleep 1000 & echo $! > /dev/null; echo bg")
    assert output.endswith(b"bg\n")
    assert code == 0
    assert (await box.run(session, "kill %1; wait; echo on"))[0].endswith(b"on\n")


async def test_ten_megabytes_are_kept_in_the_log_and_capped_in_the_result(box: Box) -> None:
    session = await box.open()
    run = await box.start(session, "head -c 10000000 /dev/zero | tr '\\0' x; echo", room=1000)
    assert await session.until(lambda: run.done, 120)
    assert (len(run.output), run.dropped, run.code) == (1000, 9_999_001, 0)
    assert run.start is not None
    assert run.end is not None
    at, whole = run.start, bytearray()
    while at < run.end:
        data, after = await box.sessions.log(session, at, min(3_000_000, run.end - at))
        assert after > at
        at = after
        whole += data
    assert whole == b"x" * 10_000_000 + b"\n"


async def test_the_log_holds_no_marks_and_goes_on_where_it_stopped(box: Box) -> None:
    session = await box.open()
    for number in range(3):
        await box.run(session, f"echo line {number}")
    data, after = await box.sessions.log(session, 0, 1 << 20)
    assert b"line 0\nline 1\nline 2\n" in data
    assert b"8888" not in data.partition(b"line 0")[2]
    assert await box.sessions.log(session, after, 1 << 20) == (b"", after)
    run = await box.start(session, "echo more")
    assert await session.until(lambda: run.done, PATIENCE_S)
    assert (await box.sessions.log(session, after, 1 << 20))[0] == b"more\n"


async def test_a_key_runs_once(box: Box) -> None:
    session = await box.open()
    for _ in range(2):
        run = await box.start(session, "echo $((n += 1))", key="k")
        assert await session.until(lambda run=run: run.done, PATIENCE_S)
        assert (bytes(run.output), run.code) == (b"1\n", 0)


async def test_a_session_survives_the_edge(config: Config) -> None:
    async with boxed(config, keep=True) as box:
        session = await box.open()
        await box.run(session, "X=kept; cd /tmp")
        run = await box.start(session, "echo begun; read -r y; echo $y", key="k")
        assert await session.until(lambda: b"begun" in run.output, PATIENCE_S)
    async with open_edge(config, keep=False) as edge:
        box.edge, box.sessions = edge, Sessions(edge)
        session = await box.sessions.get(box.id, "default")
        assert session.busy
        run, known = await box.sessions.start(box.id, session, "echo begun; read -r y; echo $y", key="k", room=1 << 20)
        assert known
        await session.type(b"after\n")
        assert await session.until(lambda: run.done, PATIENCE_S)
        assert run.code == 0
        assert await box.run(session, "echo $X $PWD $y") == (b"kept /tmp after\n", 0)
        again, existed = await box.sessions.open(box.id, SessionSpec())
        assert existed
        assert again is session


async def test_a_command_that_its_shell_has_not_read_when_the_edge_goes_runs_once(config: Config) -> None:
    async with boxed(config, keep=True) as box:
        session = await box.open()
        key = session.execution.key
        await box.edge.signal(box.id, key, signal.SIGSTOP, "leader")
        await box.start(session, "echo $((n += 1)); read -rt 0 && echo typed", key="k")
    async with open_edge(config, keep=False) as edge:
        box.edge, box.sessions = edge, Sessions(edge)
        session = await box.sessions.get(box.id, "default")
        assert session.busy
        run, known = await box.sessions.start(
            box.id, session, "echo $((n += 1)); read -rt 0 && echo typed", key="k", room=1 << 20
        )
        await edge.signal(box.id, key, signal.SIGCONT, "leader")
        assert await session.until(lambda: run.done, PATIENCE_S)
        assert known
        assert await box.sessions.output(session, run, 1 << 20) == b"1\n"
        assert await box.run(session, "echo $n") == (b"1\n", 0)


async def test_half_a_line_of_a_server_that_was_killed_is_forgotten(box: Box) -> None:
    session = await box.open()
    await session.type(b"__dsec_c=$'echo half")
    assert await box.run(session, "echo whole") == (b"whole\n", 0)


async def test_what_is_refused(box: Box) -> None:
    with pytest.raises(NotFound, match="no session"):
        await box.sessions.get(box.id, "nope")
    session = await box.open()
    for command in ("a\0b", "x" * ((1 << 20) + 1)):
        with pytest.raises(InvalidRequest):
            await box.start(session, command)
    with pytest.raises(Conflict):
        await box.sessions.open(box.id, SessionSpec(cwd="/tmp"))
    with pytest.raises(InvalidRequest, match="/no/such"):
        await box.sessions.open(box.id, SessionSpec(name="other", cwd="/no/such"))
    with pytest.raises(Unsupported, match="bash"):
        await box.sessions.open(box.id, SessionSpec(name="third", env={"PATH": "/no/such"}))
    await box.sessions.close(box.id, "default")
    await box.sessions.close(box.id, "default")
    with pytest.raises(NotFound):
        await box.sessions.get(box.id, "default")


async def test_several_waiters_and_one_that_leaves(box: Box) -> None:
    session = await box.open()
    run = await box.start(session, "read -r x; echo $x")
    waiters = [asyncio.create_task(session.until(lambda: run.done, PATIENCE_S)) for _ in range(3)]
    await asyncio.sleep(0.05)
    waiters.pop().cancel()
    await session.type(b"go\n")
    assert await asyncio.gather(*waiters) == [True, True]
    assert bytes(run.output) == b"go\n"


async def test_a_sandbox_that_ends_under_a_command(box: Box) -> None:
    session = await box.open()
    run = await box.start(session, "sleep 1000")
    waiter = asyncio.create_task(session.until(lambda: run.done, PATIENCE_S))
    await asyncio.sleep(0.05)
    await box.edge.delete(box.id)
    with pytest.raises(SandboxEnded):
        await waiter

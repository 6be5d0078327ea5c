"""Sessions as callers have them: through SDK and HTTP, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

import dsec
from dsec import AsyncSandbox, AsyncSession, PtySize, errors
from server_kit import PATIENCE_S, Server, serving

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state, on_exit="keep") as running:
        yield running


@pytest.fixture
async def box(server: Server) -> AsyncIterator[AsyncSandbox]:
    async with server.client() as client, await client.create("debian") as sandbox:
        yield sandbox


async def test_state_results_and_the_log(box: AsyncSandbox) -> None:
    session = await box.sessions.open("work", cwd="/tmp", env={"A": "1"})
    result = await session.run("pwd; echo $A; B=2; (exit 3)")
    assert (result.exit_code, result.output, result.data) == (3, "/tmp\n1\n", b"/tmp\n1\n")
    result = await session.run("echo $B; printf '\\377'")
    assert (result.output, result.data) == ("2\n\ufffd", b"2\n\xff")
    result = await session.run("seq 100000", output_bytes=10)
    assert (result.output, result.truncated) == ("1\n2\n3\n4\n5\n", True)
    log = await session.read_log(result.log_from, limit=result.log_to - result.log_from)
    assert log.data == b"".join(b"%d\n" % number for number in range(1, 100001))
    assert log.next_offset == result.log_to
    again = await (await box.sessions.get("work")).run("echo $B")
    assert again.output == "2\n"
    assert [info.name for info in await box.sessions.list()] == ["work"]
    await session.close()
    with pytest.raises(errors.NotFound):
        await session.run("true")
    with pytest.raises(errors.NotFound):
        await box.sessions.get("work")


async def test_a_timeout_stops_the_command_and_keeps_the_session(box: AsyncSandbox) -> None:
    session = await box.sessions.open()
    result = await session.run("X=1; echo begun; sleep 1000; echo next", command_timeout_s=0.5)
    assert (result.timed_out, result.ended, result.exit_code) == (True, False, 130)
    assert result.output == "begun\n\n"
    result = await session.run("bash -c 'trap \"\" INT; sleep 1000'", command_timeout_s=0.2)
    assert (result.timed_out, result.ended, result.exit_code) == (True, False, 137)
    assert (await session.run("echo $X")).output == "1\n"


async def test_results_are_had_again_by_their_key(box: AsyncSandbox) -> None:
    session = await box.sessions.open()
    for key in ("a", "b", "c", "d"):
        await session.run(f"printf '{key}\\033]8888;'; echo ran >> /tmp/ran", key=key)
    for key in ("a", "b", "c", "d"):
        result = await session.run("", key=key)
        assert (result.output, result.truncated, result.exit_code) == (f"{key}\033]8888;", False, 0)
    result = await session.run("", key="a", output_bytes=1)
    assert (result.output, result.truncated) == ("a", True)
    assert (await session.run("wc -l < /tmp/ran")).output == "4\n"


async def test_interrupts_at_any_moment_in_many_sessions(box: AsyncSandbox) -> None:
    async def work(number: int) -> None:
        choose = random.Random(number)
        session = await box.sessions.open(f"s{number}")
        for step in range(30):
            draw = choose.random()
            if draw < 0.4:
                command = choose.choice(("sleep 1000", "false | true; while :; do :; done", "yes > /dev/null"))
                result = await session.run(command, command_timeout_s=0.0001 + choose.random() * 0.03)
                assert (result.timed_out, result.ended) == (True, False), (number, step, result)
            else:
                result = await session.run(f"seq {step * 50}; (exit {step})")
                assert result.exit_code == step, (number, step, result)
                assert result.output == "".join(f"{line}\n" for line in range(1, step * 50 + 1)), (number, step)

    await asyncio.gather(*(work(number) for number in range(6)))


async def test_endless_output_is_stopped(box: AsyncSandbox) -> None:
    session = await box.sessions.open()
    result = await session.run("yes", output_bytes=4)
    assert (result.output, result.truncated, result.output_limit, result.timed_out) == ("y\ny\n", True, True, False)
    assert (await session.run("echo on")).output == "on\n"


async def test_another_users_program_is_stopped_too(box: AsyncSandbox) -> None:
    session = await box.sessions.open(user="nobody", cwd="/tmp")
    assert (await session.run("id -un")).output == "nobody\n"
    result = await session.run("bash -c 'trap \"\" INT; sleep 1000'", command_timeout_s=0.2)
    assert (result.timed_out, result.ended, result.exit_code) == (True, False, 137)


async def test_other_arguments_under_a_name(box: AsyncSandbox) -> None:
    session = await box.sessions.open()
    with pytest.raises(errors.Conflict, match="other arguments"):
        await box.sessions.open(cwd="/tmp")
    assert (await session.run("exit")).ended
    assert (await (await box.sessions.open(cwd="/tmp")).run("pwd")).output == "/tmp\n"


async def test_many_open_one_session_at_once(box: AsyncSandbox) -> None:
    sessions = await asyncio.gather(*(box.sessions.open() for _ in range(8)))
    assert (await sessions[0].run("X=1; echo $$")).output == (await sessions[7].run("echo $$")).output
    assert len(await box.sessions.list()) == 1


async def shown(session: AsyncSession, text: bytes) -> None:
    """Wait until it is in the log; the test's own timeout is the bound."""
    async with asyncio.timeout(PATIENCE_S):
        while text not in (await session.read_log()).data:  # noqa: ASYNC110  what it looks at is elsewhere
            await asyncio.sleep(0.02)


async def test_interrupt_and_input_from_beside(box: AsyncSandbox) -> None:
    session = await box.sessions.open()
    with pytest.raises(errors.Conflict, match="nothing runs"):
        await session.send("no\n")
    running = asyncio.create_task(session.run("echo ready; read -r x; echo got $x; sleep 1000"))
    await shown(session, b"ready")
    with pytest.raises(errors.Conflict) as caught:
        await session.run("echo no")
    assert caught.value.details["session_busy"] is True
    await session.send("a line\n")
    await shown(session, b"got")
    assert (await session.info()).busy
    assert not (await session.interrupt()).busy
    result = await running
    assert (result.exit_code, result.output) == (130, "ready\ngot a line\n\n")


async def test_a_shell_that_left_is_replaced_when_it_is_opened_again(box: AsyncSandbox) -> None:
    session = await box.sessions.open()
    result = await session.run("echo bye; exit 7")
    assert (result.exit_code, result.ended) == (7, True)
    assert result.output.startswith("bye\n")
    with pytest.raises(errors.Conflict) as caught:
        await session.run("echo no")
    assert caught.value.details["session_ended"] is True
    assert (await (await box.sessions.open()).run("echo fresh")).output == "fresh\n"


async def test_a_command_goes_on_through_a_killed_server_and_runs_once(server: Server, box: AsyncSandbox) -> None:
    session = await box.sessions.open()
    running = asyncio.create_task(session.run("X=kept; echo begun >> /tmp/runs; sleep 3; echo $X; (exit 5)"))
    (await box.commands.run("until test -s /tmp/runs; do sleep 0.05; done", command_timeout_s=PATIENCE_S)).check()
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    result = await running
    assert (result.exit_code, result.output, result.truncated) == (5, "kept\n", False)
    assert (await session.run("cat /tmp/runs; echo $X")).output == "begun\nkept\n"


async def test_sessions_are_listed_after_a_killed_server(server: Server, box: AsyncSandbox) -> None:
    """Also against a terminal that writes what a session does: under another's name, or one of nobody's."""
    work, odd = await box.sessions.open("work"), await box.sessions.open("a b/\u00e9")
    forged = "".join(f"\\033]8888;{'0' * 32};r;{name.encode().hex()}\\007" for name in ("ghost", "work"))
    for name in ("forged", "plain"):
        text = forged if name == "forged" else "hello"
        await box.commands.start(["sh", "-c", f"printf '{text}'; exec sleep 1000"], pty=PtySize(), key=name)
    running = asyncio.create_task(work.run("sleep 1000"))
    while not (await work.info()).busy:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    for _ in range(2):
        found = {info.name: (info.busy, info.ended) for info in await box.sessions.list()}
        assert found == {"work": (True, False), odd.name: (False, False)}
    await work.interrupt()
    assert (await running).exit_code == 130
    await odd.close()
    assert [info.name for info in await box.sessions.list()] == ["work"]


def test_the_sync_client_has_them_too(server: Server) -> None:
    endpoint = server.endpoint()
    with dsec.Client(endpoint.url, endpoint.api_key) as client, client.create("debian") as sandbox:
        session = sandbox.sessions.open()
        assert isinstance(session, dsec.Session)
        assert session.run("cd /tmp; pwd").output == "/tmp\n"
        assert sandbox.sessions.get().run("pwd").exit_code == 0


async def test_bad_requests(server: Server, box: AsyncSandbox) -> None:
    await box.sessions.open()
    base = f"{server.url}/v1/sandboxes/{box.id}/sessions"
    headers = {"Authorization": f"Bearer {server.endpoint().api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def status(method: str, path: str, body: bytes = b"") -> int:
            async with http.request(method, base + path, data=body) as response:
                assert (await response.json())["code"]
                return response.status

        assert await status("POST", "", b"{") == 400
        assert await status("POST", "", b'{"nmae": "x"}') == 400
        assert await status("POST", "", b'{"name": ""}') == 400
        assert await status("POST", "/default/run", b'{"command": 1}') == 400
        assert await status("POST", "/default/run", b'{"command": "a\\u0000b"}') == 400
        assert await status("POST", "/default/run", b'{"command": "true", "output_bytes": -1}') == 400
        assert await status("POST", "/default/run", b'{"command": "true", "command_timeout_s": 0}') == 400
        assert await status("POST", "/default/run?x=1", b'{"command": "true"}') == 400
        assert await status("GET", "/default/run") == 405
        assert await status("POST", "/default/nope") == 404
        assert await status("POST", "/nope/run", b'{"command": "true"}') == 404
        assert await status("GET", "/default/log?offset=-1") == 400
        assert await status("GET", "/default/log?limit=0") == 400
        assert await status("GET", "/default/log?limit=999999999999") == 400

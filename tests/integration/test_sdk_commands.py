"""Commands through the SDK, over a real server: results, streams, input, keys, limits of time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served

from dsec import AsyncSandbox, Cause, CommandFailed, CommandResult, Output
from dsec.errors import (
    Conflict,
    InvalidRequest,
    RequestTimeout,
    SandboxEnded,
    SandboxNotFound,
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


@pytest.fixture
async def box(server: Served) -> AsyncIterator[AsyncSandbox]:
    async with server.client() as client, await client.create("base") as box:
        yield box


async def test_a_result(box: AsyncSandbox) -> None:
    result = await box.commands.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
    assert (result.stdout_bytes, result.stderr_bytes) == (b"out\n", b"err\n")
    assert result.cause is Cause.EXITED
    assert not result.infra
    assert not result.ok
    assert result.wall_s > 0
    with pytest.raises(CommandFailed, match="exit code 7") as caught:
        result.check()
    assert caught.value.result is result
    good = await box.commands.run(["true"])
    assert good.check() is good


async def test_text_runs_in_a_shell_and_argv_does_not(box: AsyncSandbox) -> None:
    assert (await box.commands.run("echo a; echo b")).stdout == "a\nb\n"
    assert (await box.commands.run(["echo", "a; echo b", "$HOME"])).stdout == "a; echo b $HOME\n"


async def test_output_is_bytes_and_text_a_view(box: AsyncSandbox) -> None:
    result = await box.commands.run(["printf", "a\\377\\000b"])
    assert result.stdout_bytes == b"a\xff\x00b"
    assert result.stdout == "a\ufffd\x00b"


async def test_env_cwd_user_and_merge(box: AsyncSandbox) -> None:
    result = await box.commands.run("env; pwd; id -u", env={"WORD": "h\u00e9"}, cwd="/tmp", user="nobody")
    assert "WORD=h\u00e9\n" in result.stdout
    assert result.stdout.endswith("/tmp\n65534\n")
    merged = await box.commands.run("echo a; echo b >&2", merge_stderr=True)
    assert (merged.stdout, merged.stderr) == ("a\nb\n", "")


async def test_ends_that_are_no_exits(box: AsyncSandbox) -> None:
    late = await box.commands.run("echo partial; sleep 60", command_timeout_s=0.2)
    assert (late.cause, late.stdout) == (Cause.COMMAND_TIMEOUT, "partial\n")
    loud = await box.commands.run(["yes"], output_bytes=1000)
    assert (loud.cause, loud.truncated, len(loud.stdout_bytes)) == (Cause.OUTPUT_LIMIT, True, 1000)
    missing = await box.commands.run(["/no/such"])
    assert (missing.cause, missing.exit_code) == (Cause.START_FAILED, 127)
    assert "/no/such" in missing.message
    shot = await box.commands.run("kill -15 $$")
    assert (shot.cause, shot.exit_code, shot.signal) == (Cause.SIGNALED, 143, 15)


async def test_stdin(box: AsyncSandbox) -> None:
    assert (await box.commands.run(["cat"], stdin="text")).stdout == "text"
    assert (await box.commands.run(["cat"], stdin=b"")).stdout == ""
    large = bytes(range(256)) * 8192
    assert (await box.commands.run(["cat"], stdin=large)).stdout_bytes == large
    assert (await box.commands.run(["true"], stdin=large)).exit_code == 0  # which doesn't read it
    assert (await box.commands.run(["cat"])).stdout == ""


async def test_callbacks_get_pieces_and_the_result_all(box: AsyncSandbox) -> None:
    out: list[bytes] = []
    err: list[bytes] = []

    async def slow(data: bytes) -> None:
        await asyncio.sleep(0)
        err.append(data)

    result = await box.commands.run("seq 1 5000; echo x >&2", on_stdout=out.append, on_stderr=slow)
    assert b"".join(out) == result.stdout_bytes == b"".join(b"%d\n" % n for n in range(1, 5001))
    assert b"".join(err) == b"x\n"


async def test_what_json_cannot_hold(box: AsyncSandbox) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        await box.commands.run(["echo", "\udcff"])
    with pytest.raises(InvalidRequest, match="NUL"):
        await box.commands.run(["echo", "\0"])
    with pytest.raises(InvalidRequest, match="128 KiB"):
        await box.commands.run(["echo", "x" * 200_000])


async def test_a_handle(box: AsyncSandbox) -> None:
    command = await box.commands.start("echo one; echo two >&2; sleep 0.1; echo three; exit 4")
    assert command.pid is not None
    assert command.pid > 1
    pieces = [piece async for piece in command]
    assert b"".join(p.data for p in pieces if not p.stderr) == b"one\nthree\n"
    assert Output(b"two\n", stderr=True) in pieces
    result = await command.wait()
    assert (result.exit_code, result.stdout_bytes) == (4, b"")
    assert await command.wait() is result


async def test_waiting_collects_what_was_not_iterated_over(box: AsyncSandbox) -> None:
    command = await box.commands.start(["cat"], stdin=True)
    await command.write_stdin("first")
    async for piece in command:
        assert piece.text == "first"
        break
    await command.write_stdin(b"second")
    await command.close_stdin()
    await command.close_stdin()
    assert (await command.wait()).stdout == "second"
    await command.write_stdin("dropped")


async def test_much_stdin_through_a_handle(box: AsyncSandbox) -> None:
    data = bytes(range(256)) * 4096
    command = await box.commands.start(["cat"], stdin=True)
    collected = asyncio.create_task(command.wait())
    await asyncio.gather(*(command.write_stdin(data[i : i + (1 << 18)]) for i in range(0, len(data), 1 << 18)))
    await command.close_stdin()
    assert (await collected).stdout_bytes == data


async def test_killing(box: AsyncSandbox) -> None:
    command = await box.commands.start(["sleep", "60"])
    await command.kill()
    result = await command.wait()
    assert (result.cause, result.exit_code) == (Cause.KILLED, 137)
    await command.kill()
    gentle = await box.commands.start(["sleep", "60"])
    await gentle.kill("leader")
    assert (await gentle.wait()).signal == 15


async def test_a_handle_as_a_context_ends_the_command(server: Served, box: AsyncSandbox) -> None:
    async with await box.commands.start(["sleep", "60"], key="k") as command:
        assert command.key == "k"
    assert not server.edge._lives.sandboxes[box.id].commands
    again = await box.commands.attach("k")
    assert (await again.wait()).cause is Cause.KILLED  # that is on record


async def test_keys_survive_the_process_that_chose_them(server: Served, box: AsyncSandbox) -> None:
    first = await box.commands.run("echo $$", key="step 3/a")
    async with server.client() as other:
        same = await other.connect(box.id)
        assert await same.commands.run("echo $$", key="step 3/a") == first
        command = await same.commands.attach("step 3/a")
        assert (await command.wait()).stdout == first.stdout
        tail = await same.commands.attach("step 3/a", stdout_from=1)
        assert (await tail.wait()).stdout == first.stdout[1:]
        with pytest.raises(Conflict):
            await same.commands.run("echo other", key="step 3/a")
        await command.release()
        assert (await (await same.commands.attach("step 3/a")).wait()).stdout == first.stdout
        await other.kill(box.id)
        assert await same.commands.run("echo $$", key="step 3/a") == first  # after its sandbox's end, too


async def test_attaching_to_a_running_command(server: Served, box: AsyncSandbox) -> None:
    command = await box.commands.start(["cat"], stdin=True, key="k")
    await command.write_stdin("one ")
    await command.detach()
    async with server.client() as other:
        again = await (await other.connect(box.id)).commands.attach("k")
        await again.write_stdin("two")
        await again.close_stdin()
        assert (await again.wait()).stdout == "one two"
    assert (await command.wait()).stdout == "one two"


async def test_chosen_keys_are_released(server: Served, box: AsyncSandbox) -> None:
    """A thousand commands leave a handful of results behind."""
    table = server.kit.host.guests[box.id].operations
    for _ in range(150):
        await box.commands.run(["true"])
    assert len(table) <= 3
    await asyncio.gather(*(box.commands.run(["true"]) for _ in range(200)))
    assert len(table) <= 66


async def test_a_request_timeout_leaves_the_command_running(server: Served, box: AsyncSandbox) -> None:
    with pytest.raises(RequestTimeout) as caught:
        await box.commands.run("sleep 0.5; echo done", request_timeout_s=0.1)
    assert caught.value.infra
    assert (await (await box.commands.attach(caught.value.details["key"])).wait()).stdout == "done\n"
    command = await box.commands.start(["cat"], stdin=True)
    with pytest.raises(RequestTimeout):
        await command.wait(request_timeout_s=0.05)
    await command.write_stdin("late")
    await command.close_stdin()
    assert (await command.wait()).stdout == "late"


async def test_a_cancelled_wait_can_be_repeated(box: AsyncSandbox) -> None:
    command = await box.commands.start("seq 1 20000; sleep 0.3; seq 20001 40000")
    expected = b"".join(b"%d\n" % n for n in range(1, 40001))
    received = b""
    while len(received) < len(expected):
        try:
            async with asyncio.timeout(0.05):
                async for piece in command:
                    received += piece.data
        except TimeoutError:
            continue
    assert received == expected
    assert (await command.wait()).exit_code == 0


async def test_the_end_of_the_sandbox_is_an_error(server: Served, box: AsyncSandbox) -> None:
    command = await box.commands.start(["sleep", "60"])
    await box.kill()
    for _ in range(2):
        with pytest.raises(SandboxEnded) as caught:
            await command.wait()
        assert caught.value.details["cause"] == "deleted"
    with pytest.raises(SandboxEnded):
        await box.commands.run(["true"])
    async with server.client() as client:
        with pytest.raises(SandboxNotFound):
            await client.connect("0" * 24)


async def test_many_at_once(box: AsyncSandbox) -> None:
    results = await asyncio.gather(*(box.commands.run(["echo", str(n)]) for n in range(300)))
    assert [int(result.stdout) for result in results] == list(range(300))
    assert all(isinstance(result, CommandResult) for result in results)

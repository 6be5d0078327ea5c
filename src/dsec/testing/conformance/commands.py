"""Commands: what they get, what they give, how they end."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress

import pytest

from dsec.errors import InvalidRequest
from dsec.spec.operations import EndKind, ExecFlag, Stage
from dsec.testing.conformance.kit import (
    PATIENCE_S,
    Factory,
    Feature,
    Sandboxes,
    collect,
    needs,
    ok,
    request,
    run,
    shell,
    start_failed,
    until,
)


class TestCommands:
    """Streams, environment, users, ends, limits. Commands that any backend can imitate."""

    async def test_success_and_failure(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        assert ok(await run(channel, "true")) == b""
        outcome = await run(channel, "false")
        assert (outcome.end.kind, outcome.end.code) == (EndKind.EXITED, 1)
        assert (await shell(channel, "exit 255")).end.code == 255

    async def test_the_end_says_what_it_took(self, sandboxes: Sandboxes) -> None:
        end = (await run((await sandboxes.one()).channel, "sleep", "0.05")).end
        assert end.wall_us >= 50_000
        assert end.cpu_us <= end.wall_us * 64
        assert end.max_rss_bytes > 0

    async def test_a_binary_that_is_not_there(self, sandboxes: Sandboxes, factory: Factory) -> None:
        channel = (await sandboxes.one()).channel
        for name in ("no-such-program", "/no/such/program"):
            start_failed(factory, (await run(channel, name)).end, Stage.EXEC, errno.ENOENT)

    async def test_a_file_that_is_no_program(self, sandboxes: Sandboxes, factory: Factory) -> None:
        end = (await run((await sandboxes.one()).channel, "/etc/passwd")).end
        start_failed(factory, end, Stage.EXEC, errno.EACCES)

    @pytest.mark.parametrize("user", [b"no-such-user", b"root:no-such-group"])
    async def test_a_user_that_is_not_there(self, sandboxes: Sandboxes, factory: Factory, user: bytes) -> None:
        start_failed(factory, (await run((await sandboxes.one()).channel, "true", user=user)).end, Stage.USER)

    async def test_a_directory_that_is_not_there(self, sandboxes: Sandboxes, factory: Factory) -> None:
        channel = (await sandboxes.one()).channel
        end = (await run(channel, "true", cwd=b"/no/such/directory")).end
        start_failed(factory, end, Stage.CWD, errno.ENOENT)
        end = (await run(channel, "true", cwd=b"/etc/passwd")).end
        start_failed(factory, end, Stage.CWD, errno.ENOTDIR)

    async def test_env_cwd_and_user(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        lines = ok(await run(channel, "env", env=(b"A=1", b"B=x y=\xc3\xa4", b"C="))).split(b"\n")
        assert {b"A=1", b"B=x y=\xc3\xa4", b"C="} <= set(lines)
        assert ok(await run(channel, "pwd", cwd=b"/usr/bin")) == b"/usr/bin\n"
        assert ok(await run(channel, "pwd")) == b"/\n"
        assert ok(await run(channel, "id", "-u")) == b"0\n"
        assert ok(await run(channel, "id", "-u", user=b"nobody")) == b"65534\n"
        assert ok(await run(channel, "id", "-u", user=b"1234:2345")) == b"1234\n"
        assert ok(await run(channel, "id", "-g", user=b"1234:2345")) == b"2345\n"

    async def test_arguments_and_variables_are_bytes(self, sandboxes: Sandboxes, factory: Factory) -> None:
        needs(factory, Feature.BYTES)
        channel = (await sandboxes.one()).channel
        assert ok(await run(channel, b"echo", b"\xff\xfe")) == b"\xff\xfe\n"
        assert b"B=\xff" in ok(await run(channel, "env", env=(b"B=\xff",))).split(b"\n")

    async def test_arguments_pass_no_shell(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        assert ok(await run(channel, "echo", "\xe4 $HOME ; *", "")) == "\xe4 $HOME ; * \n".encode()
        words = ["x" * 100_000] * 8
        assert len(ok(await run(channel, "echo", *words))) == 800_008

    async def test_both_streams_apart_and_merged(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        script = "echo out; echo err >&2; echo out"
        outcome = await shell(channel, script)
        assert (outcome.out, outcome.err) == (b"out\nout\n", b"err\n")
        outcome = await shell(channel, script, flags=ExecFlag.MERGE)
        assert (outcome.out, outcome.err) == (b"out\nerr\nout\n", b"")

    async def test_output_that_is_no_text(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        assert ok(await run(channel, "printf", r"\377\000\376")) == b"\xff\0\xfe"

    @pytest.mark.parametrize("last", [1, 13_000, 400_000])
    async def test_output_of_any_size(self, sandboxes: Sandboxes, last: int) -> None:
        channel = (await sandboxes.one()).channel
        expected = b"".join(b"%d\n" % number for number in range(1, last + 1))
        assert ok(await run(channel, "seq", "1", str(last))) == expected
        assert ok(await run(channel, "seq", "1", str(last), key=b"k")) == expected

    @pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
    async def test_stdin_of_any_size(self, sandboxes: Sandboxes, size: int) -> None:
        data = (bytes(range(256)) * (size // 256 + 1))[:size]
        assert ok(await run((await sandboxes.one()).channel, "cat", stdin=data)) == data

    async def test_stdin_is_empty_unless_asked_for(self, sandboxes: Sandboxes) -> None:
        assert ok(await run((await sandboxes.one()).channel, "cat")) == b""

    async def test_stdin_for_a_process_that_does_not_want_it(self, sandboxes: Sandboxes) -> None:
        assert ok(await run((await sandboxes.one()).channel, "true", stdin=bytes(1_000_000))) == b""

    @pytest.mark.parametrize("cap", [0, 1, 100_000])
    async def test_output_is_capped_and_says_so(self, sandboxes: Sandboxes, cap: int) -> None:
        outcome = await run((await sandboxes.one()).channel, "yes", output_cap=cap)
        assert outcome.end.kind is EndKind.OUTPUT_LIMIT
        assert outcome.end.truncated
        assert outcome.end.dropped_bytes > 0
        assert outcome.out == (b"y\n" * cap)[:cap]

    async def test_output_just_at_the_cap_is_whole(self, sandboxes: Sandboxes) -> None:
        outcome = await run((await sandboxes.one()).channel, "head", "-c", "70000", "/dev/zero", output_cap=70_000)
        assert len(ok(outcome)) == 70_000
        assert not outcome.end.truncated

    async def test_a_timeout_keeps_what_there_was(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        ok(await shell(channel, "sleep 0"))  # the first start of a program is the slowest
        for timeout_ms in (1000, 10_000, 60_000):  # a host that stands still may write nothing within a second
            outcome = await shell(channel, "echo part; sleep 1000", timeout_ms=timeout_ms)
            assert outcome.end.kind is EndKind.TIMEOUT
            assert outcome.end.wall_us >= timeout_ms * 1000
            if outcome.out:
                break
        assert outcome.out == b"part\n"

    async def test_a_signal_from_inside(self, sandboxes: Sandboxes) -> None:
        end = (await shell((await sandboxes.one()).channel, "kill -9 $$")).end
        assert (end.kind, end.code) == (EndKind.SIGNALED, 9)

    async def test_signals_from_outside(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        for signal, scope in ((15, 0), (2, 1)):
            operation = await channel.start(request("sleep", "1000"))
            assert await operation.started()
            await operation.signal(signal, scope)
            end = (await collect(operation)).end
            assert (end.kind, end.code) == (EndKind.SIGNALED, signal)
        operation = await channel.start(request("sleep", "1000"))
        await operation.signal(9, 2)
        assert (await collect(operation)).end.kind is EndKind.KILLED

    async def test_many_at_once(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        outcomes = await asyncio.gather(*(run(channel, "echo", str(number)) for number in range(40)))
        assert [ok(outcome) for outcome in outcomes] == [b"%d\n" % number for number in range(40)]


SLEEPER = "98765"
"""Seconds that nothing else sleeps: how a process is found again."""

FIND = f"grep -lsxz '[{SLEEPER[0]}]{SLEEPER[1:]}' /proc/[0-9]*/cmdline; [ $? -lt 127 ]"
"""Those with this argument, but not itself: one program, as a machine on an imitated CPU may have many processes."""


async def sleepers(sandboxes: Sandboxes, sandbox_id: str) -> int:
    """How many processes sleep so long, by /proc inside."""
    found = await shell(sandboxes.instances[sandbox_id].channel, FIND)
    return len(ok(found).splitlines())


async def there_are(sandboxes: Sandboxes, sandbox_id: str, count: int) -> None:
    """Wait for so many that sleep: a child has its program, and is gone, a moment after its parent goes on."""
    found = -1
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while (found := await sleepers(sandboxes, sandbox_id)) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert found == count


class TestProcesses:
    """Trees of processes: what a command started ends, or lives on, as it was said."""

    @pytest.fixture(autouse=True)
    def _real(self, factory: Factory) -> None:
        needs(factory, Feature.PROCESSES)

    @pytest.mark.parametrize("how", ["timeout", "kill", "output"])
    async def test_a_command_is_ended_whole_double_forks_too(self, sandboxes: Sandboxes, how: str) -> None:
        instance = await sandboxes.one()
        script = f"(setsid sh -c 'setsid sleep {SLEEPER} & sleep {SLEEPER}' &); "
        script += "yes" if how == "output" else f"sleep {SLEEPER}"
        limits = {"timeout": {"timeout_ms": 700}, "output": {"output_cap": 1000}, "kill": {}}[how]
        operation = await instance.channel.start(request("sh", "-c", script, **limits))
        if how == "kill":
            await there_are(sandboxes, instance.sandbox_id, 3)
            await operation.signal(9, 2)
        end = (await collect(operation)).end
        expected = {"timeout": EndKind.TIMEOUT, "output": EndKind.OUTPUT_LIMIT, "kill": EndKind.KILLED}
        assert end.kind is expected[how]
        assert await sleepers(sandboxes, instance.sandbox_id) == 0

    async def test_background_processes_live_on(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        outcome = await shell(instance.channel, f"sleep {SLEEPER} & echo done")  # it holds the pipes open
        assert ok(outcome) == b"done\n"
        await there_are(sandboxes, instance.sandbox_id, 1)

    async def test_background_processes_end_where_that_was_asked_for(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        script = f"sleep {SLEEPER} & (setsid sleep {SLEEPER} &); echo done"
        outcome = await shell(instance.channel, script, flags=ExecFlag.KILL_LEFTOVERS)
        assert ok(outcome) == b"done\n"
        assert await sleepers(sandboxes, instance.sandbox_id) == 0

    async def test_scopes(self, sandboxes: Sandboxes) -> None:
        script = f"sleep {SLEEPER} & echo up; wait"
        for scope, left in ((0, 1), (1, 0)):
            instance = await sandboxes.create()
            operation = await instance.channel.start(request("sh", "-c", script))
            async for item in operation.read():
                assert item
                break
            await operation.signal(15, scope)
            assert (await collect(operation)).end.kind is EndKind.SIGNALED
            await there_are(sandboxes, instance.sandbox_id, left)
            await operation.release()

    async def test_a_process_that_ignores_sigterm_ends_by_sigkill(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        script = f"trap '' TERM; echo up; sleep {SLEEPER} & wait; wait"
        operation = await instance.channel.start(request("sh", "-c", script))
        async for item in operation.read():
            assert item
            break
        await there_are(sandboxes, instance.sandbox_id, 1)
        await operation.signal(15, 1)
        assert await sleepers(sandboxes, instance.sandbox_id) == 1
        assert operation.end is None
        await operation.signal(9, 2)
        assert (await collect(operation)).end.kind is EndKind.KILLED
        assert await sleepers(sandboxes, instance.sandbox_id) == 0

    async def test_release_ends_a_running_command_whole(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        operation = await instance.channel.start(request("sh", "-c", f"sleep {SLEEPER} & echo up; wait"))
        async for item in operation.read():
            assert item
            break
        await operation.release()
        await there_are(sandboxes, instance.sandbox_id, 0)

    async def test_an_argument_that_is_too_long(self, sandboxes: Sandboxes, factory: Factory) -> None:
        try:
            end = (await run((await sandboxes.one()).channel, "echo", "x" * 200_000)).end
        except InvalidRequest:
            assert Feature.CHECK not in factory.features  # a server says so before it gets that far
        else:
            start_failed(factory, end, Stage.EXEC, errno.E2BIG)

    async def test_a_zombie_storm_is_reaped(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        ok(await shell(instance.channel, "i=0; while [ $i -lt 300 ]; do (true &) ; i=$((i+1)); done"))
        states = "cat /proc/[0-9]*/stat 2>/dev/null; true"
        async with asyncio.timeout(PATIENCE_S):
            while b") Z " in ok(await shell(instance.channel, states)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def test_limits_of_open_files(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create(open_files=77)
        assert ok(await shell(instance.channel, "ulimit -n", open_files=77)) == b"77\n"

    async def test_usage_grows(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        before = instance.usage()
        ok(await shell(instance.channel, "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done"))
        await until(lambda: instance.usage().cpu_us > before.cpu_us)
        assert instance.usage().pids >= 1

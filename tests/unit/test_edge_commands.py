"""Commands through the edge: output, defaults, keys, signals, and callers that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_kit import Kit, finish, spec, until

from dsec.edge.config import EdgeConfig
from dsec.edge.node import Edge
from dsec.errors import Conflict, DsecError, InvalidRequest, NotFound, OutcomeUnknown, SandboxEnded, SandboxLost
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecSpec, ExecStatus, State


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.fixture
async def edge(kit: Kit) -> AsyncIterator[Edge]:
    async with kit.edge() as opened:
        yield opened


@pytest.fixture
async def box(edge: Edge) -> str:
    return (await edge.create(spec(env={"A": "sandbox", "B": "sandbox"}), project="p")).sandbox.id


async def run(edge: Edge, box: str, *argv: str, **options: object) -> tuple[bytes, bytes, ExecStatus]:
    return await finish(await edge.exec(box, ExecSpec(argv=list(argv), **options)))  # type: ignore[arg-type]


async def test_output_and_exit_code(edge: Edge, box: str) -> None:
    out, err, status = await run(edge, box, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (out, err) == (b"out\n", b"err\n")
    assert (status.exit_code, status.cause, status.signal, status.infra) == (3, Cause.EXITED, None, False)
    assert (status.stdout_bytes, status.stderr_bytes) == (4, 4)


async def test_own_values_over_the_sandboxs_over_the_defaults(kit: Kit, edge: Edge) -> None:
    box = (await edge.create(spec(env={"A": "sandbox", "B": "sandbox"}, workdir="/tmp"), project="p")).sandbox.id
    out, _, _ = await run(edge, box, "env", env={"B": "own"})
    values = dict(line.split(b"=", 1) for line in out.splitlines())
    assert values[b"A"] == b"sandbox"
    assert values[b"B"] == b"own"
    assert values[b"HOME"] == b"/root"
    assert b"/usr/bin" in values[b"PATH"]
    assert (await run(edge, box, "pwd"))[0] == b"/tmp\n"
    assert (await run(edge, box, "pwd", cwd="/etc"))[0] == b"/etc\n"


async def test_started_says_the_pid(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["sleep", "50"]))
    assert isinstance(await command.started(), int)
    missing = await edge.exec(box, ExecSpec(argv=["no-such-program"]))
    assert await missing.started() is None
    _, _, status = await finish(missing)
    assert (status.exit_code, status.cause) == (127, Cause.START_FAILED)
    assert "no-such-program" in status.message
    await edge.signal(box, command.key, 9)
    assert (await finish(command))[2].cause is Cause.KILLED


async def test_a_start_that_fails_names_what_is_wrong(edge: Edge, box: str) -> None:
    _, _, status = await run(edge, box, "true", user="nobody-here")
    assert (status.exit_code, status.cause) == (126, Cause.START_FAILED)
    assert "nobody-here" in status.message
    _, _, status = await run(edge, box, "true", cwd="/nowhere")
    assert status.exit_code == 126
    assert "/nowhere" in status.message


async def test_timeout_and_output_limit(edge: Edge, box: str) -> None:
    out, _, status = await run(edge, box, "sh", "-c", "echo before; sleep 100", command_timeout_s=0.5)
    assert out == b"before\n"
    assert (status.cause, status.exit_code, status.signal) == (Cause.COMMAND_TIMEOUT, 137, 9)
    out, _, status = await run(edge, box, "yes", output_bytes=100_000)
    assert status.cause is Cause.OUTPUT_LIMIT
    assert len(out) == status.stdout_bytes <= 100_000


async def test_a_sandboxs_defaults_bound_its_commands(edge: Edge) -> None:
    made = await edge.create(spec(command_timeout_s=0.5, output_bytes=10), project="p")
    assert (await run(edge, made.sandbox.id, "sleep", "100"))[2].cause is Cause.COMMAND_TIMEOUT
    assert (await run(edge, made.sandbox.id, "echo", "x" * 100))[2].cause is Cause.OUTPUT_LIMIT


async def test_stdin(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["cat"], stdin=True))
    assert await command.write_stdin(b"hello ", 0) == 6
    assert await command.write_stdin(b"lo world", 3) == 11  # sent again from byte 3 on: only what is new counts
    with pytest.raises(InvalidRequest):
        await command.write_stdin(b"x", 99)
    assert command.stdin_offset == 11
    await command.close_stdin()
    out, _, _ = await finish(command)
    assert out == b"hello world"


@pytest.mark.parametrize(
    "bad",
    [
        {"argv": ["a\0"]},
        {"argv": [""]},
        {"argv": ["x"], "env": {"": "v"}},
        {"argv": ["x"], "cwd": "/\0"},
        {"argv": ["x"], "key": "~1"},
        {"argv": ["x"], "key": ""},
        {"argv": ["x" * 200_000]},
        {"argv": ["\ud800"]},
    ],
)
async def test_bad_requests_start_nothing(edge: Edge, box: str, bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        await edge.exec(box, ExecSpec(**bad))  # type: ignore[arg-type]


async def test_bytes_that_are_not_text_pass_both_ways(edge: Edge, box: str) -> None:
    out, _, _ = await run(edge, box, "echo", b"\xff\xfe".decode("utf-8", "surrogateescape"))
    assert out == b"\xff\xfe\n"


# --- keys ---


async def test_a_key_runs_once(edge: Edge, box: str) -> None:
    request = ExecSpec(argv=["sh", "-c", "echo $$"], key="k")
    both = await asyncio.gather(edge.exec(box, request), edge.exec(box, request))
    assert sorted(command.attached for command in both) == [False, True]
    results = [await finish(command) for command in both]
    assert results[0] == results[1]
    later = await edge.exec(box, request)
    assert later.attached
    assert await finish(later) == results[0]
    assert await finish(await edge.attach(box, "k")) == results[0]
    await edge.release(box, "k")
    await edge.release(box, "k")
    for recorded in (await edge.attach(box, "k"), await edge.exec(box, request)):
        assert recorded.attached
        assert await finish(recorded) == results[0]


@pytest.mark.parametrize("change", [{"argv": ["echo", "b"]}, {"env": {"X": "y"}}, {"merge_stderr": True}, {"cwd": "/"}])
async def test_a_key_goes_with_one_request(edge: Edge, box: str, change: dict[str, object]) -> None:
    base = {"argv": ["echo", "a"], "key": "k"}
    await finish(await edge.exec(box, ExecSpec(**base)))  # type: ignore[arg-type]
    with pytest.raises(Conflict):
        await edge.exec(box, ExecSpec(**{**base, **change}))  # type: ignore[arg-type]


async def test_keys_belong_to_one_sandbox(edge: Edge, box: str) -> None:
    other = (await edge.create(spec(), project="p")).sandbox.id
    assert not (await edge.exec(box, ExecSpec(argv=["true"], key="k"))).attached
    assert not (await edge.exec(other, ExecSpec(argv=["true"], key="k"))).attached


async def test_a_long_key_of_many_bytes(edge: Edge, box: str) -> None:
    request = ExecSpec(argv=["echo", "x"], key="ü€😀" * 40)
    first = await finish(await edge.exec(box, request))
    assert await finish(await edge.exec(box, request)) == first


async def test_keys_survive_the_edge(kit: Kit) -> None:
    request = ExecSpec(argv=["sh", "-c", "echo $$; sleep 0.3; exit 7"], key="k")
    edge = await kit.open()
    box = (await edge.create(spec(), project="p")).sandbox.id
    command = await edge.exec(box, request)
    pid = await command.started()
    await edge.close(keep=True)
    async with kit.edge() as edge:
        assert edge.get(box).state is State.RUNNING
        again = await edge.exec(box, request)
        assert again.attached
        assert again.key == "k"
        assert await again.started() == pid
        out, _, status = await finish(again)
        assert out == b"%d\n" % (pid or 0)
        assert status.exit_code == 7
        with pytest.raises(Conflict):
            await edge.exec(box, ExecSpec(argv=["echo"], key="k"))


async def test_reading_on_from_an_offset(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["seq", "1", "20000"], key="k"))
    whole, _, _ = await finish(command)
    assert len(whole) > 100_000
    rest, _, status = await finish(await edge.attach(box, "k"), stdout_from=70_000)
    assert rest == whole[70_000:]
    assert status.exit_code == 0


async def test_a_key_is_never_run_twice_even_when_its_output_is_gone(kit: Kit, edge: Edge, box: str) -> None:
    request = ExecSpec(argv=["sh", "-c", "echo x; exit 5"], key="k")
    await finish(await edge.exec(box, request))
    (operation,) = kit_channel(edge, box).operations()
    await operation.release()  # as the channel's own retention does
    out, _, status = await finish(await edge.exec(box, request))
    assert (out, status.exit_code) == (b"x\n", 5)
    with pytest.raises(Conflict):
        await edge.exec(box, ExecSpec(argv=["true"], key="k"))


async def test_only_so_many_results_are_kept(tmp_path: Path) -> None:
    kit = Kit(tmp_path, config=EdgeConfig(max_kept_commands=5))
    async with kit.edge() as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        running = await edge.exec(box, ExecSpec(argv=["sleep", "50"], key="running"))
        for n in range(30):
            await finish(await edge.exec(box, ExecSpec(argv=["echo", str(n)], key=str(n))))
        await until(lambda: len(kit_channel(edge, box).operations()) <= 6)
        assert await (await edge.attach(box, "running")).started() == await running.started()
        for n in (0, 7, 29):  # the guest has forgotten some: the trajectory hasn't
            assert (await finish(await edge.attach(box, str(n))))[0] == b"%d\n" % n


# --- signals and callers that go away ---


async def test_signals(edge: Edge, box: str) -> None:
    for signal, scope in ((15, "leader"), (2, "group"), (9, "all")):
        command = await edge.exec(box, ExecSpec(argv=["sleep", "50"], key=f"k{signal}"))
        await command.started()
        await edge.signal(box, command.key, signal, scope)
        _, _, status = await finish(command)
        assert (status.cause, status.exit_code) == (Cause.KILLED, 128 + signal)
        await edge.signal(box, command.key, 9)  # it has ended: no error
    _, _, status = await run(edge, box, "sh", "-c", "kill -11 $$")
    assert (status.cause, status.signal) == (Cause.SIGNALED, 11)
    for signal, scope in ((0, "leader"), (65, "leader"), (15, "all"), (15, "everyone")):
        with pytest.raises(InvalidRequest):
            await edge.signal(box, "k15", signal, scope)
    with pytest.raises(NotFound):
        await edge.signal(box, "nobody", 9)


async def test_a_command_without_a_key_is_forgotten_when_its_end_was_seen(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["true"]))
    assert command.key.startswith("~")
    await finish(command)
    assert not kit_channel(edge, box).operations()
    with pytest.raises(NotFound):
        await edge.attach(box, command.key)


async def test_a_reader_that_goes_away_neither_stops_nor_leaks_a_command(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["head", "-c", "2000000", "/dev/zero"]))
    events = command.events()
    await anext(events)
    await events.aclose()
    await until(lambda: not kit_channel(edge, box).operations())  # it ran to its end and was released


async def test_a_caller_that_goes_away_before_it_reads(edge: Edge, box: str) -> None:
    async def call() -> None:
        await finish(await edge.exec(box, ExecSpec(argv=["head", "-c", "2000000", "/dev/zero"])))

    caller = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: not kit_channel(edge, box).operations())


async def test_a_keyed_command_outlives_its_caller(edge: Edge, box: str) -> None:
    request = ExecSpec(argv=["sh", "-c", "sleep 0.1; echo done"], key="k")
    caller = asyncio.ensure_future(edge.exec(box, request))
    await asyncio.sleep(0)
    caller.cancel()
    out, _, _ = await finish(await edge.exec(box, request))
    assert out == b"done\n"


async def test_ending_the_sandbox_ends_its_readers_with_the_cause(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["sleep", "50"], key="k"))
    reader = asyncio.ensure_future(finish(command))
    await command.started()
    await edge.delete(box)
    with pytest.raises(SandboxEnded):
        await reader
    with pytest.raises(SandboxEnded):
        await edge.attach(box, "k")


async def test_a_sandbox_that_the_platform_ends_is_infra(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["sleep", "50"]))
    reader = asyncio.ensure_future(finish(command))
    await command.started()
    await edge.delete(box, Cause.PLATFORM_KILLED)
    with pytest.raises(SandboxLost) as caught:
        await reader
    assert caught.value.infra
    assert caught.value.details["cause"] == "platform_killed"


async def test_a_guest_that_breaks_the_protocol_ends_its_sandbox_and_says_so(tmp_path: Path) -> None:
    kit = Kit(tmp_path, config=EdgeConfig(lost_grace_s=0.02))
    async with kit.edge() as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        command = await edge.exec(box, ExecSpec(argv=["sleep", "50"]))
        await command.started()
        kit_channel(edge, box)._broken("forged frame")  # what a frame that isn't allowed leads to
        with pytest.raises(DsecError) as caught:
            await finish(command)
        assert isinstance(caught.value, SandboxEnded | OutcomeUnknown)
        await until(lambda: edge.get(box).state is State.ENDED)
        info = edge.get(box)
        assert info.cause is Cause.GUEST_EXITED
        assert "forged frame" in info.message
        assert not kit.left()


def kit_channel(edge: Edge, box: str):  # type: ignore[no-untyped-def]
    return edge._lives.sandboxes[box].running().channel

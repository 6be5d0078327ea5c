"""What dies, and what becomes of everything else: the server, the zygote, pid 1 inside, the client. Real sandboxes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient
from dsec.errors import DsecError, OutcomeUnknown, SandboxEnded, SandboxLost, Unavailable
from dsec.kernel import census, sysctl
from dsec.kernel.ledger import Ledger
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxInfo, SandboxSpec, State
from server_kit import PATIENCE_S, Server, end, serving, until

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=256 << 20, disk_bytes=256 << 20, pids=64)
SLOW = "echo begin; sleep 2; echo end; echo x >>/tmp/runs; exit 7"


@pytest.fixture
def server(debian_state: Path) -> Iterator[Server]:
    with serving(debian_state) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


def dsec(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, on the server's state."""
    return subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", *arguments],
        env=server.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


async def on_record(client: AsyncClient) -> dict[str, SandboxInfo]:
    """All sandboxes that the server knows, ended ones too."""
    return {info.id: info for info in await client.list(states=list(State))}


async def settled(server: Server, client: AsyncClient) -> dict[str, SandboxInfo]:
    """What is on record once nothing starts or ends: and that the host holds that and nothing else."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        known = await on_record(client)
        calm = {info.state for info in known.values()} <= {State.RUNNING, State.ENDED}
        difference = server.difference({name for name, info in known.items() if info.state is State.RUNNING})
        if calm and not difference:
            break
        assert time.monotonic() < deadline, difference or known
        await asyncio.sleep(0.05)
    for info in known.values():
        assert (info.state is State.ENDED) == (info.cause is not None), info
    return known


# --- the server -----------------------------------------------------------------------------------------------------


async def test_a_killed_server_loses_no_command_and_repeats_none(server: Server, client: AsyncClient) -> None:
    boxes = [await client.create(SMALL) for _ in range(3)]
    guests = set(server.guests())
    calls = [asyncio.create_task(box.commands.run(SLOW)) for box in boxes]
    talking = await boxes[0].commands.start(["cat"], stdin=True, key="talk")
    await talking.write_stdin("before ")
    await asyncio.sleep(0.5)
    server.kill()
    await asyncio.to_thread(server.start)
    await talking.write_stdin("after")
    await talking.close_stdin()
    assert (await talking.wait()).check().stdout == "before after"
    for result in await asyncio.gather(*calls):  # as if nothing had happened
        assert (result.exit_code, result.stdout, result.cause) == (7, "begin\nend\n", Cause.EXITED)
    assert set(server.guests()) == guests
    assert set(await on_record(client)) == {box.id for box in boxes}
    for box in boxes:
        assert await box.files.read("/tmp/runs") == "x\n"
        assert (await box.refresh()).state is State.RUNNING


async def test_a_command_that_ends_while_no_server_is_there(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await (await box.commands.start("seq 1 50000; exit 3", key="k")).detach()
    server.kill()
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.start)
    for _ in range(2):
        result = await (await box.commands.attach("k")).wait()
        assert (result.exit_code, len(result.stdout_bytes)) == (3, 288_894)


async def test_transfers_go_on_through_a_kill(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    data = os.urandom(1 << 20) * 40
    digest = hashlib.sha256(data).hexdigest()
    slowly = "import sys, time, hashlib\nh = hashlib.sha256()\nwhile d := sys.stdin.buffer.read(1 << 20):\n"
    slowly += " h.update(d); time.sleep(0.02)\nprint(h.hexdigest())"
    stdin = asyncio.create_task(box.commands.run(["python3", "-c", slowly], stdin=data))
    upload = asyncio.create_task(box.files.write("/tmp/up", data))
    output = asyncio.create_task(box.commands.run("for i in $(seq 40); do seq 1 100000; sleep 0.02; done"))
    await asyncio.sleep(0.3)
    server.kill()
    await asyncio.to_thread(server.start)
    assert (await stdin).check().stdout == f"{digest}\n"
    assert await upload == len(data)
    assert (await output).check().stdout_bytes == b"".join(b"%d\n" % n for n in range(1, 100_001)) * 40
    download = asyncio.create_task(box.files.read_bytes("/tmp/up"))
    await asyncio.sleep(0.02)
    server.kill()
    await asyncio.to_thread(server.start)
    assert hashlib.sha256(await download).hexdigest() == digest


async def test_each_command_runs_once_through_three_kills(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    ran: list[str] = []

    async def work(worker: int) -> None:
        for number in range(25):
            name = f"{worker}-{number}"
            result = await box.commands.run(f"echo {name} >>/tmp/runs; sleep 0.05; echo {name}")
            assert result.check().stdout == f"{name}\n"
            ran.append(name)

    workers = asyncio.gather(*(work(worker) for worker in range(4)))
    for _ in range(3):
        await asyncio.sleep(0.4)
        server.kill()
        await asyncio.to_thread(server.start)
    await workers
    assert sorted((await box.files.read("/tmp/runs")).split()) == sorted(ran)


@pytest.mark.parametrize("after", [1, 12, 30])
async def test_a_server_killed_in_a_burst_of_creations(server: Server, client: AsyncClient, after: int) -> None:
    """Each of the call's sandboxes runs; what was in the making died with the server and is on record so."""
    made: set[str] = set()
    killed = False
    async for item in client.create_many(SMALL, count=40, key="burst"):
        made.add(item.unwrap().id)
        if len(made) >= after and not killed:
            killed = True
            server.kill()
            await asyncio.to_thread(server.start)
    known = await settled(server, client)
    assert len(made) == 40, "the call goes on as if nothing had happened"
    assert {name for name, info in known.items() if info.state is State.RUNNING} == made
    for info in known.values():
        assert info.state is State.RUNNING or info.infra


async def test_a_server_killed_in_a_burst_whose_client_is_gone(server: Server, client: AsyncClient) -> None:
    """No batch key's replay mends it: what was begun is live or ended with a cause."""
    async for _ in client.create_many(SMALL, count=40):
        break
    server.kill()
    await asyncio.to_thread(server.start)
    known = await settled(server, client)
    causes = {info.cause for info in known.values() if info.state is State.ENDED}
    assert causes <= {Cause.CREATE_FAILED, Cause.NODE_LOST}
    for info in known.values():
        if info.state is State.RUNNING:
            box = await client.connect(info.id)
            assert (await box.commands.run("echo here")).stdout == "here\n"


async def test_a_server_killed_in_a_burst_of_deletions(server: Server, client: AsyncClient) -> None:
    boxes = [item.unwrap() async for item in client.create_many(SMALL, count=40)]
    keep, go = boxes[:5], boxes[5:]
    deletion = asyncio.create_task(client.kill_many(go))
    await asyncio.to_thread(until, lambda: len(server.subvolumes()) < 36)
    server.kill()
    await asyncio.to_thread(server.start)
    assert await deletion == {}
    known = await settled(server, client)
    assert {name for name, info in known.items() if info.state is State.RUNNING} == {box.id for box in keep}
    assert {known[box.id].cause for box in go} == {Cause.DELETED}
    await asyncio.gather(*(box.commands.run("true") for box in keep))


async def test_killed_again_and_again_while_it_comes_up(server: Server, client: AsyncClient) -> None:
    boxes = [await client.create(SMALL) for _ in range(5)]
    call = asyncio.create_task(boxes[0].commands.run("sleep 4; echo end"))
    await asyncio.sleep(0.2)
    server.kill()
    for delay_s in (0.25, 0.45, 0.55, 0.65):
        process = server.spawn()
        await asyncio.sleep(delay_s)
        process.kill()
        process.wait()
    await asyncio.to_thread(server.start)
    assert (await call).check().stdout == "end\n"
    assert set(await settled(server, client)) == {box.id for box in boxes}


async def test_sigterm_keeps(debian_state: Path) -> None:
    with serving(debian_state, on_exit="keep") as server:
        async with server.client() as client:
            box = await client.create(SMALL)
            call = asyncio.create_task(box.commands.run(SLOW))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.stop)
            assert len(server.guests()) == 1
            await asyncio.to_thread(server.start)
            result = await call
            assert (result.exit_code, result.stdout) == (7, "begin\nend\n")
            await client.kill(box.id)


async def test_sigterm_destroys(server: Server, client: AsyncClient) -> None:
    boxes = [item.unwrap() async for item in client.create_many(SMALL, count=10)]
    call = asyncio.create_task(boxes[0].commands.run(["sleep", "1000"]))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.stop)
    assert server.census() == census.Census()
    await asyncio.to_thread(server.start)
    with pytest.raises(SandboxEnded):
        await call
    for box in boxes:
        info = await box.refresh()
        assert (info.state, info.cause, info.infra) == (State.ENDED, Cause.SHUTDOWN, False)


async def test_a_second_server_on_the_same_state_is_refused(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    assert server.process is not None
    for arguments in (["serve", "--port", "0"], ["host", "undo"]):
        done = await asyncio.to_thread(dsec, server, *arguments)
        assert done.returncode == 3, done.stderr
        assert f"process id {server.process.pid}" in done.stderr
    assert (await box.commands.run("echo still")).stdout == "still\n"
    assert server.endpoint().url == server.url, "client.json is the first one's"


# --- the zygote, pid 1 ----------------------------------------------------------------------------------------------


async def test_a_killed_zygote_takes_its_sandboxes_along_and_is_replaced(server: Server, client: AsyncClient) -> None:
    boxes = [item.unwrap() async for item in client.create_many(SMALL, count=10)]
    call = asyncio.create_task(boxes[0].commands.run(["sleep", "1000"]))
    await asyncio.sleep(0.3)
    os.kill(server.zygote(), signal.SIGKILL)
    with pytest.raises((SandboxLost, OutcomeUnknown)):  # the second where it was asked for once more meanwhile
        await call
    fresh = await client.create(SMALL)
    assert (await fresh.commands.run("echo new")).stdout == "new\n"
    known = await settled(server, client)
    for box in boxes:
        info = known[box.id]
        assert (info.state, info.cause, info.infra) == (State.ENDED, Cause.NODE_LOST, True)
        with pytest.raises(SandboxLost):
            await box.commands.run("true")
        with pytest.raises(SandboxLost):
            await box.files.read("/etc/passwd")
    assert known[fresh.id].state is State.RUNNING


async def test_a_zygote_killed_in_a_burst(server: Server, client: AsyncClient) -> None:
    outcomes: list[DsecError | None] = []
    async for item in client.create_many(SMALL, count=40):
        outcomes.append(item.error)
        if len(outcomes) == 8:
            os.kill(server.zygote(), signal.SIGKILL)
    assert len(outcomes) == 40
    assert all(error is None or error.infra for error in outcomes)
    known = await settled(server, client)
    assert all(info.state is State.RUNNING or info.infra for info in known.values())
    assert (await (await client.create(SMALL)).commands.run("echo new")).stdout == "new\n"


async def test_zygote_and_server_killed_together(server: Server, client: AsyncClient) -> None:
    """A machine's crash, as far as it can be had without one."""
    boxes = [item.unwrap() async for item in client.create_many(SMALL, count=10)]
    zygote = server.zygote()
    server.kill()
    os.kill(zygote, signal.SIGKILL)
    await asyncio.to_thread(server.start)
    began = time.monotonic()
    for box in boxes:
        with pytest.raises(SandboxLost):
            await box.commands.run("true")
    assert time.monotonic() - began < PATIENCE_S
    known = await settled(server, client)
    assert {info.cause for info in known.values()} == {Cause.NODE_LOST}
    assert (await (await client.create(SMALL)).commands.run("echo new")).stdout == "new\n"


@pytest.mark.parametrize("down", [False, True])
async def test_pid_1_killed_from_outside(server: Server, client: AsyncClient, down: bool) -> None:
    box, other = await client.create(SMALL), await client.create(SMALL)
    call = asyncio.create_task(box.commands.run(["sleep", "1000"]))
    pid = await server.pid1(box)
    if down:
        server.kill()
    os.kill(pid, signal.SIGKILL)
    if down:
        await asyncio.to_thread(server.start)
    with pytest.raises((SandboxLost, OutcomeUnknown)) as caught:
        await call
    assert caught.value.infra
    known = await settled(server, client)
    assert (known[box.id].cause, known[box.id].infra) == (Cause.PLATFORM_KILLED, True)
    assert (await other.commands.run("echo still")).stdout == "still\n"


async def test_a_sandbox_that_kills_all_it_can_is_only_hurting_itself(server: Server, client: AsyncClient) -> None:
    box, other = await client.create(SMALL), await client.create(SMALL)
    victim = await box.commands.start(["sleep", "1000"])
    await box.commands.run("kill -9 1; kill -9 -1")
    assert (await victim.wait()).cause is Cause.SIGNALED
    assert (await box.commands.run("echo still")).stdout == "still\n"
    assert (await other.commands.run("echo still")).stdout == "still\n"


# --- the client -----------------------------------------------------------------------------------------------------

CLIENT = """
import asyncio, sys
from dsec import AsyncClient
async def main():
    async with AsyncClient() as client:
        box = await client.connect(sys.argv[1])
        print("up", flush=True)
        async for piece in await box.commands.start("while :; do echo tick; sleep 0.05; done", key="ticks"):
            print(piece.text, end="", flush=True)
asyncio.run(main())
"""


async def test_a_client_killed_in_the_middle_of_a_stream(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, box.id, env=server.environment(), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    seen = [await process.stdout.readline() for _ in range(4)]
    process.kill()
    await process.wait()
    assert seen == [b"up\n", b"tick\n", b"tick\n", b"tick\n"]
    await asyncio.sleep(0.5)
    assert (await box.refresh()).state is State.RUNNING
    command = await box.commands.attach("ticks")
    text = ""
    async for piece in command:
        text += piece.text
        if text.count("tick\n") > 10:
            break
    await command.kill()
    rest = await command.wait()
    assert rest.cause is Cause.KILLED
    assert set((text + rest.stdout).split("\n")) == {"tick", ""}


async def test_a_client_killed_in_the_middle_of_an_upload(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await box.files.write("/tmp/d/f", "before", parents=True)
    script = (
        "import sys, time\nfrom dsec import Client\nbox = Client().connect(sys.argv[1])\n"
        "def content():\n    yield bytes(1 << 20)\n    print('up', flush=True)\n"
        "    while True:\n        yield bytes(1000); time.sleep(0.01)\n"
        "box.files.write('/tmp/d/f', content())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, box.id, env=server.environment(), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    process.kill()
    await process.wait()
    async with asyncio.timeout(PATIENCE_S):
        while len(await box.files.list("/tmp/d")) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await box.files.read("/tmp/d/f") == "before"


# --- everything back ------------------------------------------------------------------------------------------------


async def test_undo_after_a_kill_leaves_nothing_on_the_host(debian_state: Path) -> None:
    settings = {setting.name: sysctl.read(setting.name) for setting in sysctl.WANTED}
    server = Server(debian_state)
    server.start()
    try:
        async with server.client() as client:
            boxes = [item.unwrap() async for item in client.create_many(SMALL, count=10)]
            await (await boxes[0].commands.start(["sleep", "1000"])).detach()
            server.kill()
        changed = {change.what: change.old for change in Ledger(debian_state / "host.json").changes}
        done = await asyncio.to_thread(dsec, server, "host", "undo")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "FAILED" not in done.stdout
        assert server.census() == census.Census()
        assert not server.config.run.exists()
        assert not (debian_state / "host.json").exists(), "nothing is left to undo"
        for name, before in settings.items():
            assert sysctl.read(name) in (changed.get(name, before), before)
        await asyncio.to_thread(server.start)  # and it can be had again
        async with server.client() as client:
            info = await client.connect(boxes[0].id)
            assert info.info.cause is Cause.SHUTDOWN
            await client.create(SMALL)
    finally:
        end(server)


async def test_no_server_is_an_error_that_says_so(debian_state: Path) -> None:
    with serving(debian_state) as server:
        endpoint = server.endpoint()
    client = AsyncClient(endpoint.url, endpoint.api_key)
    with pytest.raises(Unavailable, match="no server answers"):
        await client.node()
    await client.close()

"""The sync client: generated, complete, and usable where sync code is."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_kit import CutProxy, Served, served_in_thread

import dsec
from dsec.sdk import _client, _command, _commands, _files, _run, _sandbox, _sync, _sync_inside, _sync_sandbox

ROOT = Path(__file__).parents[2]
Call = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Call]]:
    with served_in_thread(tmp_path_factory.mktemp("server")) as pair:
        yield pair


@pytest.fixture
def server(background: tuple[Served, Call]) -> Served:
    return background[0]


@pytest.fixture
def client(server: Served) -> Iterator[dsec.Client]:
    with dsec.Client(server.url, server.key) as client:
        yield client


@pytest.fixture
def box(client: dsec.Client) -> Iterator[dsec.Sandbox]:
    with client.create("base") as box:
        yield box


def test_it_is_what_the_tool_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_sync.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, "run tools/generate_sync.py: the async client has changed\n" + done.stderr


@pytest.mark.parametrize(
    ("asynchronous", "sync"),
    [
        (_client.AsyncClient, _sync.Client),
        (_sandbox.AsyncSandbox, _sync_sandbox.Sandbox),
        (_run.AsyncRun, _sync.Run),
        (_commands.AsyncCommands, _sync_inside.Commands),
        (_command.AsyncCommand, _sync_inside.Command),
        (_files.AsyncFiles, _sync_inside.Files),
    ],
)
def test_it_has_the_same_names_parameters_and_documentation(asynchronous: type, sync: type) -> None:
    for name, member in vars(asynchronous).items():
        if name.startswith("_") or "Not for callers" in (inspect.getdoc(member) or ""):
            continue
        twin = vars(sync)[name]
        if isinstance(member, property):
            continue
        theirs, ours = (inspect.unwrap(getattr(cls, name)) for cls in (asynchronous, sync))
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters), name
        assert not inspect.iscoroutinefunction(ours)
        assert inspect.getdoc(twin), name
        assert "await" not in (inspect.getdoc(twin) or "").split(), name


def test_the_whole_of_it(client: dsec.Client, box: dsec.Sandbox) -> None:
    assert box.info.state is dsec.State.RUNNING
    assert repr(box).startswith("<Sandbox ")
    assert box.commands.run("echo hello; exit 2").exit_code == 2
    with pytest.raises(dsec.CommandFailed):
        box.commands.run(["false"]).check()
    command = box.commands.start(["cat"], stdin=True)
    command.write_stdin("abc")
    command.close_stdin()
    assert b"".join(piece.data for piece in command) == b"abc"
    assert command.wait().exit_code == 0
    assert command.pid
    with box.commands.start(["sleep", "60"], key="nap") as nap:
        assert box.commands.attach("nap").key == nap.key
    box.files.write("/a/b", iter([b"x", b"y"]), parents=True)
    assert box.files.read("/a/b") == "xy"
    assert b"".join(box.files.read_stream("/a/b")) == b"xy"
    assert [entry.name for entry in box.files.list("/a")] == ["b"]
    assert dsec.Sandbox.connect(box.id, client=client).id == box.id
    assert box.id in [info.id for info in client.list()]
    run = client.run("sync")
    assert run.sandbox("one", "base").id == run.sandbox("one", "base").id == client.find("one", run="sync").id
    assert run.name == "sync"
    assert run.kill() == {}
    with pytest.raises(dsec.errors.SandboxNotFound):
        client.connect("0" * 24)
    assert client.url == client.url.rstrip("/")


def test_batches(client: dsec.Client) -> None:
    results = list(client.create_many(["base", "nope", "base"]))
    assert sorted(result.index for result in results) == [0, 1, 2]
    boxes = [result.unwrap() for result in results if result.error is None]
    assert all(isinstance(each, dsec.Sandbox) for each in boxes)
    assert client.kill_many(boxes) == {}
    for _ in dsec.Sandbox.create_many("base", count=5, client=client):
        break  # leaving early closes the stream


def test_callbacks(box: dsec.Sandbox) -> None:
    pieces: list[bytes] = []
    box.commands.run("echo hello", on_stdout=pieces.append)
    assert b"".join(pieces) == b"hello\n"


def test_a_call_from_inside_a_callback_is_refused_and_does_not_hang(box: dsec.Sandbox) -> None:
    def again(_: bytes) -> None:
        box.commands.run(["true"])

    with pytest.raises(RuntimeError, match="callback"):
        box.commands.run("echo hello", on_stdout=again)


async def test_inside_a_running_event_loop(box: dsec.Sandbox) -> None:
    """As in a notebook."""
    assert asyncio.get_running_loop()
    assert box.commands.run(["echo", "hi"]).stdout == "hi\n"


def test_from_many_threads(box: dsec.Sandbox) -> None:
    found: list[int] = []

    def work(n: int) -> None:
        found.append(int(box.commands.run(["echo", str(n)]).stdout))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(20))


def test_in_a_forked_process(box: dsec.Sandbox) -> None:
    """The child makes a thread and connections of its own, and the parent's go on."""
    box.commands.run(["true"])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if box.commands.run(["echo", "child"]).stdout == "child\n" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert box.commands.run(["echo", "parent"]).stdout == "parent\n"


def test_cut_connections(background: tuple[Served, Call]) -> None:
    server, call = background
    proxy = CutProxy(server.url)
    call(proxy.__aenter__())
    try:
        with dsec.Client(proxy.url, server.key) as client, client.create("base") as box:
            for cut in (0, 100, 300):
                proxy.cuts = [cut] * 3
                assert box.commands.run("seq 1 1000").stdout.count("\n") == 1000
    finally:
        call(proxy.__aexit__())


def test_the_default_client(server: Served) -> None:
    """No client is named and none closed; the process ends quietly."""
    program = "import dsec\nwith dsec.Sandbox.create('base') as box: print(box.commands.run('echo hi').stdout, end='')"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program],
        env={"DSEC_URL": server.url, "DSEC_API_KEY": server.key, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr
    assert "nclosed" not in done.stderr


def test_an_interrupt_ends_the_wait(server: Served) -> None:
    program = """
import dsec, os, signal, threading
with dsec.Sandbox.create("base") as box:
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        box.commands.run(["sleep", "60"])
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"DSEC_URL": server.url, "DSEC_API_KEY": server.key, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr

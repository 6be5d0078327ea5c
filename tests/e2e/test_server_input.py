"""What callers and agents send that can't work, is huge, or is no text: each has one defined answer, over SDK and HTTP,
on a real server with real sandboxes.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import (
    Conflict,
    DsecError,
    EnvironmentNotFound,
    FileError,
    FileMissing,
    InvalidRequest,
    PermissionDenied,
    SandboxNotFound,
    Unsupported,
)
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec, State
from server_kit import PATIENCE_S, Server, serving, until

pytestmark = pytest.mark.root

MIB = 1 << 20
SMALL = SandboxSpec(environment="debian", memory_bytes=256 * MIB, disk_bytes=256 * MIB, pids=64)


@pytest.fixture(scope="module")
def server(debian_module_state: Any) -> Iterator[Server]:
    with serving(debian_module_state) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    """Whatever a test leaves is ended after it, and with it every trace on the host."""
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())
        until(lambda: not server.difference(set()))


@pytest.fixture
async def box(client: AsyncClient) -> AsyncSandbox:
    return await client.create(SMALL)


def raw(server: Server, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, Any]:
    """A request that no SDK would make."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {server.endpoint().api_key}", "Content-Type": kind}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, json.loads(data) if data else None


# --- specs ----------------------------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[str, Any]] = [
    ("environment", ""),
    ("environment", "../../etc"),
    ("environment", 7),
    ("backend", "docker"),
    ("cpus", 0),
    ("cpus", -1.0),
    ("cpus", 1e9),
    ("cpus", "many"),
    ("memory_bytes", 0),
    ("memory_bytes", 1 << 60),
    ("memory_bytes", 1.5e9 + 0.5),
    ("disk_bytes", 0),
    ("disk_bytes", -1),
    ("pids", 1),
    ("pids", 1 << 30),
    ("open_files", 3),
    ("output_bytes", -1),
    ("ttl_s", 0),
    ("ttl_s", -5),
    ("ttl_s", 1e12),
    ("idle_ttl_s", 0),
    ("command_timeout_s", 0),
    ("env", {"A=B": "x"}),
    ("env", {"": "x"}),
    ("env", {"A": "\0"}),
    ("env", {"A": "x" * (300 << 10)}),
    ("env", ["A=B"]),
    ("user", "x" * 101),
    ("user", "a\nb"),
    ("workdir", "relative"),
    ("workdir", "/a\0b"),
    ("hostname", "Has.Capitals"),
    ("hostname", "-dash"),
    ("hostname", "x" * 64),
    ("no_new_privs", "yes"),
    ("labels", {"a": 1}),
    ("labels", {str(i): "" for i in range(100)}),
    ("labels", {"a": "x" * 2000}),
    ("run", "has space"),
    ("name", ""),
    ("name", "x" * 121),
    ("name", "a\tb"),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda each: str(each)[:24])
async def test_a_bad_field_is_refused_by_name(server: Server, client: AsyncClient, field: str, value: object) -> None:
    body = json.dumps({"environment": "debian", field: value}).encode()
    status, error = await asyncio.to_thread(raw, server, "POST", "/v1/sandboxes", body)
    assert (status, error["code"], error.get("infra", False)) == (400, "invalid_request", False)
    assert field.partition("_")[0] in json.dumps(error), "it says which field"
    with pytest.raises(InvalidRequest):
        await client.create(**{"environment": "debian", field: value})
    assert await client.list(states=[State.STARTING, State.QUEUED]) == []


async def test_what_is_not_built_is_unsupported(client: AsyncClient) -> None:
    with pytest.raises(Unsupported) as caught:
        await client.create("debian", gpus=1)
    assert caught.value.details["field"] == "gpus"


async def test_an_environment_that_is_not_there(client: AsyncClient) -> None:
    with pytest.raises(EnvironmentNotFound, match="no-such-environment"):
        await client.create("no-such-environment")
    items = [item async for item in client.create_many(["debian", "no-such-environment"])]
    assert {item.index: type(item.error) for item in items} == {0: type(None), 1: EnvironmentNotFound}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"debian"', b"\xff\xfe", b'{"environment": "\\ud800"}'])
async def test_bodies_that_are_no_spec(server: Server, body: bytes) -> None:
    for path in ("/v1/sandboxes", "/v1/sandboxes:batch"):
        status, error = await asyncio.to_thread(raw, server, "POST", path, body)
        assert (status, error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("sandbox_id", ["nope", "0" * 24, "%00", "..%2f..", "x" * 3000, "%ff"])
async def test_ids_that_are_none(server: Server, client: AsyncClient, sandbox_id: str) -> None:
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/files?path=/etc/passwd"), ("POST", "/exec")):
        path = f"/v1/sandboxes/{sandbox_id}{rest}"
        status, error = await asyncio.to_thread(raw, server, method, path, b'{"argv": ["true"]}')
        assert status == 404, error
        assert error["code"] in {"sandbox_not_found", "not_found"}


# --- commands -------------------------------------------------------------------------------------------------------


async def test_commands_that_cannot_start(box: AsyncSandbox) -> None:
    for argv, exit_code in ((["no-such-program"], 127), (["/etc/passwd"], 126), (["/etc"], 126), (["/no/such"], 127)):
        result = await box.commands.run(argv)
        assert (result.exit_code, result.cause, result.infra) == (exit_code, Cause.START_FAILED, False)
        assert argv[0] in result.message
    for fields in ({"user": "nobody-here"}, {"user": "root:nobody-here"}, {"cwd": "/no/such"}, {"cwd": "/etc/passwd"}):
        result = await box.commands.run(["true"], **fields)
        assert (result.exit_code, result.cause, result.infra) == (126, Cause.START_FAILED, False)
        assert next(iter(fields.values())) in result.message
    assert (await box.commands.run("echo still")).check().stdout == "still\n"


BAD_COMMANDS: list[dict[str, Any]] = [
    {},
    {"argv": []},
    {"argv": [""]},
    {"argv": "true"},
    {"argv": ["a\0b"]},
    {"argv": ["true"], "env": {"A": "\0"}},
    {"argv": ["true"], "env": {"A=B": "x"}},
    {"argv": ["true"], "env": {"": "x"}},
    {"argv": ["true"], "cwd": "/a\0b"},
    {"argv": ["true"], "cwd": ""},
    {"argv": ["true"], "user": "a\0b"},
    {"argv": ["true"], "user": ""},
    {"argv": ["true"], "command_timeout_s": 0},
    {"argv": ["true"], "command_timeout_s": -1},
    {"argv": ["true"], "output_bytes": -1},
    {"argv": ["true"], "output_bytes": 1 << 50},
    {"argv": ["true"], "key": ""},
    {"argv": ["true"], "key": "~1"},
    {"argv": ["true"], "key": "x" * 121},
    {"argv": ["true"], "no_such_field": 1},
    {"argv": ["x" * (129 << 10)]},
    {"argv": ["true", *["x" * 100_000] * 17]},
    {"argv": ["true"], "env": {f"V{i}": "x" * 100_000 for i in range(17)}},
]


@pytest.mark.parametrize("spec", BAD_COMMANDS, ids=lambda spec: json.dumps(spec)[:40])
async def test_a_command_that_cannot_be_is_refused(server: Server, box: AsyncSandbox, spec: dict[str, Any]) -> None:
    path = f"/v1/sandboxes/{box.id}/exec"
    status, error = await asyncio.to_thread(raw, server, "POST", path, json.dumps(spec).encode())
    assert (status, error["code"]) == (400, "invalid_request"), error
    assert (await box.commands.run("echo still")).stdout == "still\n"


@pytest.mark.parametrize(
    "breakage", ["rm /etc/passwd", "rm /etc/passwd; mkfifo /etc/passwd", "echo root:x:7:7::/: >/etc/passwd"]
)
async def test_root_is_root_whatever_the_users_file_says(box: AsyncSandbox, breakage: str) -> None:
    (await box.commands.run(breakage)).check()
    assert (await box.commands.run(["/usr/bin/id", "-u"])).stdout == "0\n"
    await box.files.write("/tmp/still-here", b"x")
    assert (await box.files.stat("/tmp/still-here")).uid == 0


async def test_an_argv_and_environment_of_a_megabyte(box: AsyncSandbox) -> None:
    words = [str(i % 10) * 100_000 for i in range(10)]
    result = await box.commands.run(["printf", "%s\n", *words])
    assert result.check().stdout == "".join(f"{word}\n" for word in words)
    env = {f"V{i}": "x" * 100_000 for i in range(10)}
    result = await box.commands.run(["env"], env=env)
    assert {f"V{i}={'x' * 100_000}" for i in range(10)} <= set(result.check().stdout.split("\n"))
    deep = await box.commands.run(["sh", "-c", 'echo "$#"', "sh", *["x"] * 100_000])
    assert deep.check().stdout == "100000\n"


async def test_output_that_is_no_text(box: AsyncSandbox) -> None:
    result = await box.commands.run(["printf", r"\377\000\376\n"])
    assert result.stdout_bytes == b"\xff\0\xfe\n"
    assert result.stdout == "\ufffd\0\ufffd\n"
    result = await box.commands.run(["cat"], stdin=bytes(range(256)))
    assert result.stdout_bytes == bytes(range(256))


async def test_fifty_megabytes_of_stdin(box: AsyncSandbox) -> None:
    data = os.urandom(MIB) * 50
    result = await box.commands.run(["sha256sum"], stdin=data)
    assert result.check().stdout.split()[0] == hashlib.sha256(data).hexdigest()
    result = await box.commands.run(["head", "-c", "3"], stdin=data)  # it doesn't want the rest
    assert result.check().stdout_bytes == data[:3]


async def test_the_output_cap(box: AsyncSandbox) -> None:
    result = await box.commands.run("yes", output_bytes=100_000)
    assert (result.cause, result.truncated, result.infra) == (Cause.OUTPUT_LIMIT, True, False)
    assert result.stdout_bytes == b"y\n" * 50_000
    assert result.dropped_bytes > 0
    both = await box.commands.start("echo a; echo b >&2; read x; yes >&2", stdin=True, output_bytes=5000)
    seen = {False: b"", True: b""}
    async for piece in both:
        seen[piece.stderr] += piece.data
        if seen == {False: b"a\n", True: b"b\n"}:
            await both.write_stdin("\n")
    assert (await both.wait()).cause is Cause.OUTPUT_LIMIT
    assert (len(seen[True]), seen[False]) == (4998, b"a\n")


async def test_a_process_that_closes_its_output(box: AsyncSandbox) -> None:
    result = await box.commands.run("echo before; exec >&- 2>&-; sleep 0.3; echo lost; exit 5")
    assert (result.exit_code, result.stdout) == (5, "before\n")
    result = await box.commands.run("exec <&- >&- 2>&-; exit 6", stdin="nobody reads this")
    assert result.exit_code == 6


async def test_a_process_that_ignores_sigterm(box: AsyncSandbox) -> None:
    script = "trap '' TERM INT HUP; (setsid sleep 1000 &); echo up; while :; do sleep 0.1; done"
    async with await box.commands.start(script) as command:
        async for piece in command:
            assert piece.text == "up\n"
            break
        await command.kill("group")
        await command.kill("leader", signal=2)
        assert (await box.commands.run("echo still")).stdout == "still\n"
        await command.kill()
        assert (await command.wait()).cause is Cause.KILLED
    assert (await box.usage()).pids == 1
    for limit_s in (0.5, 5.0, PATIENCE_S):
        result = await box.commands.run(script, command_timeout_s=limit_s)
        assert result.cause is Cause.COMMAND_TIMEOUT
        assert (await box.usage()).pids == 1
        if result.stdout:  # a busy host may not have come so far
            break
    assert result.stdout == "up\n"


# --- limits ---------------------------------------------------------------------------------------------------------


async def test_a_full_disk(client: AsyncClient) -> None:
    box = await client.create(SMALL, disk_bytes=24 * MIB)
    result = await box.commands.run(["dd", "if=/dev/zero", "of=/big", "bs=1M", "count=100"])
    assert (result.exit_code, result.cause, result.infra) == (1, Cause.DISK_LIMIT, False)
    assert (await box.commands.run("echo still")).check().stdout == "still\n"
    assert (await box.commands.run(["seq", "1", "400000"])).check().stdout_bytes[-7:] == b"400000\n"
    with pytest.raises(FileError, match="disk full") as caught:
        await box.files.write("/more", bytes(8 * MIB))
    assert caught.value.details["errno"] in {"ENOSPC", "EDQUOT"}
    with pytest.raises(FileError, match="disk full"):
        await box.files.write("/stream", pieces(64))
    assert not await box.files.exists("/more")
    assert not await box.files.exists("/stream")
    assert (await box.files.stat("/big")).size > 16 * MIB
    await box.files.remove("/big")
    async with asyncio.timeout(PATIENCE_S):
        while (await box.usage()).disk_bytes > 12 * MIB:  # noqa: ASYNC110 - the kernel frees it a moment later
            await asyncio.sleep(0.2)
    assert await box.files.write("/more", bytes(4 * MIB)) == 4 * MIB
    assert (await box.commands.run("wc -c </more && rm /more")).check().stdout == f"{4 * MIB}\n"


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(MIB)


async def test_a_memory_hog(client: AsyncClient, box: AsyncSandbox) -> None:
    result = await box.commands.run(["python3", "-c", "x = bytearray(1 << 30)"])
    assert (result.cause, result.signal, result.infra) == (Cause.MEMORY_LIMIT, 9, False)
    for _ in range(3):  # not the guest, whatever else dies
        await box.commands.run(["python3", "-c", "import os\nfor _ in range(4): os.fork()\nx = bytearray(1 << 28)"])
    assert (await box.commands.run("echo still")).stdout == "still\n"
    assert (await box.refresh()).state is State.RUNNING


async def test_a_fork_bomb(box: AsyncSandbox) -> None:
    result = await box.commands.run(["bash", "-c", ":() { : | : & }; : ; sleep 1; exit 3"], kill_leftovers=True)
    assert (result.exit_code, result.cause) == (3, Cause.PIDS_LIMIT)
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    result = await box.commands.run(["python3", "-c", bomb], command_timeout_s=1.5)
    assert (result.cause, result.infra) == (Cause.COMMAND_TIMEOUT, False)
    async with asyncio.timeout(PATIENCE_S):
        while (await box.usage()).pids > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await box.commands.run("echo still")).check().stdout == "still\n"


# --- files ----------------------------------------------------------------------------------------------------------


async def test_paths(box: AsyncSandbox) -> None:
    inside = await box.files.read_bytes("/etc/passwd")
    for path in ("/../../../../etc/passwd", "/tmp/../etc/./passwd", "//etc//passwd", "/proc/../etc/passwd"):
        assert await box.files.read_bytes(path) == inside
    await box.commands.run("ln -s / /tmp/root; ln -s ../../../../../.. /tmp/up; ln -s /proc /tmp/p; ln -s l /tmp/l")
    for path in ("/tmp/root/etc/passwd", "/tmp/up/etc/passwd"):
        assert await box.files.read_bytes(path) == inside
    for path in (
        "/proc/1/environ",
        "/proc/self/mem",
        "/tmp/p/1/environ",
        "/tmp/../proc/version",
        "/tmp/root/proc/version",
    ):
        with pytest.raises((PermissionDenied, FileError)):
            await box.files.read_bytes(path)
        with pytest.raises((PermissionDenied, FileError)):
            await box.files.write(path, b"x")
    with pytest.raises(FileError):
        await box.files.read_bytes("/tmp/l")
    for path in ("", "a\0b"):
        with pytest.raises(InvalidRequest):
            await box.files.read_bytes(path)
    with pytest.raises(InvalidRequest):
        await box.files.read_bytes("relative")
    with pytest.raises(FileError):
        await box.files.read_bytes("/" + "x" * 300)
    with pytest.raises(DsecError) as caught:
        await box.files.read_bytes("/" + "x/" * 20_000)
    assert not caught.value.infra
    with pytest.raises(FileMissing):
        await box.files.read_bytes("/tmp/none")
    with pytest.raises(InvalidRequest):
        await box.files.read_bytes("/etc/passwd", user="nobody-here")


async def test_files_that_are_none(box: AsyncSandbox) -> None:
    """A reader of a FIFO would wait for ever; a device is no file."""
    await box.commands.run("mkfifo /tmp/fifo")
    for path in ("/tmp/fifo", "/tmp", "/dev/zero"):
        with pytest.raises((FileError, PermissionDenied)):
            await box.files.read_bytes(path, request_timeout_s=PATIENCE_S)
    assert (await box.files.stat("/tmp/fifo")).type == "fifo"


async def test_names_that_are_no_text(box: AsyncSandbox) -> None:
    name = b"/tmp/odd \xff\xfe\n%2f?&#+ name"
    await box.files.write(name, b"content")
    assert await box.files.read_bytes(name) == b"content"
    (entry,) = [each for each in await box.files.list("/tmp") if each.name_b64]
    assert os.fsencode("/tmp/" + entry.name) == name
    await box.files.move(name, name + b"2")
    assert (await box.commands.run("cat /tmp/odd*")).stdout == "content"
    await box.files.remove(name + b"2")
    await box.files.mkdir(b"/tmp/\x80", parents=True)
    assert (await box.files.stat(b"/tmp/\x80")).type == "directory"


async def test_three_hundred_megabytes_up_and_down(client: AsyncClient) -> None:
    box = await client.create(SMALL, disk_bytes=1024 * MIB)
    piece = os.urandom(MIB)
    sent, got = hashlib.sha256(), hashlib.sha256()

    async def content() -> AsyncIterator[bytes]:
        for number in range(300):
            part = number.to_bytes(4, "big") + piece
            sent.update(part)
            yield part

    size = 300 * (MIB + 4)
    assert await box.files.write("/tmp/big", content()) == size
    async for part in box.files.read_stream("/tmp/big"):
        got.update(part)
    assert got.digest() == sent.digest()
    inside = (await box.commands.run(["sha256sum", "/tmp/big"])).check().stdout.split()[0]
    assert inside == sent.hexdigest()
    assert (await box.usage()).memory_bytes < 256 * MIB


# --- many, names, time ----------------------------------------------------------------------------------------------


async def test_three_hundred_at_once(server: Server, client: AsyncClient) -> None:
    boxes = [item.unwrap() async for item in client.create_many(SMALL, count=300)]
    assert len({box.id for box in boxes}) == 300
    assert len({info.id for info in await client.list()}) == 300
    for box in boxes[::60]:
        assert (await box.commands.run("echo $HOSTNAME; hostname")).stdout.split()[-1] == box.id
    assert await client.kill_many(boxes) == {}
    assert server.difference(set()) == "", "when it is answered nothing is left"
    infos = await asyncio.gather(*(box.refresh() for box in boxes[::30]))
    assert {(info.state, info.cause) for info in infos} == {(State.ENDED, Cause.DELETED)}


async def test_twenty_clients_get_or_create_one(server: Server, client: AsyncClient) -> None:
    clients = [server.client() for _ in range(20)]
    boxes = await asyncio.gather(*(each.run("r").sandbox("task/1", SMALL) for each in clients))
    assert len({box.id for box in boxes}) == 1
    with pytest.raises(Conflict):
        await clients[0].run("r").sandbox("task/1", SMALL, cpus=2.0)
    gone, again = await asyncio.gather(boxes[0].kill(), clients[1].run("r").sandbox("task/1", SMALL))
    assert gone.cause is Cause.DELETED
    assert (await clients[2].run("r").sandbox("task/1", SMALL)).id in {again.id, gone.id} or again.id == gone.id
    await asyncio.gather(*(each.close() for each in clients))


async def test_deleting_what_is_gone_or_never_was(client: AsyncClient, box: AsyncSandbox) -> None:
    first, second = await box.kill(), await box.kill()
    assert first == second
    with pytest.raises(SandboxNotFound):
        await client.kill("0" * 24)
    errors = await client.kill_many([box, "nonsense"])
    assert {name: type(error) for name, error in errors.items()} == {"nonsense": SandboxNotFound}

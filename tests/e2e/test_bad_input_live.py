"""Bad input that only a real sandbox has an answer to: each has one that is defined, and the sandbox goes on.

Frames, bodies, sizes, tokens and unknown fields: `tests/e2e/test_server_input.py`, `tests/integration/test_openapi.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from dsec import AsyncSandbox, PtySize, errors
from server_kit import PATIENCE_S, Server, serving

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as running:
        yield running


@pytest.fixture
async def box(server: Server) -> AsyncIterator[AsyncSandbox]:
    async with server.client() as client, await client.create("debian") as sandbox:
        yield sandbox
        assert (await sandbox.commands.run(["echo", "on"])).check().stdout == "on\n"


async def test_a_terminal_of_0x0_has_the_usual_size(box: AsyncSandbox) -> None:
    async with await box.commands.start(["sh", "-c", "stty size; read x; stty size"], pty=PtySize(0, 0)) as command:
        await command.resize(0, 0)  # as it is
        await command.write_stdin(b"\n")
        result = await command.wait()
    assert result.stdout.split() == ["24", "80", "24", "80"]


async def test_a_thousand_watchers_are_refused_beyond_the_limit(box: AsyncSandbox) -> None:
    async def watch() -> object:
        try:
            return await box.files.watch("/tmp")
        except errors.DsecError as error:
            return error

    made = await asyncio.gather(*(watch() for _ in range(1000)))
    refused = [each for each in made if isinstance(each, errors.DsecError)]
    assert {type(each) for each in refused} == {errors.QuotaExceeded}
    held = [each for each in made if not isinstance(each, errors.DsecError)]
    assert 64 <= len(held) <= 128
    await asyncio.gather(*(each.close() for each in held))  # type: ignore[attr-defined]
    deadline = time.monotonic() + PATIENCE_S
    while isinstance(again := await watch(), errors.QuotaExceeded):  # what was closed goes in a moment
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    async with again as again:  # type: ignore[attr-defined]
        await box.files.write("/tmp/seen", b"")
        assert (await anext(aiter(again))).path == "seen"


async def test_a_watcher_on_a_removed_tree_ends(box: AsyncSandbox) -> None:
    await box.files.mkdir("/tmp/a/b/c", parents=True)
    async with await box.files.watch("/tmp/a", recursive=True) as watch:
        await box.files.remove("/tmp/a", recursive=True)
        async with asyncio.timeout(PATIENCE_S):
            events = [event async for event in watch]
    assert (events[-1].kind, events[-1].path) == ("remove", "")
    with pytest.raises(errors.FileMissing):
        await box.files.watch("/tmp/a")


async def test_links_that_change_under_every_file_call(box: AsyncSandbox) -> None:
    """Whatever a path becomes meanwhile: each call does it to one of both places inside, or fails by name."""
    await box.files.mkdir("/tmp/race/real", parents=True)
    swap = (
        "cd /tmp/race; while :; do ln -sfn real at; ln -sfn /proc/self at; ln -sfn nowhere at; rm at; mkdir at; "
        "rmdir at; done 2>/dev/null"
    )
    racing = await box.commands.start(["sh", "-c", swap])
    calls = {
        "read": lambda: box.files.read("/tmp/race/at/f"),
        "write": lambda: box.files.write("/tmp/race/at/f", b"x"),
        "append": lambda: box.files.write("/tmp/race/at/f", b"x", append=True),
        "stat": lambda: box.files.stat("/tmp/race/at", follow=True),
        "list": lambda: box.files.list("/tmp/race/at", depth=2),
        "mkdir": lambda: box.files.mkdir("/tmp/race/at/d", parents=True),
        "move": lambda: box.files.move("/tmp/race/at/f", "/tmp/race/at/g"),
        "remove": lambda: box.files.remove("/tmp/race/at/d", recursive=True),
    }
    allowed = (errors.FileMissing, errors.FileError, errors.PermissionDenied)
    for _ in range(20):
        results = await asyncio.gather(*(call() for call in calls.values()), return_exceptions=True)
        for name, result in zip(calls, results, strict=True):
            assert not isinstance(result, BaseException) or isinstance(result, allowed), (name, result)
    await racing.kill()


@pytest.mark.parametrize("body", [b'{"argv": ["\xff"]}', b'{"argv": ["a\\ud800b"]}', b"\xfe\xff", b'{"argv": ["echo"'])
async def test_what_is_no_utf8_or_no_json_is_refused(server: Server, box: AsyncSandbox, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {server.endpoint().api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{server.url}/v1/sandboxes/{box.id}/exec", data=body) as response,
    ):
        assert (response.status, json.loads(await response.read())["code"]) == (400, "invalid_request")


async def test_an_image_without_bash_says_so(box: AsyncSandbox) -> None:
    (await box.commands.run(["rm", "/bin/bash"])).check()
    with pytest.raises(errors.Unsupported, match="needs bash"):
        await box.sessions.open()

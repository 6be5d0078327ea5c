"""schemathesis against real sandboxes, beside `tests/integration/test_openapi.py`: what reaches the guest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from openapi_kit import Target, attack

from server_kit import Server, serving

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as running:
        yield running


async def test_schemathesis_finds_nothing_inside(server: Server, tmp_path: Path) -> None:
    """Sessions and commands are asked for by examples; random ones would be shells that nobody closes."""
    async with server.client() as client, await client.create("debian") as box, await client.create("debian") as doomed:
        spare = (await client.list_keys())[0]["id"]
        target = Target(server.url, server.endpoint().api_key, box.id, doomed.id, spare)
        inside = ["--include-path-regex", "/(files|exec|sessions|process|filesystem|execute|run_in_session)"]
        options = ["--phases", "examples,fuzzing", "--max-examples", "3", *inside]
        await asyncio.to_thread(attack, target, tmp_path, *options)
        (await box.commands.run(["true"])).check()
        assert (await (await box.sessions.open("after")).run("echo works")).output == "works\n"

"""Commands in many sandboxes by one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served, served_in_thread

from dsec import AsyncClient, AsyncSandbox, Client, ExecSpec, RunResult
from dsec.errors import Conflict, InvalidRequest, RequestTimeout, SandboxEnded


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


@pytest.fixture
async def client(server: Served) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


async def make(client: AsyncClient, count: int) -> list[AsyncSandbox]:
    return [item.unwrap() async for item in client.create_many("base", count=count)]


async def test_results_come_as_they_are_ready(client: AsyncClient) -> None:
    slow, quick = await make(client, 2)
    results = [
        item async for item in client.run_many([(slow, "sleep 1.5; echo a; echo b >&2; exit 3"), (quick, "true")])
    ]
    assert [item.index for item in results] == [1, 0]
    assert results[0].unwrap().exit_code == 0
    late = results[1].unwrap()
    assert (late.exit_code, late.stdout, late.stderr) == (3, "a\n", "b\n")


async def test_output_that_is_too_much_for_a_line_is_whole(client: AsyncClient) -> None:
    boxes = await make(client, 3)
    results = [item async for item in client.run_many([(box, "seq 1 40000") for box in boxes])]
    expected = b"".join(b"%d\n" % n for n in range(1, 40001))
    assert sorted(item.index for item in results) == [0, 1, 2]
    assert all(item.unwrap().stdout_bytes == expected for item in results)


async def test_an_error_is_one_items_own(client: AsyncClient) -> None:
    good, gone = await make(client, 2)
    await gone.kill()
    commands: list[tuple[AsyncSandbox, str | list[str] | ExecSpec]] = [
        (good, ["true"]),
        (gone, ["true"]),
        (good, ["cat\0"]),
        (good, ExecSpec(argv=["cat"], stdin=True)),
    ]
    results = {item.index: item async for item in client.run_many(commands)}
    assert results[0].unwrap().ok
    assert isinstance(results[1].error, SandboxEnded)
    assert isinstance(results[2].error, InvalidRequest)
    assert isinstance(results[3].error, InvalidRequest)
    with pytest.raises(SandboxEnded):
        results[1].unwrap()


async def test_keys_of_the_caller_are_kept_and_ours_released(server: Served, client: AsyncClient) -> None:
    (box,) = await make(client, 1)
    again: list[RunResult] = []
    for _ in range(2):
        again += [item async for item in client.run_many([(box, ExecSpec(argv=["echo", "x"], key="mine"))])]
    assert [item.unwrap().stdout for item in again] == ["x\n", "x\n"]
    assert server.kit.host.guests[box.id].highest == 1
    other = [item async for item in client.run_many([(box, ExecSpec(argv=["echo", "y"], key="mine"))])]
    assert isinstance(other[0].error, Conflict)
    (first,) = [item async for item in client.run_many([(box, ["true"])])]
    (second,) = [item async for item in client.run_many([(box, ["true"])])]
    assert (await (await box.commands.attach("mine")).wait()).stdout == "x\n"
    assert len(server.edge._lives.sandboxes[box.id].commands or {}) == 2  # `mine` and the second
    for item in (first, second):
        assert (await (await box.commands.attach(item.unwrap().key)).wait()).ok


async def test_commands_go_on_without_their_reader(server: Served, client: AsyncClient) -> None:
    (box,) = await make(client, 1)
    spec = ExecSpec(argv=["/bin/sh", "-c", "sleep 0.4; echo done"], key="k")
    with pytest.raises(RequestTimeout):
        async for _ in client.run_many([(box, spec)], request_timeout_s=0.1):
            pass
    (item,) = [item async for item in client.run_many([(box, spec)])]
    assert item.unwrap().stdout == "done\n"
    assert server.kit.host.guests[box.id].highest == 1


async def test_nothing_to_run(client: AsyncClient) -> None:
    assert [item async for item in client.run_many([])] == []


async def test_a_bad_request_and_other_projects(server: Served, client: AsyncClient) -> None:
    (box,) = await make(client, 1)
    for body in ({}, {"items": []}, {"items": [{"sandbox": box.id}]}, {"items": 1, "x": 2}):
        status, code, _ = await server.error("POST", "/v1/exec:batch", json.dumps(body).encode())
        assert (status, code) == (400, "invalid_request")
    item = {"sandbox": box.id, "spec": {"argv": ["true"], "key": "k"}}
    elsewhere = await server.edge.create_key("another", "test")
    answer = await server.raw("POST", "/v1/exec:batch", json.dumps({"items": [item]}).encode(), key=elsewhere)
    assert answer[0] == 200
    assert b'"sandbox_not_found"' in answer[2]
    assert server.kit.host.guests[box.id].highest == 0


def test_the_sync_client(tmp_path: Path) -> None:
    with served_in_thread(tmp_path) as (server, _), Client(server.server.url, server.key) as client:
        boxes = [item.unwrap() for item in client.create_many("base", count=2)]
        commands = [(box, f"echo {n}") for n, box in enumerate(boxes)]
        results = {item.index: item.unwrap() for item in client.run_many(commands)}
        assert [results[n].stdout for n in (0, 1)] == ["0\n", "1\n"]


async def test_many_at_once(client: AsyncClient) -> None:
    boxes = await make(client, 20)
    both = await asyncio.gather(
        *(_outputs(client, [(box, ["echo", f"{n}"]) for n, box in enumerate(boxes)]) for _ in range(2))
    )
    assert both == [{n: f"{n}\n" for n in range(20)}] * 2


async def _outputs(client: AsyncClient, commands: list[tuple[AsyncSandbox, list[str]]]) -> dict[int, str]:
    return {item.index: item.unwrap().stdout async for item in client.run_many(commands)}

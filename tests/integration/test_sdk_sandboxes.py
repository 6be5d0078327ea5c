"""Sandboxes and files through the SDK: making, finding, ending, batches, runs; content of every kind."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served

from dsec import AsyncClient, AsyncSandbox, Cause, SandboxSpec, State
from dsec.errors import (
    Conflict,
    CreateFailed,
    EnvironmentNotFound,
    FileError,
    FileMissing,
    InvalidRequest,
    SandboxNotFound,
    Unauthenticated,
    Unsupported,
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


@pytest.fixture
async def client(server: Served) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


async def test_the_fields_of_a_sandbox(client: AsyncClient) -> None:
    box = await client.create("base", cpus=2, labels={"a": "b"}, env={"X": "1"}, ttl_s=60)
    assert box.info.state is State.RUNNING
    assert (box.info.spec.cpus, box.info.spec.labels) == (2.0, {"a": "b"})
    assert box.info.expires_at is not None
    assert box.info.token
    other = await AsyncSandbox.create(box.info.spec, client=client, cpus=3, name=None)
    assert (other.info.spec.cpus, other.info.spec.labels) == (3.0, {"a": "b"})
    assert box.id in repr(box)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"cpus": "many"}, "cpus"),
        ({"cpus": 0}, "cpus"),
        ({"memory": 1}, "memory"),
        ({"env": {"A": 1}}, "env"),
        ({"labels": {"a": "\udcff"}}, "JSON"),
        ({"hostname": "NOT VALID"}, "hostname"),
    ],
)
async def test_bad_fields_are_named_before_anything_is_sent(
    client: AsyncClient, fields: dict[str, object], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        await client.create("base", **fields)


async def test_what_creation_raises(server: Served, client: AsyncClient) -> None:
    with pytest.raises(EnvironmentNotFound):
        await client.create("nope")
    with pytest.raises(Unsupported):
        await client.create("base", gpus=1)
    server.kit.host.fail_next_create("mount")
    with pytest.raises(CreateFailed) as caught:
        await client.create("base")
    assert caught.value.infra
    async with AsyncClient(server.url, "dsk_wrong") as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.create("base")


async def test_leaving_the_context_ends_it(server: Served, client: AsyncClient) -> None:
    async with await client.create("base") as box:
        assert server.edge.get(box.id).state is State.RUNNING
    assert box.info.state is State.ENDED
    assert box.info.cause is Cause.DELETED
    assert (await box.kill()).cause is Cause.DELETED  # again: the same answer
    assert (await client.connect(box.id)).info.cause is Cause.DELETED


async def test_closing_the_client_ends_nothing(server: Served) -> None:
    async with server.client() as client:
        box = await client.create("base")
    async with server.client() as client:
        again = await client.connect(box.id)
        assert again.info.state is State.RUNNING
        assert (await again.commands.run(["echo", "hi"])).stdout == "hi\n"
        assert (await again.usage()).pids >= 1
        assert (await again.renew(5)).expires_at is not None
        assert (await again.renew(None)).expires_at is None
        assert (await again.refresh()).expires_at is None
        assert (await client.kill(again.id)).state is State.ENDED
        with pytest.raises(SandboxNotFound):
            await client.kill("0" * 24)


async def test_a_batch_of_mixed_specs(client: AsyncClient) -> None:
    specs = ["base", SandboxSpec(environment="other", cpus=2), "nope", "base"]
    results = {result.index: result async for result in client.create_many(specs, labels={"batch": "1"})}
    assert sorted(results) == [0, 1, 2, 3]
    assert isinstance(results[2].error, EnvironmentNotFound)
    with pytest.raises(EnvironmentNotFound):
        results[2].unwrap()
    assert results[1].unwrap().info.spec.environment == "other"
    assert results[1].unwrap().info.spec.cpus == 2
    assert all(results[n].unwrap().info.spec.labels == {"batch": "1"} for n in (0, 1, 3))


async def test_a_batch_by_count_and_key(server: Served, client: AsyncClient) -> None:
    first = {r.index: r.unwrap().id async for r in client.create_many("base", count=20, key="burst")}
    assert len(set(first.values())) == 20
    async with server.client() as restarted:
        again = {r.index: r.unwrap().id async for r in restarted.create_many("base", count=20, key="burst")}
    assert again == first
    with pytest.raises(Conflict):
        _ = [r async for r in client.create_many("base", count=21, key="burst")]
    assert [r async for r in client.create_many([])] == []
    with pytest.raises(InvalidRequest):
        _ = [r async for r in client.create_many("base")]
    with pytest.raises(InvalidRequest):
        _ = [r async for r in client.create_many(["base"], count=2)]


async def test_leaving_a_batch_early_stops_nothing(server: Served, client: AsyncClient) -> None:
    results = client.create_many("base", count=10, key="k")
    async for _ in results:
        break
    again = [r.unwrap().id async for r in client.create_many("base", count=10, key="k")]
    assert len(set(again)) == 10
    assert server.edge.node().live == 10


async def test_listing(client: AsyncClient) -> None:
    for n in range(5):
        await client.create("base", run="r" if n % 2 else None, labels={"n": str(n), "all": "yes"})
    everything = await client.list()
    assert len(everything) == 5
    assert [info.id for info in await client.list(limit=3)] == [info.id for info in everything[:3]]
    assert len(await client.list(run="r")) == 2
    assert [info.spec.labels["n"] for info in await client.list(labels={"n": "3", "all": "yes"})] == ["3"]
    assert await client.kill_many(everything[:2]) == {}
    assert len(await client.list()) == 3
    assert len(await client.list(states=[State.ENDED])) == 2
    assert len(await client.list(states=["ended", "running"])) == 5


async def test_listing_over_many_pages(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.sdk._sandbox._PAGE", 3)
    made = [r.unwrap().id async for r in client.create_many("base", count=10)]
    assert sorted(info.id for info in await client.list()) == sorted(made)
    assert len(await client.list(limit=7)) == 7


async def test_ending_many(client: AsyncClient) -> None:
    boxes = [r.unwrap() async for r in client.create_many("base", count=3)]
    errors = await client.kill_many([boxes[0], boxes[1].id, boxes[2].info, "0" * 24], cause=Cause.PLATFORM_KILLED)
    assert list(errors) == ["0" * 24]
    assert isinstance(errors["0" * 24], SandboxNotFound)
    info = await boxes[0].refresh()
    assert (info.cause, info.infra) == (Cause.PLATFORM_KILLED, True)


async def test_runs(server: Served, client: AsyncClient) -> None:
    run = client.run("grpo-42")
    box = await run.sandbox("task17/3", "base", cpus=2)
    async with server.client() as another:
        same = await another.run("grpo-42").sandbox("task17/3", "base", cpus=2)
        assert same.id == box.id
        with pytest.raises(Conflict):
            await another.run("grpo-42").sandbox("task17/3", "base", cpus=3)
        assert (await another.find("task17/3", run="grpo-42")).id == box.id
        elsewhere = await another.run("other/run").sandbox("task17/3", "base")
        assert elsewhere.id != box.id
        assert (await another.find("task17/3", run="other/run")).id == elsewhere.id
    with pytest.raises(SandboxNotFound):
        await client.find("task17/3")
    assert [info.id for info in await run.list()] == [box.id]
    assert await run.kill() == {}
    assert await run.list() == []
    assert len(await client.list()) == 1
    assert (await run.sandbox("task17/3", "base", cpus=2)).id != box.id


async def test_about_the_server(client: AsyncClient) -> None:
    await client.create("base")
    assert (await client.node())["live"] == 1
    assert await client.environments() == {"base": ["0123456789abcdef"]}


# --- files ---


@pytest.fixture
async def box(client: AsyncClient) -> AsyncSandbox:
    return await client.create("base")


async def test_content_of_every_kind(box: AsyncSandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000
    (tmp_path / "local").write_bytes(data)

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(data), 100_000):
            yield data[i : i + 100_000]

    with (tmp_path / "local").open("rb") as file:
        file.seek(10)
        assert await box.files.write("/from-file", file) == len(data) - 10
    assert await box.files.read_bytes("/from-file") == data[10:]
    kinds: list[object] = [data, bytearray(data), memoryview(data), io.BytesIO(data), parts(), iter([data, b""])]
    for content in kinds:
        assert await box.files.write("/f", content) == len(data)  # type: ignore[arg-type]
        assert await box.files.read_bytes("/f") == data
    assert b"".join([chunk async for chunk in box.files.read_stream("/f")]) == data
    assert await box.files.read_bytes("/f", offset=5, length=3) == data[5:8]
    for text in ("h\u00e9llo", ""):
        await box.files.write("/text", text)
        assert await box.files.read("/text") == text


async def test_a_pipe_is_sent_as_it_comes(box: AsyncSandbox) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"through a pipe")
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        assert await box.files.write("/f", pipe) == 14
    assert await box.files.read("/f") == "through a pipe"


async def test_an_iterator_that_fails_leaves_the_file_as_it_was(box: AsyncSandbox) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        raise ZeroDivisionError("the caller's own")

    await box.files.write("/f", "before")
    with pytest.raises(ZeroDivisionError):
        await box.files.write("/f", parts())
    assert await box.files.read("/f") == "before"


async def test_text_files_are_refused(box: AsyncSandbox, tmp_path: Path) -> None:
    (tmp_path / "local").write_text("x")
    with (tmp_path / "local").open() as file, pytest.raises(InvalidRequest, match="rb"):
        await box.files.write("/f", file)  # type: ignore[arg-type]


async def test_names_are_bytes(box: AsyncSandbox) -> None:
    name = b"/dir/\xff &?#%+\xc3\xa9"
    await box.files.write(name, "x", parents=True)
    assert await box.files.read(name) == "x"
    assert await box.files.read(os.fsdecode(name)) == "x"
    assert await box.files.read(Path(os.fsdecode(name))) == "x"
    entry = (await box.files.list("/dir"))[0]
    assert os.fsencode(entry.name) == b"\xff &?#%+\xc3\xa9"
    with pytest.raises(InvalidRequest):
        await box.files.read("/a\0b")
    with pytest.raises(InvalidRequest):
        await box.files.read("")


async def test_the_rest_of_the_calls(box: AsyncSandbox) -> None:
    files = box.files
    await files.mkdir("/d/e", parents=True, mode=0o750)
    await files.mkdir("/d/e", parents=True)
    with pytest.raises(FileError):
        await files.mkdir("/d/e")
    await files.write("/d/e/f", "one", mode=0o640)
    await files.write("/d/e/f", " two", append=True)
    with pytest.raises(FileError):
        await files.write("/d/e/f", "x", exclusive=True)
    info = await files.stat("/d/e/f")
    assert (info.type, info.size, info.mode & 0o777) == ("file", 7, 0o640)
    assert [entry.name for entry in await files.list("/d", depth=2)] == ["e", "e/f"]
    await files.move("/d/e/f", "/d/g")
    assert not await files.exists("/d/e/f")
    assert await files.exists("/d/g")
    await box.commands.run(["ln", "-s", "/d/g", "/link"])
    assert (await files.stat("/link")).type == "symlink"
    assert (await files.stat("/link")).target == "/d/g"
    assert (await files.stat("/link", follow=True)).type == "file"
    with pytest.raises(FileError) as caught:
        await files.remove("/d")
    assert caught.value.details["errno"]
    await files.remove("/d", recursive=True)
    with pytest.raises(FileMissing):
        await files.stat("/d")
    with pytest.raises(FileMissing):
        await files.remove("/d")

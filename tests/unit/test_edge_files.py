"""File calls through the edge. (What the guest does with them is the conformance suite's business.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_kit import Kit, spec, until

from dsec.edge.node import Edge
from dsec.errors import FileError, FileMissing, InvalidRequest, SandboxEnded


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Kit(tmp_path).edge() as opened:
        yield opened


@pytest.fixture
async def box(edge: Edge) -> str:
    return (await edge.create(spec(), project="p")).sandbox.id


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(edge: Edge, box: str, path: bytes, **options: int) -> bytes:
    return b"".join([data async for data in edge.read_file(box, path, **options)])  # type: ignore[arg-type]


async def test_write_read_stat_list_move_remove(edge: Edge, box: str) -> None:
    assert await edge.write_file(box, b"/tmp/a/b", chunks(b"one", b"", b"two"), parents=True, mode=0o640) == 6
    assert await read(edge, box, b"/tmp/a/b") == b"onetwo"
    assert await read(edge, box, b"/tmp/a/b", offset=2, length=3) == b"etw"
    info = await edge.stat_file(box, b"/tmp/a/b")
    assert (info.type, info.size, info.mode) == ("file", 6, 0o640)
    await edge.write_file(box, b"/tmp/a/b", chunks(b"!"), append=True)
    assert await read(edge, box, b"/tmp/a/b") == b"onetwo!"
    await edge.make_directory(box, b"/tmp/d/e", parents=True)
    await edge.move_file(box, b"/tmp/a/b", b"/tmp/d/e/c")
    assert {entry.name for entry in await edge.list_files(box, b"/tmp", depth=3)} >= {"a", "d", "d/e", "d/e/c"}
    with pytest.raises(FileError):
        await edge.remove_file(box, b"/tmp/d")
    await edge.remove_file(box, b"/tmp/d", recursive=True)
    with pytest.raises(FileMissing):
        await edge.stat_file(box, b"/tmp/d")


async def test_a_large_file_streams(edge: Edge, box: str) -> None:
    block = bytes(range(256)) * 256
    assert await edge.write_file(box, b"/tmp/big", chunks(*[block] * 100)) == 100 * len(block)
    size = 0
    async for data in edge.read_file(box, b"/tmp/big"):
        assert len(data) <= len(block)
        size += len(data)
    assert size == 100 * len(block)


async def test_an_upload_that_is_cut_leaves_the_file_as_it_was(edge: Edge, box: str) -> None:
    await edge.write_file(box, b"/tmp/f", chunks(b"old"))

    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await edge.write_file(box, b"/tmp/f", broken())

    stuck = asyncio.Event()

    async def hangs() -> AsyncIterator[bytes]:
        yield b"new"
        stuck.set()
        await asyncio.sleep(3600)

    caller = asyncio.ensure_future(edge.write_file(box, b"/tmp/f", hangs()))
    await stuck.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await read(edge, box, b"/tmp/f") == b"old"
    await until(lambda: not edge._lives.sandboxes[box].running().channel.operations())
    assert edge._lives.sandboxes[box].requests == 0


async def test_a_download_that_is_left_early_leaks_nothing(edge: Edge, box: str) -> None:
    await edge.write_file(box, b"/tmp/big", chunks(*[bytes(65536)] * 20))
    content = edge.read_file(box, b"/tmp/big")
    await anext(content)
    await content.aclose()
    await until(lambda: not edge._lives.sandboxes[box].running().channel.operations())
    assert edge._lives.sandboxes[box].requests == 0


async def test_bad_paths(edge: Edge, box: str) -> None:
    for path in (b"", b"relative", b"/a\0b"):
        with pytest.raises(InvalidRequest):
            await edge.stat_file(box, path)
    with pytest.raises(FileMissing, match="nowhere"):
        await read(edge, box, b"/nowhere")
    await edge.write_file(box, b"/tmp/\xff", chunks(b"x"))
    assert (await edge.stat_file(box, b"/tmp/\xff")).size == 1


async def test_files_of_an_ended_sandbox(edge: Edge, box: str) -> None:
    await edge.delete(box)
    with pytest.raises(SandboxEnded):
        await read(edge, box, b"/etc/passwd")

"""File calls, through `dsec.channel.files`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from dsec.channel import files
from dsec.errors import FileError, FileMissing, InvalidRequest, PermissionDenied
from dsec.ports import GuestChannel
from dsec.testing.conformance.kit import PATIENCE_S, Factory, Feature, Sandboxes, needs, ok, run

ODD = "/tmp/odd \udcff\n name"


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def put(channel: GuestChannel, path: str, data: bytes = b"", **options: object) -> int:
    return await files.write_file(channel, path, chunks(data), **options)  # type: ignore[arg-type]


async def get(channel: GuestChannel, path: str, **options: object) -> bytes:
    return b"".join([part async for part in files.read_file(channel, path, **options)])  # type: ignore[arg-type]


class TestFiles:
    """Reads, writes, lists, moves; as a user; whole or not at all."""

    @pytest.mark.parametrize("size", [0, 1, 65_536, 1_000_001])
    async def test_what_was_written_is_read(self, sandboxes: Sandboxes, size: int) -> None:
        channel = (await sandboxes.one()).channel
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        assert await put(channel, "/tmp/f", data) == size
        assert await get(channel, "/tmp/f") == data
        assert ok(await run(channel, "cat", "/tmp/f")) == data

    async def test_fifty_megabytes_stream_both_ways(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        piece, count = bytes(range(256)) * 1024, 200
        sent, got = hashlib.sha256(), hashlib.sha256()

        async def source() -> AsyncIterator[bytes]:
            for _ in range(count):
                sent.update(piece)
                yield piece

        assert await files.write_file(channel, "/tmp/big", source()) == len(piece) * count
        async for part in files.read_file(channel, "/tmp/big"):
            got.update(part)
        assert got.digest() == sent.digest()

    async def test_parts_of_a_file(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/f", b"0123456789")
        assert await get(channel, "/tmp/f", offset=3, length=4) == b"3456"
        assert await get(channel, "/tmp/f", offset=8) == b"89"
        assert await get(channel, "/tmp/f", offset=100) == b""
        assert await get(channel, "/tmp/f", length=0) == b""

    async def test_what_is_missing_or_no_file(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/f")
        with pytest.raises(FileMissing):
            await get(channel, "/tmp/none")
        with pytest.raises(FileMissing):
            await get(channel, "/tmp/none/f")
        with pytest.raises(FileMissing):
            await put(channel, "/tmp/none/f")
        with pytest.raises(FileError):
            await get(channel, "/tmp")
        with pytest.raises(FileError):
            await put(channel, "/tmp")
        with pytest.raises(FileError):
            await get(channel, "/tmp/f/g")
        with pytest.raises(FileError):
            await get(channel, "/tmp/" + "x" * 300)

    @pytest.mark.parametrize("path", ["", "tmp/f", "/tmp/\0"])
    async def test_paths_that_cannot_be(self, sandboxes: Sandboxes, path: str) -> None:
        channel = (await sandboxes.one()).channel
        with pytest.raises(InvalidRequest):
            await get(channel, path)

    async def test_writing_replaces_appends_or_refuses(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/f", b"long before", mode=0o600)
        await put(channel, "/tmp/f", b"new")
        await put(channel, "/tmp/f", b"er", append=True)
        assert await get(channel, "/tmp/f") == b"newer"
        with pytest.raises(FileError):
            await put(channel, "/tmp/f", b"x", exclusive=True)
        assert await get(channel, "/tmp/f") == b"newer"
        await put(channel, "/tmp/g", b"x", exclusive=True)

    async def test_missing_directories_are_made_where_asked_for(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/a/b/c", b"x", parents=True, mode=0o640)
        info = await files.stat(channel, "/tmp/a/b/c")
        assert (info.type, info.mode, info.size, info.uid) == ("file", 0o640, 1, 0)

    async def test_an_upload_that_is_broken_off_leaves_nothing(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/d/f", b"before", parents=True)

        async def broken() -> AsyncIterator[bytes]:
            yield bytes(100_000)
            raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await files.write_file(channel, "/tmp/d/f", broken())
        assert await get(channel, "/tmp/d/f") == b"before"
        async with asyncio.timeout(PATIENCE_S):  # the guest removes what was begun a moment later
            while len(await files.list_dir(channel, "/tmp/d")) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert [entry.name for entry in await files.list_dir(channel, "/tmp/d")] == ["f"]

    async def test_list_and_stat(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/d/f", b"abc", parents=True)
        await put(channel, "/tmp/d/sub/g", parents=True)
        ok(await run(channel, "ln", "-s", "f", "/tmp/d/link"))
        entries = {entry.name: entry for entry in await files.list_dir(channel, "/tmp/d")}
        assert {name: entry.type for name, entry in entries.items()} == {
            "f": "file",
            "sub": "directory",
            "link": "symlink",
        }
        assert (entries["f"].size, entries["link"].target) == (3, "f")
        deep = {entry.name for entry in await files.list_dir(channel, "/tmp/d", depth=2)}
        assert deep == {"f", "sub", "link", "sub/g"}
        assert (await files.stat(channel, "/tmp/d/link")).type == "file"
        assert (await files.stat(channel, "/tmp/d/link", follow=False)).type == "symlink"
        with pytest.raises(FileMissing):
            await files.stat(channel, "/tmp/none")
        with pytest.raises(FileError):
            await files.list_dir(channel, "/tmp/d/f")

    async def test_links_are_followed_by_reads_and_writes(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/f", b"abc")
        ok(await run(channel, "ln", "-s", "/tmp/f", "/tmp/link"))
        ok(await run(channel, "ln", "-s", "loop", "/tmp/loop"))
        assert await get(channel, "/tmp/link") == b"abc"
        await put(channel, "/tmp/link", b"new")
        assert await get(channel, "/tmp/f") == b"new"
        assert (await files.stat(channel, "/tmp/link", follow=False)).type == "symlink"
        with pytest.raises(FileError):
            await get(channel, "/tmp/loop")

    async def test_names_that_are_no_text(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, ODD, b"x")
        assert await get(channel, ODD) == b"x"
        entries = [entry for entry in await files.list_dir(channel, "/tmp") if entry.name_b64]
        assert ["/tmp/" + entry.name for entry in entries] == [ODD]

    async def test_move(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/a", b"a")
        await put(channel, "/tmp/b", b"b")
        with pytest.raises(FileError):
            await files.move(channel, "/tmp/a", "/tmp/b", exclusive=True)
        await files.move(channel, "/tmp/a", "/tmp/b")
        assert await get(channel, "/tmp/b") == b"a"
        with pytest.raises(FileMissing):
            await files.move(channel, "/tmp/a", "/tmp/b")

    async def test_remove(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/d/e/f", b"x", parents=True)
        with pytest.raises(FileError):
            await files.remove(channel, "/tmp/d")
        await files.remove(channel, "/tmp/d/e/f")
        await files.remove(channel, "/tmp/d/e")
        await put(channel, "/tmp/d/e/f", b"x", parents=True)
        await files.remove(channel, "/tmp/d", recursive=True)
        with pytest.raises(FileMissing):
            await files.remove(channel, "/tmp/d")

    async def test_mkdir(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await files.mkdir(channel, "/tmp/d", mode=0o700)
        info = await files.stat(channel, "/tmp/d")
        assert (info.type, info.mode) == ("directory", 0o700)
        with pytest.raises(FileError):
            await files.mkdir(channel, "/tmp/d")
        with pytest.raises(FileMissing):
            await files.mkdir(channel, "/tmp/x/y")
        await files.mkdir(channel, "/tmp/x/y", parents=True)
        await files.mkdir(channel, "/tmp/x/y", parents=True)

    async def test_users(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/f", b"x", user="nobody")
        assert (await files.stat(channel, "/tmp/f")).uid == 65534
        await put(channel, "/root/secret", b"x", mode=0o600)
        for path in ("/root/secret", "/root/secret/below"):
            with pytest.raises(PermissionDenied):
                await get(channel, path, user="nobody")
        with pytest.raises(PermissionDenied):
            await put(channel, "/etc/f", b"x", user="nobody")
        with pytest.raises(PermissionDenied):
            await files.mkdir(channel, "/etc/d", user="nobody")
        with pytest.raises(InvalidRequest):
            await get(channel, "/tmp/f", user="no-such-user")

    async def test_procfs_is_refused(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        for path in ("/proc/self/environ", "/tmp/../proc/self/environ"):
            with pytest.raises((PermissionDenied, FileError)):
                await get(channel, path)

    async def test_dots_stay_inside(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        inside = await get(channel, "/etc/passwd")
        assert await get(channel, "/../../../../../etc/passwd") == inside
        assert await get(channel, "/tmp/../etc/./passwd") == inside

    async def test_a_full_disk(self, sandboxes: Sandboxes, factory: Factory) -> None:
        needs(factory, Feature.DISK_LIMIT)
        channel = (await sandboxes.create(disk_bytes=16 << 20)).channel

        async def source() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield bytes(1 << 20)

        with pytest.raises(FileError, match="disk full"):
            await files.write_file(channel, "/tmp/big", source())
        await put(channel, "/tmp/small", b"x")

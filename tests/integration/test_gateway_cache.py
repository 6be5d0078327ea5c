"""The gateways' cache: crashes, damage, bounds, many askers at once; nobody gets what another's rights fetched."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import pytest
from gateway_kit import open_front, serve
from upstream_kit import OLD, Index

from dsec.egress.gateways.answers import UpstreamError
from dsec.egress.gateways.cache import Body, Cache, Fetch, Item
from dsec.egress.gateways.config import GatewaysConfig, Upstream
from dsec.egress.gateways.parsed import LIMIT_BYTES, Parsed

LIMIT = 1 << 20


class Source:
    """An upstream: counts what it is asked, and sends its pieces when it may."""

    def __init__(self, *pieces: bytes, fail: bool = False) -> None:
        self.pieces, self.fail, self.asked = pieces, fail, 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self) -> Body:
        self.asked += 1
        await asyncio.sleep(0)

        async def data() -> AsyncGenerator[bytes, None]:
            for piece in self.pieces:
                yield piece
                await self.go_on.wait()
            if self.fail:
                raise UpstreamError("cut")

        return Body({"Content-Type": "text/plain"}, data())


async def read(cache: Cache, key: str, source: Fetch, sha256: str | None = None) -> bytes:
    item = await cache.get(key, source, limit=LIMIT, sha256=sha256)
    try:
        return await item.whole()
    finally:
        item.close()


def opened() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


async def test_many_askers_are_one_fetch_and_read_as_it_comes(tmp_path: Path) -> None:
    cache, source = Cache(tmp_path, LIMIT), Source(b"a" * 1000, b"b" * 1000, b"c")
    source.go_on.clear()
    before = opened()
    first = await cache.get("key", source, limit=LIMIT)
    readers = [asyncio.create_task(read(cache, "key", source)) for _ in range(50)]
    gave_up = asyncio.create_task(read(cache, "key", source))
    await asyncio.sleep(0.01)
    gave_up.cancel()
    source.go_on.set()
    assert set(await asyncio.gather(*readers)) == {b"a" * 1000 + b"b" * 1000 + b"c"}
    assert source.asked == 1
    first.close()
    await asyncio.gather(gave_up, return_exceptions=True)
    assert await read(cache, "key", source) == b"a" * 1000 + b"b" * 1000 + b"c"
    assert source.asked == 1
    assert opened() == before


async def test_a_fetch_goes_on_without_its_first_asker(tmp_path: Path) -> None:
    cache, source = Cache(tmp_path, LIMIT), Source(b"x" * 10, b"y")
    source.go_on.clear()
    asker = asyncio.create_task(read(cache, "key", source))
    await asyncio.sleep(0.01)
    asker.cancel()
    source.go_on.set()
    assert await read(cache, "key", source) == b"x" * 10 + b"y"
    assert source.asked == 1


async def test_what_fails_is_not_kept_and_never_looks_whole(tmp_path: Path) -> None:
    cache, before = Cache(tmp_path, LIMIT), opened()
    good = hashlib.sha256(b"good").hexdigest()
    for source, sha256 in (
        (Source(b"ab", b"cd", fail=True), None),
        (Source(b"evil"), good),
        (Source(b"x" * LIMIT, b"y"), None),
    ):
        item = await cache.get("key", source, limit=LIMIT, sha256=sha256)
        got: list[bytes] = []

        async def gather(item: Item, got: list[bytes]) -> None:
            async for data in item.read():
                got.append(data)

        with pytest.raises(UpstreamError):
            await gather(item, got)
        item.close()
        assert len(b"".join(got)) < sum(len(piece) for piece in source.pieces)
    assert files(tmp_path) == []
    assert await read(cache, "key", Source(b"good"), good) == b"good"
    assert opened() == before


async def test_a_disk_that_takes_nothing_is_an_error_and_no_leak(tmp_path: Path) -> None:
    cache, ended = Cache(tmp_path / "cache", LIMIT), []
    (tmp_path / "cache").rmdir()

    async def fetch() -> Body:
        async def data() -> AsyncGenerator[bytes, None]:
            try:
                yield b"x"
            finally:
                ended.append(True)

        return Body({}, data())

    with pytest.raises(UpstreamError, match="cache"):
        await read(cache, "key", fetch)
    assert ended == [True]


async def test_eviction_while_it_is_read_takes_nothing_away(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2500)
    await read(cache, "a", Source(b"a" * 1000))
    item = await cache.get("a", Source(), limit=LIMIT)
    for key in "bcd":
        await read(cache, key, Source(b"x" * 1000))
    assert await item.whole() == b"a" * 1000
    item.renew()
    item.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow", "other"])
async def test_damaged_files_are_fetched_again(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path, LIMIT)
    await read(cache, "other", Source(b"other body"))
    (other,) = files(tmp_path)
    await read(cache, "key", Source(b"the right body"))
    path = next(each for each in files(tmp_path) if each != other)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "flip": b"T" + whole[1:],
            "cut": whole[:-3],
            "empty": b"",
            "grow": whole + b"x",
            "other": other.read_bytes(),
        }[damage]
    )
    fresh, source = Cache(tmp_path, LIMIT), Source(b"the right body")
    assert await read(fresh, "key", source) == b"the right body"
    assert source.asked == 1
    assert await read(fresh, "key", source) == b"the right body"
    assert source.asked == 1


async def test_a_crash_leaves_nothing_half_done(tmp_path: Path) -> None:
    (tmp_path / ".half").write_bytes(b"x" * 1000)
    Cache(tmp_path, LIMIT)
    assert files(tmp_path) == []


async def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2500)
    sources = {name: Source(name.encode() * 1000) for name in "abc"}
    await read(cache, "a", sources["a"])
    await read(cache, "b", sources["b"])
    await read(cache, "a", sources["a"])
    await read(cache, "c", sources["c"])
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2500
    await read(Cache(tmp_path, 2500), "a", sources["a"])
    assert sources["a"].asked == 1
    await read(cache, "b", sources["b"])
    assert sources["b"].asked == 2


async def test_pages_are_asked_for_again_by_their_tag(tmp_path: Path) -> None:
    cache, seen = Cache(tmp_path, LIMIT), []
    text = b"one"

    async def fetch(old: Mapping[str, str]) -> Body | None:
        seen.append(old.get("ETag"))
        if old.get("ETag") == text.decode():
            return None

        async def data() -> AsyncGenerator[bytes, None]:
            yield text

        return Body({"ETag": text.decode()}, data())

    async def page(ttl_s: float) -> bytes:
        item = await cache.page("key", fetch, limit=LIMIT, ttl_s=ttl_s)
        try:
            return await item.whole()
        finally:
            item.close()

    before = opened()
    assert await page(60) == b"one"
    assert await page(60) == b"one"
    assert seen == [None]
    assert await page(0) == b"one"
    assert set(await asyncio.gather(*(page(0) for _ in range(10)))) == {b"one"}
    text = b"two"
    assert await page(0) == b"two"
    assert seen[:2] == [None, "one"]
    assert opened() == before


async def test_what_credentials_fetched_is_for_their_project_alone(tmp_path: Path) -> None:
    index, state = Index(), tmp_path / "state"
    state.mkdir()
    async with serve(index.handle) as index.url:
        index.add("tool", "1.0", OLD)
        host = index.url.removeprefix("http://")
        secrets = state / "secrets.toml"
        secrets.touch(0o600)
        secrets.write_text(f'[key]\nvalue = "long-enough-key"\nhosts = ["{host}"]\nprojects = ["ours", "theirs"]\n')
        upstream = Upstream(f"{index.url}/simple/", headers={"Authorization": "Bearer secret:key"})
        index.need = "Bearer long-enough-key"
        url, path = "http://pypi.dsec/files/tool/tool-1.0-py3-none-any.whl", "/packages/tool/tool-1.0-py3-none-any.whl"
        async with open_front(state, GatewaysConfig(pypi=upstream)) as front:
            front.grant("pypi")
            for project, status, times in (("ours", 200, 1), ("ours", 200, 1), ("other", 502, 1), ("theirs", 200, 2)):
                front.project = project
                assert (await front.get(url))[0] == status
                assert index.asked.count(path) == times
        # Without credentials in the configuration, what they fetched isn't there either.
        async with open_front(state, GatewaysConfig(pypi=Upstream(f"{index.url}/simple/"))) as front:
            front.grant("pypi")
            front.project = "ours"
            assert (await front.get(url))[0] == 404


def test_parsed_pages_are_bounded() -> None:
    parsed: Parsed[int] = Parsed()
    made = []

    def make(number: int) -> int:
        made.append(number)
        return number

    for number in (1, 2, 1, 3, 1, 2):  # two of them fit
        assert parsed.get(str(number), LIMIT_BYTES // 2, lambda number=number: make(number)) == number  # type: ignore[misc]
    assert made == [1, 2, 3, 2]
    assert parsed.get("huge", LIMIT_BYTES * 2, lambda: make(4)) == 4
    assert parsed.get("1", 1, lambda: make(1)) == 1
    assert made == [1, 2, 3, 2, 4, 1]

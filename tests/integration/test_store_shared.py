"""The shared store: both kinds behave alike; layers survive the way through it, and no fault ever gives wrong bytes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from store_kit import keys, make_bucket, node, only, project, s3_server, until

from dsec.errors import InvalidRequest, LayerCorrupt, NotFound, Unavailable
from dsec.ports import BlobStore
from dsec.store import blobs
from dsec.store import format as form
from dsec.store.blobs import BucketStore, DirectoryStore, open_store
from dsec.store.shared import SharedLayers
from dsec.testing.blobs import FaultyStore
from dsec.testing.clock import FakeClock
from free_port import free_port


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with s3_server() as url:
            yield url


@pytest.fixture(params=["directory", "bucket"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BlobStore]:
    if request.param == "directory":
        found = open_store(str(tmp_path / "shared"))
    else:
        url, name = request.getfixturevalue("s3"), f"b{os.urandom(6).hex()}"
        make_bucket(url, name)
        found = open_store(f"s3://{name}/some/prefix?endpoint={url}&region=us-east-1")
    yield found
    await found.close()


async def test_objects(store: BlobStore, tmp_path: Path) -> None:
    assert await store.size("a/b") is None
    with pytest.raises(NotFound):
        await store.get("a/b")
    with pytest.raises(NotFound):
        await store.get("a/b", 3, 5)
    await store.put("a/b", b"0123456789")
    assert await store.size("a/b") == 10
    assert await store.get("a/b") == b"0123456789"
    assert await store.get("a/b", 3, 4) == b"3456"
    assert await store.get("a/b", 8, 100) == b"89"
    assert await store.get("a/b", 8) == b"89"
    assert await store.get("a/b", 5, 0) == b""
    await store.put("a/b", b"new")
    assert await store.get("a/b") == b"new"
    assert await store.put_if_absent("a/b", b"other") is False
    assert await store.get("a/b") == b"new"
    (tmp_path / "file").write_bytes(b"f" * 300_000)
    assert await store.put_if_absent("a/c+d@1.0=%2F", tmp_path / "file") is True
    assert await store.get("a/c+d@1.0=%2F", 299_990, 10) == b"f" * 10
    await store.put("ab", b"")
    assert await store.get("ab") == b""
    assert await store.get_each(["a/b", "a/none", "a/c+d@1.0=%2F"], 2) == [b"ne", None, b"ff"]
    assert await keys(store, "a/") == ["a/b", "a/c+d@1.0=%2F"]
    assert [i.size async for i in store.list("a/")] in ([3, 300_000], [300_000, 3])
    assert await keys(store, "nothing/") == []
    await store.delete("a/b")
    await store.delete("a/b")
    assert await store.size("a/b") is None
    for bad in ("", "/a", "a//b", "../a", "a/../b", "a/.hidden", ".tmp/x", "a\0", "a b", "x" * 901):
        with pytest.raises(InvalidRequest):
            await store.put(bad, b"")
        with pytest.raises(InvalidRequest):
            await store.get(bad)


async def test_a_large_object_tells_how_far_it_is(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "_ONE_PUT_BYTES", 1 << 20)
    (tmp_path / "file").write_bytes(data := os.urandom(12_000_000))
    told: list[int] = []
    assert await store.put_if_absent("packs/large", tmp_path / "file", told.append)
    assert told == sorted(told)
    assert len(told) > 5
    assert told[-1] == len(data)
    assert await store.get("packs/large") == data


async def test_one_of_many_writers_wins_and_readers_see_whole_objects(store: BlobStore) -> None:
    bodies = [bytes([65 + n]) * 200_000 for n in range(8)]
    won = await asyncio.gather(*(store.put_if_absent("once", body) for body in bodies))
    assert sum(won) == 1
    assert await store.get("once") == bodies[won.index(True)]
    stop = False

    async def write(body: bytes) -> None:
        for _ in range(5):
            await store.put("many", body)

    async def read() -> None:
        while not stop:
            assert await store.get("many") in bodies

    await store.put("many", bodies[0])
    reader = asyncio.create_task(read())
    await asyncio.gather(*map(write, bodies))
    stop = True
    await reader


async def test_a_directory_leaves_nothing_half_written(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    with pytest.raises(NotFound):
        await store.put("a", tmp_path / "absent")
    assert [path for path in (tmp_path / "s").rglob("*") if path.is_file()] == []
    (tmp_path / "s" / ".tmp" / "old").write_bytes(b"")
    (tmp_path / "s" / ".tmp" / "young").write_bytes(b"")
    os.utime(tmp_path / "s" / ".tmp" / "old", (0, 0))
    assert store.remove_stale() == 1
    await store.close()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable):
        open_store(str(tmp_path / "file"))
    for bad in ("http://host/x", "s3://", "s3://b?colour=red"):
        with pytest.raises(InvalidRequest):
            open_store(bad)


async def test_a_directory_that_is_gone_or_fails_is_unavailable(tmp_path: Path) -> None:
    """Never empty: what is in use would be taken for garbage, and names for forgotten."""
    store = DirectoryStore(tmp_path / "s")
    await store.put("names/x", b"1")
    (tmp_path / "s" / "leases").symlink_to("leases")
    with pytest.raises(Unavailable):
        _ = [info async for info in store.list("leases/")]
    assert [info.key async for info in store.list("locks/")] == []
    assert await store.size("names/x/y") is None
    (tmp_path / "s").rename(tmp_path / "elsewhere")
    (tmp_path / "s").mkdir()  # where it was mounted
    for work in (store.get("names/x"), store.size("names/x"), store.put("names/x", b""), store.delete("names/x")):
        with pytest.raises(Unavailable):
            await work
    with pytest.raises(Unavailable):
        await store.get_each(["names/x"], 5)
    with pytest.raises(Unavailable):
        _ = [info async for info in store.list("names/")]
    await store.close()


async def test_a_bucket_that_is_not_there_is_unavailable() -> None:
    gone = BucketStore("b", endpoint="http://127.0.0.1:9", region="us-east-1", retry_s=0.3)
    for call in (gone.put("k", b""), gone.get("k"), gone.size("k"), gone.delete("k")):
        with pytest.raises(Unavailable):
            await call
    with pytest.raises(Unavailable):
        _ = [info async for info in gone.list("a/")]


def same(one: SharedLayers, other: SharedLayers, layer: str) -> None:
    for name in ("manifest.json", "meta.erofs", "data"):
        paths = [each._layers.root / layer / name for each in (one, other)]
        assert paths[0].read_bytes() == paths[1].read_bytes(), name


async def test_a_bucket_that_fails_is_unavailable_whatever_the_key_says() -> None:
    """Never "not there": a lease that can't be read is no lease that has ended."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=500, text="status code: 416 InvalidRange")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", free_port())
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    store = BucketStore("bucket", endpoint=url, region="us-east-1", retry_s=0.1)
    key = "leases/upload-416f0404"
    try:
        for work in (store.get(key, 0, 5), store.get(key), store.size(key), store.put_if_absent(key, b"")):
            with pytest.raises(Unavailable):
                await work
    finally:
        await runner.cleanup()


async def test_layers_go_through_the_store_and_share_chunks(store: BlobStore, tmp_path: Path) -> None:
    here, there = node(tmp_path / "here", store), node(tmp_path / "there", store)
    source = project(tmp_path / "source", 1)
    first = here._layers.add(source, "workspace").digest
    added = await here.push(first)
    assert added > 2_000_000
    assert await here.push(first) == 0
    (source / "d1" / "new").write_bytes(b"n" * 70_000)
    second = there._layers.add(source, "workspace").digest
    assert await there.push(second) < 0.3 * added, "the other node's chunks are found"
    for layer in (first, second):
        await (here if layer == second else there).pull(layer)
        same(here, there, layer)
        manifest = await here.verify(layer)
        assert manifest.digest == layer
    assert sorted([layer async for layer in here.all()]) == sorted([first, second])
    assert await keys(store, "leases/") == []
    pack = (await here.placement(first)).packs
    assert len(pack) == 1
    body = await store.get(form.pack_key(pack[0]))
    assert hashlib.sha256(body).hexdigest() == pack[0]
    empty = here._layers.add_tree({}, "directory").digest
    await here.push(empty)
    assert (await there.pull(empty)).digest == empty


async def test_a_slow_failing_store_gives_the_layer_or_an_error(tmp_path: Path) -> None:
    faulty = FaultyStore(DirectoryStore(tmp_path / "s"), seed=5)
    here, there = node(tmp_path / "here", faulty), node(tmp_path / "there", faulty)
    layer = here._layers.add(project(tmp_path / "source", 2), "workspace").digest
    faulty.gone = True
    with pytest.raises(Unavailable):
        await here.push(layer)
    faulty.gone = False
    faulty.fail_share = 0.3
    for _ in range(100):
        try:
            await here.push(layer)
            break
        except Unavailable:
            assert not there._layers.has(layer)
    faulty.latency_s = 0.001
    for _ in range(100):
        try:
            await there.pull(layer)
            break
        except Unavailable:
            assert not there._layers.has(layer)
    same(here, there, layer)
    assert list((tmp_path / "there" / "store" / "tmp").iterdir()) == []


@pytest.mark.parametrize("fault", ["truncate", "corrupt", "delete"])
@pytest.mark.parametrize("part", ["manifests", "placements", "metadata", "packs"])
async def test_damage_is_noticed_and_nothing_of_it_is_kept(tmp_path: Path, part: str, fault: str) -> None:
    faulty = FaultyStore(DirectoryStore(tmp_path / "s"))
    here, there = node(tmp_path / "here", faulty), node(tmp_path / "there", faulty)
    layer = here._layers.add(project(tmp_path / "source", 3), "workspace").digest
    await here.push(layer)
    (key,) = await keys(faulty, f"{part}/")
    if fault == "delete":
        await faulty.delete(key)
    else:
        getattr(faulty, fault).add(key)
    for call in (there.pull, there.verify):
        with pytest.raises((LayerCorrupt, NotFound)):
            await call(layer)
    assert there._layers.all() == []
    assert list((tmp_path / "there" / "store" / "tmp").iterdir()) == []
    if fault != "delete":
        getattr(faulty, fault).clear()
        await there.pull(layer)
        same(here, there, layer)


async def test_a_damaged_local_layer_is_not_pushed(tmp_path: Path) -> None:
    here = node(tmp_path / "here", DirectoryStore(tmp_path / "s"))
    layer = here._layers.add(project(tmp_path / "source", 3), "workspace").digest
    path = here._layers.root / layer / "data"
    path.write_bytes(path.read_bytes()[:-5000] + b"?" * 5000)
    with pytest.raises(LayerCorrupt):
        await here.push(layer)
    assert [layer async for layer in here.all()] == []


async def test_garbage_is_collected_and_nothing_in_use_or_upload_is_lost(tmp_path: Path) -> None:
    store = FaultyStore(DirectoryStore(tmp_path / "s"))
    here, there = node(tmp_path / "here", store), node(tmp_path / "there", store)
    source = project(tmp_path / "source", 4)
    layers = []
    for number in range(3):
        (source / "own").write_bytes(b"%d" % number * 50_000)
        layers.append(here._layers.add(source, "workspace").digest)
        await here.push(layers[-1])
    named, used, garbage = layers
    await here.leases.use("some-node", [used])
    later = time.time() + 7200
    assert await there.collect(only(named), least_age_s=1e9, now=later) == 0, "young ones stay"
    assert await there.collect(only(named), least_age_s=3600, now=later) > 0
    assert sorted([layer async for layer in here.all()]) == sorted([named, used])
    for layer in (named, used):
        await there.verify(layer)
    # A layer is made again whose chunks lay in a pack that is gone or not.
    await here.push(garbage)
    await there.verify(garbage)
    # While an upload runs nothing is deleted; while it is waited for, no other begins.
    store.latency_s = 0.05
    (source / "own").write_bytes(b"slow" * 50_000)
    late = there._layers.add(source, "workspace").digest
    pushing = asyncio.create_task(there.push(late))
    await until(lambda: any((tmp_path / "s" / "leases").glob("upload-*")))

    async def roots() -> list[str]:
        assert pushing.done(), "what uploads end with is known"
        return [named]

    collecting = asyncio.create_task(here.collect(roots, least_age_s=3600, now=later))
    await until((tmp_path / "s" / "locks" / "gc").exists)
    waiting = asyncio.create_task(here.push(garbage))
    await collecting
    assert pushing.done(), "the collection waited for the upload"
    await asyncio.gather(pushing, waiting)
    await there.verify(garbage)
    assert await keys(store, "locks/") == await keys(store, "leases/upload-") == []


@pytest.mark.parametrize("key", ["leases/use-some-node", "leases/upload-some", "locks/gc"])
@pytest.mark.parametrize("fault", ["truncate", "corrupt"])
async def test_nothing_is_deleted_where_it_is_not_known_what_is_in_use(tmp_path: Path, key: str, fault: str) -> None:
    store = FaultyStore(DirectoryStore(tmp_path / "s"))
    here = node(tmp_path / "here", store)
    layer = here._layers.add(project(tmp_path / "source", 4), "workspace").digest
    await here.push(layer)
    await here.leases.use("other", [layer])
    await store.put(key, await store.get("leases/use-other"))
    await store.delete("leases/use-other")
    getattr(store, fault).add(key)
    with pytest.raises(Unavailable):
        await here.collect(only(), least_age_s=0, now=time.time() + 7200)
    await here.verify(layer)


async def test_leases_of_the_dead_expire(tmp_path: Path) -> None:
    clock = FakeClock()
    store = DirectoryStore(tmp_path / "s")
    here = node(tmp_path / "here", store, clock)
    upload = here.leases.upload()
    await upload.__aenter__()
    with pytest.raises(Unavailable, match="uploads go on: here"):
        async with here.leases.collection(wait_s=-1):
            pytest.fail("an upload runs")
    await upload.__aexit__(None, None, None)
    await here.leases.use("n", ["0" * 64])
    assert await here.leases.used() == {"0" * 64}
    await clock.advance(6 * 86400)
    assert await here.leases.used() == {"0" * 64}
    await clock.advance(2 * 86400)
    assert await here.leases.used() == set()
    await store.put("leases/upload-dead", b'{"holder": "dead", "expires_at": 1.0}')
    await store.put("locks/gc", b'{"holder": "dead", "expires_at": 1.0}')
    async with here.leases.collection():
        assert await keys(store, "leases/upload-") == []

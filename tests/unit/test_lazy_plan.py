"""Lazy layers, without a kernel: what is fetched ahead, and the arithmetic of what is there."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.store.format import BLOCK, CHUNK_BYTES, Manifest, Place, pack_chunks, pack_places
from dsec.store.lazy.cache import CachedLayer, LazyCache
from dsec.store.lazy.readahead import FILE_BYTES, LAST_WINDOW_BYTES, Readahead

SIZES = st.lists(st.integers(1, CHUNK_BYTES // BLOCK).map(lambda blocks: blocks * BLOCK), min_size=1, max_size=40)


def offsets(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


@given(SIZES, st.data())
def test_what_is_fetched_ahead_follows_the_read_and_is_bounded(sizes: list[int], data: st.DataObject) -> None:
    ahead = Readahead(offsets(sizes))
    count = len(sizes)
    for _ in range(20):
        first = data.draw(st.integers(0, count - 1))
        last = data.draw(st.integers(first, count - 1))
        found = ahead.read(first, last)
        assert all(last < index < count for index in found)
        if found:
            assert offsets(sizes)[found[-1]] - offsets(sizes)[last + 1] < LAST_WINDOW_BYTES


@given(SIZES)
def test_who_reads_in_order_never_has_a_chunk_fetched_ahead_twice(sizes: list[int]) -> None:
    ahead = Readahead(offsets(sizes))
    fetched = [index for chunk in range(len(sizes)) for index in ahead.read(chunk, chunk)]
    assert len(fetched) == len(set(fetched))
    assert set(fetched) == set(range(2, len(sizes)))  # the second read in a row begins it


def test_two_readers_in_order_are_told_apart_and_a_lone_read_fetches_nothing() -> None:
    ahead = Readahead(offsets([CHUNK_BYTES] * 100))
    assert not ahead.read(10, 10)
    assert not ahead.read(50, 50)
    assert list(ahead.read(11, 11)) == [12, 13]
    assert list(ahead.read(51, 51)) == [52, 53]
    assert not ahead.read(80, 80)


def test_a_file_of_some_chunks_is_fetched_whole_and_once() -> None:
    small, program, rest = [CHUNK_BYTES] * 3, [CHUNK_BYTES] * 20, BLOCK
    huge = [CHUNK_BYTES] * (FILE_BYTES // CHUNK_BYTES)
    ahead = Readahead(offsets([2 * BLOCK, *small, rest, 3 * BLOCK, *program, rest, *huge, rest]))
    assert not ahead.file(0)
    assert ahead.file(2) == range(1, 5)
    assert not ahead.file(4)
    assert not ahead.file(5)
    assert not ahead.file(10)  # a larger one: with its second read
    assert ahead.file(26) == range(6, 27)
    assert not ahead.file(7)
    assert not any(ahead.file(index) for index in range(27, 27 + len(huge) + 1) for _ in range(2))


@given(SIZES)
def test_what_is_fetched_as_a_file_has_the_chunk_that_was_read(sizes: list[int]) -> None:
    ahead = Readahead(offsets(sizes))
    for index in range(len(sizes)):
        found = ahead.file(index)
        assert not found or (index in found and found.stop <= len(sizes))


def made(root: Path, sizes: list[int]) -> CachedLayer:
    image = b"image"
    chunks = pack_chunks((size, hashlib.sha256(bytes(size)).digest()) for size in sizes)
    manifest = Manifest(
        kind="directory",
        metadata=hashlib.sha256(image).hexdigest(),
        metadata_bytes=len(image),
        data_bytes=sum(sizes),
        chunks=chunks,
    )
    places = pack_places(Place("0" * 64, at) for at in offsets(sizes)[:-1])
    cache = LazyCache(root / "cache")
    begun = cache.make()
    (begun / "meta.erofs").write_bytes(image)
    cached = cache.begin(begun, manifest.digest, manifest, manifest.encode(), msgspec.json.encode(places))
    cache.finish(cached)
    cached.close()
    return CachedLayer(cache.path(manifest.digest), manifest.digest)


@settings(max_examples=50, deadline=None)
@given(SIZES, st.data())
def test_the_bitmap_says_of_each_block_what_was_noted_of_its_chunk(sizes: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cached = made(Path(directory), sizes)
        noted = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
        cached.note(noted)
        bits = (cached.root / "filled").read_bytes()
        begins = offsets(sizes)
        for index, size in enumerate(sizes):
            blocks = range(begins[index] // BLOCK, (begins[index] + size) // BLOCK)
            assert {bits[block >> 3] >> (block & 7) & 1 for block in blocks} == {int(index in noted)}
        assert sum(byte.bit_count() for byte in bits) == sum(sizes[index] for index in noted) // BLOCK
        assert cached.filled_bytes == sum(sizes[index] for index in noted)
        assert cached.missing == len(sizes) - len(noted)
        cached.close()
        again = CachedLayer(cached.root, cached.layer)
        assert [index for index, here in enumerate(again.have) if here] == sorted(noted)
        again.forget()
        assert not any((cached.root / "filled").read_bytes())
        again.close()


@settings(max_examples=50, deadline=None)
@given(SIZES, st.data())
def test_the_chunks_of_a_read_are_those_that_overlap_it(sizes: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cached = made(Path(directory), sizes)
        begin = data.draw(st.integers(0, sum(sizes) + BLOCK))
        count = data.draw(st.integers(1, sum(sizes)))
        begins = offsets(sizes)
        overlap = [i for i, size in enumerate(sizes) if begins[i] < begin + count and begin < begins[i] + size]
        assert list(cached.chunks_of(begin, count)) == overlap
        cached.close()

"""Layers that the copier serves itself, with sanitizers: the test is the holder and asks."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import itertools
import os
import random
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import native_guest
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.edge.config import SystemClock
from dsec.errors import Internal
from dsec.store.format import CHUNK_BYTES, Manifest, Place, pack_chunks, pack_places
from dsec.store.lazy import holder
from dsec.store.lazy.cache import CachedLayer, LazyCache
from dsec.store.lazy.copier import Copier, CopierGone
from dsec.store.lazy.plan import Plan
from dsec.store.lazy.readahead import Readahead
from dsec.store.lazy.served import Served

KIB = 1024
SIZES = [256 * KIB, 4 * KIB, 128 * KIB, 256 * KIB, 64 * KIB]
BLOB = 7


class Asked:
    """The holder's end of a copier that serves one layer."""

    def __init__(self, tmp_path: Path) -> None:
        self.content = random.Random(5).randbytes(sum(SIZES))
        self.pack = tmp_path / "pack"
        self.pack.write_bytes(b"before" + self.content)
        begins = [0, *itertools.accumulate(SIZES)]
        pieces = [self.content[begin : begin + size] for begin, size in zip(begins, SIZES, strict=False)]
        manifest = Manifest(
            kind="directory",
            metadata="0" * 64,
            metadata_bytes=0,
            data_bytes=len(self.content),
            chunks=pack_chunks((len(piece), hashlib.sha256(piece).digest()) for piece in pieces),
        )
        placement = pack_places(Place("p", 6 + begin) for begin in begins[:-1])
        cache = LazyCache(tmp_path / "cache")
        encoded = msgspec.json.encode(placement)
        self.cached: CachedLayer = cache.begin(cache.make(), manifest.digest, manifest, manifest.encode(), encoded)
        cache.close()
        self.begins = begins
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(tmp_path / "holder.sock"))
        self._listener.listen()
        self.copier = Copier(native_guest.built("sanitized", "copier"), tmp_path / "holder.sock", SystemClock())
        self.copier.start()
        self._channel, _ = self._listener.accept()
        self._channel.settimeout(native_guest.PATIENCE_S)
        self.plan: Plan | None = None

    async def serve(self, ahead: Sequence[int] = ()) -> None:
        self.plan = Plan(self.cached, [self.pack], ahead, 2)
        await self.copier.plan(BLOB, (self.plan.descriptor, self.cached.data, self.cached.bitmap))
        assert self._told() == (holder.SERVE, BLOB, 1)

    def _told(self) -> tuple[int, int, int]:
        fields = holder.MESSAGE.unpack(self._channel.recv(holder.MESSAGE.size))
        return fields[0], fields[1], fields[6]

    def ask(self, offset: int, count: int, token: int = 99) -> None:
        self._channel.send(
            holder.MESSAGE.pack(holder.REQUEST, BLOB, token, 0, 0, offset, count, len(self.content), 0, 0)
        )

    def answer(self) -> tuple[int, int]:
        """Its type and token."""
        fields = holder.MESSAGE.unpack(self._channel.recv(holder.MESSAGE.size))
        return fields[0], fields[2]

    def left(self) -> tuple[int, int, int]:
        return self._told()

    def there(self, index: int) -> bool:
        """Whether a chunk's bits and bytes are."""
        begin, end = self.begins[index], self.begins[index + 1]
        bits = os.pread(self.cached.bitmap, 1 << 16, 0)
        noted = {bits[block >> 3] >> (block & 7) & 1 for block in range(begin // 4096, end // 4096)}
        right = os.pread(self.cached.data, end - begin, begin) == self.content[begin:end]
        assert len(noted) == 1
        assert right or noted == {0}
        return noted == {1}

    async def close(self) -> None:
        await self.copier.close()
        self._channel.close()
        self._listener.close()
        self.cached.close()
        if self.plan is not None:
            self.plan.close()


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asked]:
    made = Asked(tmp_path)
    yield made
    await made.close()


async def test_a_read_is_answered_when_its_chunks_are_there(asked: Asked) -> None:
    await asked.serve()
    assert asked.plan is not None
    for offset, count, index in ((256 * KIB, 1, 1), (255 * KIB, 4 * KIB, 0), (sum(SIZES) - 1, 1 << 40, 4)):
        asked.ask(offset, count)
        assert asked.answer() == (holder.DONE, 99)
        assert asked.there(index)
    asked.ask(1 << 50, 4096)  # beyond the end there is nothing to fill
    assert asked.answer() == (holder.DONE, 99)
    assert {0, 1, 4} <= set(asked.plan.news())
    assert not set(asked.plan.news()) & {0, 1, 4}


async def test_what_others_read_comes_without_a_question_and_the_end_is_told(asked: Asked) -> None:
    all_came = asyncio.Event()
    asked.copier.on_all = lambda blob: all_came.set() if blob == BLOB else None
    await asked.serve([4, 2, 0, 77, 1, 3])
    assert asked.plan is not None
    async with asyncio.timeout(native_guest.PATIENCE_S):
        await all_came.wait()
    assert sorted(asked.plan.news()) == [0, 1, 2, 3, 4]
    assert all(map(asked.there, range(5)))


@pytest.mark.parametrize("trouble", ["gone", "short", "wrong"])
async def test_what_can_not_be_had_is_passed_on_and_nothing_is_noted(asked: Asked, trouble: str) -> None:
    whole = asked.pack.read_bytes()
    match trouble:
        case "gone":
            asked.pack.unlink()
        case "short":
            asked.pack.write_bytes(whole[:100])
        case _:
            asked.pack.write_bytes(bytes(byte ^ 1 for byte in whole))
    await asked.serve()
    asked.ask(0, 4096)
    assert asked.answer() == (holder.PASS, 99)
    assert not any(map(asked.there, range(5)))
    asked.pack.write_bytes(whole)
    asked.ask(0, 4096)
    assert asked.answer() == (holder.DONE, 99)
    assert asked.there(0)


async def test_a_withdrawn_layer_is_written_no_more(asked: Asked) -> None:
    await asked.serve(range(5))
    await asked.copier.withdraw(BLOB)
    assert asked.left() == (holder.SERVE, BLOB, 0)
    there = [*map(asked.there, range(5))]
    asked.ask(0, sum(SIZES))
    assert asked.answer() == (holder.PASS, 99)
    assert [*map(asked.there, range(5))] == there
    await asked.copier.withdraw(BLOB)  # again


async def test_a_layer_changes_hands_in_the_order_in_which_it_was_said(asked: Asked) -> None:
    """It is taken back while it is being handed over: what was said first is carried out first, by whichever thread."""
    served = Served(asked.cached, BLOB, None)
    for _ in range(300):
        handed, _ = await asyncio.gather(served.hand_over(asked.copier, [asked.pack], (), 2), served.take_back())
        assert handed, "the copier has it still"
        await served.take_back()
        assert asked.left() == (holder.SERVE, BLOB, 1)
        assert asked.left() == (holder.SERVE, BLOB, 0)


async def test_many_readers_of_the_same_chunks(asked: Asked) -> None:
    await asked.serve([3, 0])
    assert asked.plan is not None
    for token in range(100):
        asked.ask(token % 5 * 130 * KIB, 4096, token)
    assert sorted(asked.answer() for _ in range(100)) == [(holder.DONE, token) for token in range(100)]
    came = asked.plan.news()
    assert len(came) == len(set(came))  # each was fetched once


async def test_a_plan_whose_copier_dies_is_withdrawn_when_that_is_gone(asked: Asked) -> None:
    await asked.serve()
    gone = asyncio.Event()
    asked.copier.on_gone = gone.set
    process = asked.copier._process
    assert process is not None
    process.kill()
    async with asyncio.timeout(native_guest.PATIENCE_S):
        await gone.wait()
    await asked.copier.withdraw(BLOB)
    assert process.poll() is not None
    with pytest.raises(CopierGone):
        asked.copier.plan(BLOB, (0, 0, 0))


async def test_what_is_no_plan_is_refused(asked: Asked) -> None:
    asked.plan = Plan(asked.cached, [asked.pack], [1], 2)
    good = os.pread(asked.plan.descriptor, 1 << 16, 0)
    dice = random.Random(6)
    bad = [b"", b"x", good[:20], good[:-1], good[:-30]]
    for field in range(5):  # the head's: noted, count, ahead, packs, bytes
        for value in (0xFFFFFFFF, 0x7FFFFFFF, 1000):
            bad.append(good[: 4 * field] + value.to_bytes(4, "little") + good[4 * field + 4 :])
    bad.append(good[:24] + bytes(4) + good[28:])  # no streams
    sizes = 32 + 4 * 5 + 4
    bad.append(good[:sizes] + (300 * KIB).to_bytes(4, "little") + good[sizes + 4 :])
    bad.append(good[:sizes] + (0).to_bytes(4, "little") + good[sizes + 4 :])
    for _ in range(50):  # these may be good by chance: whatever they are, the copier lives
        at = dice.randrange(len(good))
        bad.append(good[:at] + bytes([dice.randrange(256)]) + good[at + 1 :])
    for number, content in enumerate(bad):
        file = os.memfd_create("plan")
        os.write(file, content)
        begun = asked.copier.plan(BLOB, (file, asked.cached.data, asked.cached.bitmap))
        os.close(file)
        if number < len(bad) - 50:
            with pytest.raises(Internal):
                await begun
        else:
            await asyncio.wait([begun])
            if begun.exception() is None:
                await asked.copier.withdraw(BLOB)
    with pytest.raises(Internal):
        await asked.copier.plan(BLOB, ())


# --- what is fetched ahead ---


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The copier's decisions as a library."""
    made = tmp_path_factory.mktemp("ahead") / "ahead.so"
    source = native_guest.NATIVE / "copier" / "ahead.c"
    subprocess.run(["cc", "-std=c11", "-shared", "-fPIC", "-O1", "-o", made, source], check=True)
    return ctypes.CDLL(str(made))


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint32), ("end", ctypes.c_uint32))


class _Ahead(ctypes.Structure):
    _fields_ = (
        ("offsets", ctypes.POINTER(ctypes.c_uint64)),
        ("count", ctypes.c_uint32),
        ("touched", ctypes.POINTER(ctypes.c_ubyte)),
        ("streams", ctypes.c_int),
        ("stream", ctypes.c_uint32 * 3 * 16),
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([4096, 100 * KIB, *[CHUNK_BYTES] * 6]), min_size=1, max_size=150), st.data())
def test_copier_and_filler_fetch_the_same_ahead(ahead: ctypes.CDLL, sizes: list[int], data: st.DataObject) -> None:
    offsets, count = [0, *itertools.accumulate(sizes)], len(sizes)
    ahead.ahead_file.restype = ahead.ahead_read.restype = _Range
    theirs = _Ahead((ctypes.c_uint64 * (count + 1))(*offsets), count, (ctypes.c_ubyte * count)())
    ours, at = Readahead(offsets), 0
    for step in data.draw(st.lists(st.integers(-3, 6), max_size=60)):
        at = data.draw(st.integers(0, count - 1)) if step < -1 else min(count - 1, max(0, at + step))
        last = min(count - 1, at + data.draw(st.integers(0, 2)))
        for found, wanted in (
            (ahead.ahead_file(ctypes.byref(theirs), at), ours.file(at)),
            (ahead.ahead_read(ctypes.byref(theirs), at, last), ours.read(at, last)),
        ):
            assert [*range(found.begin, found.end)] == [*wanted]

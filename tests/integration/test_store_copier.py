"""The copier, with sanitizers: nothing unverified is written, and whatever goes wrong is said."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import native_guest
import pytest

from dsec.edge.config import SystemClock
from dsec.errors import LayerCorrupt, NotFound, Unavailable
from dsec.store.format import Chunk
from dsec.store.lazy import copier as module
from dsec.store.lazy.copier import Copier, CopierGone

KIB = 1024


@pytest.fixture
async def copier() -> AsyncIterator[Copier]:
    made = Copier(native_guest.built("sanitized", "copier"), None, SystemClock())
    yield made
    await made.close()


async def copied(
    copier: Copier, source: Path, chunks: Sequence[Chunk], target: Path, *, offset: int = 0, kind: int = module.COPY
) -> None:
    """Raises what went wrong."""
    done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    fd = os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        copier.copy(source, offset, chunks, fd, lambda outcome: done.set_result(outcome.error), nice=0, kind=kind)
    finally:
        os.close(fd)
    error = await done
    if error is not None:
        raise error


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def cut(data: bytes, sizes: Sequence[int], at: Sequence[int]) -> list[Chunk]:
    """Chunks of data, which belong at these offsets."""
    chunks, begin = [], 0
    for size, offset in zip(sizes, at, strict=True):
        chunks.append(Chunk(offset, size, hashlib.sha256(data[begin : begin + size]).digest()))
        begin += size
    return chunks


def priorities(pid: int) -> set[int]:
    """Of a process's threads."""
    return {os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in Path(f"/proc/{pid}/task").iterdir()}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


async def test_chunks_come_to_their_places(copier: Copier, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(400 * KIB)
    source = written(tmp_path / "pack", b"before" + data)
    chunks = cut(data, [4 * KIB, 256 * KIB, 140 * KIB], [300 * KIB, 0, 512 * KIB])
    await copied(copier, source, chunks, tmp_path / "to", offset=6)
    found = (tmp_path / "to").read_bytes()
    assert found[300 * KIB : 304 * KIB] == data[: 4 * KIB]
    assert found[: 256 * KIB] == data[4 * KIB : 260 * KIB]
    assert found[512 * KIB :] == data[260 * KIB :]


@pytest.mark.parametrize("streams", [0, 2, 3, 16, 1000])
async def test_a_metadata_image_comes_in_parts_and_is_worth_nothing_before_all_was_digested(
    copier: Copier, tmp_path: Path, streams: int
) -> None:
    for size in (1, 65_536, 65_537, 3_000_001, 40_000_000):
        data = random.Random(size).randbytes(size)
        source, target = written(tmp_path / "image", data), tmp_path / f"to{size}"
        whole = cut(data, [size], [0])[0]
        fd = os.open(target, os.O_RDWR | os.O_CREAT)
        try:
            assert await copier.copy_telling(source, fd, 1 << 26, streams=streams, nice=0) == whole.digest
            assert target.read_bytes() == data
            assert await copier.copy_telling(source, fd, size // 2, streams=streams, nice=0) == digest(
                data[: size // 2]
            )
            await copier.copy_whole(source, fd, whole, streams=streams, nice=0)
            written(source, data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(LayerCorrupt):
                await copier.copy_whole(source, fd, whole, streams=streams, nice=0)
            written(source, data[:-1])
            with pytest.raises(LayerCorrupt):
                await copier.copy_whole(source, fd, whole, streams=streams, nice=0)
        finally:
            os.close(fd)
    unwritable = os.open(source, os.O_RDONLY)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        await copier.copy_whole(source, unwritable, whole, streams=streams, nice=0)
    os.close(unwritable)


async def test_many_metadata_images_at_the_same_time(copier: Copier, tmp_path: Path) -> None:
    images = [random.Random(number).randbytes(1_000_000 + number) for number in range(40)]

    async def one(number: int) -> None:
        source = written(tmp_path / f"image{number}", images[number])
        fd = os.open(tmp_path / f"to{number}", os.O_RDWR | os.O_CREAT)
        try:
            assert await copier.copy_telling(source, fd, 1 << 26, streams=16, nice=0) == digest(images[number])
        finally:
            os.close(fd)
        assert (tmp_path / f"to{number}").read_bytes() == images[number]

    await asyncio.gather(*map(one, range(40)))


@pytest.mark.root
async def test_a_job_that_somebody_begins_to_wait_for_is_hastened(copier: Copier, tmp_path: Path) -> None:
    size = 256 * KIB
    source = tmp_path / "pack"
    source.touch()
    os.truncate(source, 256 * size)
    right = hashlib.sha256(bytes(size)).digest()
    chunks = [Chunk(index * size, size, right) for index in range(256)]
    done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    target = os.open(tmp_path / "to", os.O_RDWR | os.O_CREAT)
    job = copier.copy(source, 0, chunks, target, lambda outcome: done.set_result(outcome.error), nice=5)
    os.close(target)
    while not done.done():
        copier.hasten(job + 1, 1)  # there is none such
        copier.hasten(job, 2)
        await asyncio.sleep(0)
    assert await done is None
    assert copier._process is not None
    nice = priorities(copier._process.pid)
    assert 2 in nice
    assert 1 not in nice


async def test_what_is_wrong_is_not_written(copier: Copier, tmp_path: Path) -> None:
    data = random.Random(3).randbytes(128 * KIB)
    chunks = cut(data, [64 * KIB, 64 * KIB], [0, 64 * KIB])
    wrong = bytearray(data)
    wrong[100 * KIB] ^= 1
    source = written(tmp_path / "pack", bytes(wrong))
    with pytest.raises(LayerCorrupt, match=chunks[1].digest.hex()):
        await copied(copier, source, chunks, tmp_path / "to")
    assert (tmp_path / "to").read_bytes() == data[: 64 * KIB]


@pytest.mark.parametrize("length", [0, 1, 64 * KIB, 128 * KIB - 1])
async def test_half_an_object(copier: Copier, tmp_path: Path, length: int) -> None:
    data = bytes(128 * KIB)
    source = written(tmp_path / "pack", data[:length])
    with pytest.raises(LayerCorrupt, match="ends before"):
        await copied(copier, source, cut(data, [64 * KIB, 64 * KIB], [0, 64 * KIB]), tmp_path / "to")


async def test_no_object_a_directory_and_a_full_disk(copier: Copier, tmp_path: Path) -> None:
    data = bytes(4 * KIB)
    chunks = cut(data, [len(data)], [0])
    with pytest.raises(NotFound):
        await copied(copier, tmp_path / "none", chunks, tmp_path / "to")
    with pytest.raises(Unavailable):
        await copied(copier, tmp_path, chunks, tmp_path / "to")
    with pytest.raises(OSError, match="No space") as full:
        await copied(copier, written(tmp_path / "pack", data), chunks, Path("/dev/full"))
    assert full.value.errno == errno.ENOSPC


async def test_more_jobs_than_the_socket_holds(copier: Copier, tmp_path: Path) -> None:
    data = random.Random(4).randbytes(256 * 4 * KIB)
    source = written(tmp_path / "pack", data)
    offsets = [index * 4 * KIB for index in range(256)]
    chunks = cut(data, [4 * KIB] * 256, offsets)
    await asyncio.gather(*(copied(copier, source, chunks, tmp_path / f"to{number}") for number in range(200)))
    assert all((tmp_path / f"to{number}").read_bytes() == data for number in range(200))


async def test_one_that_dies_fails_its_jobs_and_another_takes_its_place(
    copier: Copier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    data = bytes(256 * KIB)
    source, chunks = written(tmp_path / "pack", data), cut(data, [len(data)], [0])
    await copied(copier, source, chunks, tmp_path / "to")
    process = copier._process
    assert process is not None
    native_guest.stop(process.pid)  # it can't answer before it is killed
    waits = [asyncio.create_task(copied(copier, source, chunks, tmp_path / "to")) for _ in range(100)]
    await asyncio.sleep(0)
    process.kill()
    assert {type(each) for each in await asyncio.gather(*waits, return_exceptions=True)} == {CopierGone}
    await asyncio.to_thread(process.wait)  # its socket closes before it has ended
    await copied(copier, source, chunks, tmp_path / "to")
    assert copier._process is not process


async def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    made = Copier(native_guest.built("sanitized", "copier"), None, SystemClock())
    made.start()
    process = made._process
    assert process is not None
    await made.close()
    assert process.returncode == 0


def test_packets_that_are_no_jobs_are_refused(tmp_path: Path) -> None:
    library = module._libcrypto()
    assert library
    source = written(tmp_path / "pack", bytes(4 * KIB))
    path = os.fsencode(source) + b"\0"
    chunk = module._CHUNK.pack(0, 4 * KIB, 0, digest(bytes(4 * KIB)))
    good = module._JOB.pack(7, 0, 0, 1, len(path), 0, 0) + chunk + path
    rng = random.Random(5)
    packets = [
        b"?",
        good[:-1],
        good + b"?",
        good[:-1] + b"x",
        module._JOB.pack(7, 0, 0, 1 << 31, 0, 0, 0),
        module._JOB.pack(7, 7, 0, 0, 0, 0, 3),
    ]
    packets += [good[: rng.randrange(1, len(good))] for _ in range(100)]
    packets += [bytes(b ^ (rng.random() < 0.05) * rng.randrange(256) for b in good) for _ in range(300)]
    packets += [rng.randbytes(rng.randrange(1, 400)) for _ in range(100)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(tmp_path / "to", "wb") as target:
        program = native_guest.built("sanitized", "copier")
        process = subprocess.Popen([str(program), library], stdin=theirs.fileno(), stderr=subprocess.PIPE, text=True)
        theirs.close()
        ours.settimeout(180)
        for packet in packets:
            socket.send_fds(ours, [packet], [target.fileno()])
            assert len(ours.recv(100)) == module._DONE.size
        ours.send(good)  # without a target
        assert module._DONE.unpack(ours.recv(100))[1] == module._TARGET
        socket.send_fds(ours, [good], [target.fileno()])
        assert module._DONE.unpack(ours.recv(100)) == (7, module._COPIED, 0, 1, 0, bytes(32))
        ours.close()
        assert process.communicate(timeout=180)[1] == ""
        assert process.returncode == 0

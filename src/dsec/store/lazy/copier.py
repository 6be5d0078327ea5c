"""The copier (`native/copier/copier.h` is its definition): chunks of a store whose objects are files are read, verified
and written by it, so that Python doesn't touch each of them.

It is a child of the filler and ends with it. Where it can't be started, or ends, `CopierGone` says so, and the filler
does the same work itself until another one runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from dsec.errors import Internal, LayerCorrupt, NotFound, Unavailable
from dsec.ports import Clock
from dsec.store.format import Chunk

log = logging.getLogger(__name__)

MOST_CHUNKS = 256
"""Of one job."""
_JOB = struct.Struct("=QQQIIiI")
"""id, token, offset in the source, count, bytes of the path, nice, kind."""
COPY, WHOLE, TELL, _HASTEN, _PLAN, _WITHDRAW = range(6)
_CHUNK = struct.Struct("=QII32s")
"""offset in the target, size, streams, digest."""
_DONE = struct.Struct("=QIiII32s")
"""id, where, error, copied, told, digest."""
_COPIED, _SOURCE, _SHORT, _WRONG, _TARGET, _REFUSED, _ALL = range(7)
_AGAIN_S = 5.0
"""Between two starts."""


class CopierGone(Exception):
    """It doesn't run."""


_T = TypeVar("_T")


class Outcome(NamedTuple):
    """What became of a job."""

    error: Exception | None = None
    """None: it is done; else `CopierGone`, `NotFound`, `Unavailable`, `LayerCorrupt`, or OSError of the target."""
    told: bool = False
    """The holder was told."""
    digest: bytes = b""
    """SHA-256 of what was copied, where that was asked for."""


Done = Callable[[Outcome], None]
"""Called on the loop."""


class _Job(NamedTuple):
    source: Path
    chunks: Sequence[Chunk]
    done: Done


def settle(future: asyncio.Future[_T], result: _T, error: Exception | None) -> None:
    """Tell who waits for it, if that wasn't cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Copier:
    """The running program, on one event loop. `close` it."""

    def __init__(self, program: Path, holder: Path | None, clock: Clock) -> None:
        """`program`: compiled. `holder`: the socket of a holder, to which tokens and plans belong."""
        self.keeps: Sequence[int] = ()
        """Descriptors that it has too, to be set before it runs."""
        self.on_all: Callable[[int], None] = lambda blob: None
        """Told of a plan of which nothing is missing any more."""
        self.on_gone: Callable[[], None] = lambda: None
        """Told that it ended, with all of its plans."""
        self._program = program
        self._holder = holder
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._started = -_AGAIN_S
        self._numbers = 0
        self._jobs: dict[int, _Job] = {}
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        """Packets for which the socket had no room, with duplicates of their descriptors."""

    def copy(
        self,
        source: Path,
        offset: int,
        chunks: Sequence[Chunk],
        target: int,
        done: Done,
        *,
        nice: int,
        token: int = 0,
        kind: int = COPY,
        streams: int = 0,
    ) -> int:
        """Chunks that follow each other from `offset` of a file on, to their places in the file `target` (a descriptor,
        which may be closed at once), at this priority; then `done` is called, once. `token`: of a read that waits for
        just these. Returns the job's number. Raises `CopierGone`, OSError where there is no room for it."""
        channel = self._channel or self.start()
        self._numbers += 1
        path = os.fsencode(source) + b"\0"
        head = _JOB.pack(self._numbers, token, offset, len(chunks), len(path), nice, kind)
        packet = b"".join(
            (head, *(_CHUNK.pack(offset, size, streams, digest) for offset, size, digest in chunks), path)
        )
        self._put(channel, packet, [target], _Job(source, chunks, done))
        return self._numbers

    def _put(self, channel: socket.socket, packet: bytes, descriptors: Sequence[int], job: _Job) -> None:
        """Raises OSError; then nobody will be told of it."""
        if self._backlog or not self._send(channel, packet, descriptors):
            self._backlog.append((packet, [*map(os.dup, descriptors)]))
        self._jobs[self._numbers] = job

    def copy_whole(self, source: Path, target: int, whole: Chunk, *, streams: int, nice: int) -> asyncio.Future[None]:
        """A file of any size to the begin of the file `target` (a descriptor, which may be closed at once); so many
        parts of it are read at the same time. It is worth nothing where the future's result is an error: as
        `Outcome` says. Raises as `copy`."""
        copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            settle(copied, None, outcome.error)

        self.copy(source, 0, [whole], target, done, nice=nice, kind=WHOLE, streams=streams)
        return copied

    def copy_telling(self, source: Path, target: int, most: int, *, streams: int, nice: int) -> asyncio.Future[bytes]:
        """The same of a file that may be anything, or at most so many bytes of it. The future's result: the SHA-256 of
        what was copied."""
        told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            settle(told, outcome.digest, outcome.error)

        whole = Chunk(0, most, bytes(32))
        self.copy(source, 0, [whole], target, done, nice=nice, kind=TELL, streams=streams)
        return told

    def plan(self, blob: int, descriptors: Sequence[int]) -> asyncio.Future[None]:
        """Have it serve this blob of the holder's: {plan, data, bitmap}, which may be closed at once. The future's
        result: it does; `Internal`: that is no plan; `CopierGone`. Raises `CopierGone`."""
        return self._call(_PLAN, blob, descriptors)

    async def withdraw(self, blob: int) -> None:
        """Return when it doesn't serve this blob any more and nothing of it is on its way. Idempotent."""
        try:
            await self._call(_WITHDRAW, blob, ())
        except (CopierGone, OSError):
            if self._process is not None:
                self._process.kill()  # unless it has ended it can't be told
                await asyncio.to_thread(self._process.wait)

    def _call(self, kind: int, blob: int, descriptors: Sequence[int]) -> asyncio.Future[None]:
        channel = self._channel
        if channel is None:
            raise CopierGone
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            settle(called, None, outcome.error)

        self._numbers += 1
        packet = _JOB.pack(self._numbers, blob, 0, 0, 0, 0, kind)
        self._put(channel, packet, descriptors, _Job(self._program, (), done))
        return called

    def hasten(self, job: int, nice: int) -> None:
        """Somebody waits for this job from now on."""
        if self._channel is not None and job in self._jobs and not self._backlog:
            with contextlib.suppress(OSError):  # it comes at its own pace
                self._channel.send(_JOB.pack(0, job, 0, 0, 0, nice, _HASTEN))

    async def close(self) -> None:
        """End it; nothing is written any more on return. Who waits has `CopierGone`."""
        self._lost()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    def start(self) -> socket.socket:
        """Have it run. Raises `CopierGone`."""
        now = self._clock.monotonic()
        if now - self._started < _AGAIN_S or (self._process is not None and self._process.poll() is None):
            raise CopierGone
        self._started = now
        library = _libcrypto()
        if not library:
            raise CopierGone
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [str(self._program), library, *([str(self._holder)] if self._holder else [])]
            try:
                self._process = subprocess.Popen(
                    words, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, pass_fds=self.keeps
                )
            except OSError as error:
                ours.close()
                log.warning("chunks are copied without the copier: %s", error)
                raise CopierGone from error
        ours.setblocking(False)
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours, self._readable)
        return ours

    def _lost(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel)
            channel.close()
        for _, descriptors in self._backlog:
            _close(descriptors)
        self._backlog.clear()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.done(Outcome(CopierGone()))
        self.on_gone()

    def _give_up(self) -> None:
        log.warning("the copier is gone")
        if self._process is not None:
            self._process.kill()
        self._lost()

    @staticmethod
    def _send(channel: socket.socket, packet: bytes, descriptors: Sequence[int]) -> bool:
        try:
            socket.send_fds(channel, [packet], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ETOOMANYREFS):
                raise
            return error.errno != errno.ETOOMANYREFS  # its end is seen when it is read
        return True

    def _readable(self) -> None:
        for _ in range(64):
            channel = self._channel
            if channel is None:
                return
            try:
                answer = channel.recv(_DONE.size)
            except BlockingIOError:
                return
            except OSError:
                answer = b""
            if len(answer) != _DONE.size:
                self._give_up()
                return
            number, where, error, copied, told, digest = _DONE.unpack(answer)
            if where == _ALL:
                self.on_all(copied)
                continue
            try:
                while self._backlog and self._send(channel, *self._backlog[0]):
                    _close(self._backlog.popleft()[1])
            except OSError:  # whose jobs would never be answered
                self._give_up()
                return
            job = self._jobs.pop(number, None)
            if job is not None:
                job.done(Outcome(None if where == _COPIED else _error(job, where, error, copied), bool(told), digest))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _error(job: _Job, where: int, number: int, copied: int) -> Exception:
    if where == _SOURCE and number in (errno.ENOENT, errno.ENOTDIR):
        return NotFound("the store has no such object")
    if where == _SOURCE:
        return Unavailable(f"the store at {job.source.parent} failed: {os.strerror(number)}")
    if where == _SHORT:
        return LayerCorrupt(f"{job.source.name} ends before chunk {job.chunks[copied].digest.hex()} does")
    if where == _WRONG:
        return LayerCorrupt(
            f"chunk {job.chunks[copied].digest.hex()} is not what its digest says",
            remedy="`dsec layer verify` says which layers are damaged; build or import them again.",
        )
    if where == _TARGET:
        return OSError(number, os.strerror(number))
    return Internal(f"the copier refused a job of {len(job.chunks)} chunks")


def _libcrypto() -> str:
    """The library that this Python's hashlib uses; empty where it has its own built in."""
    hashlib.sha256()
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\S*/libcrypto\.so\S*$", maps.read(), re.MULTILINE)
    return found[0] if found else ""

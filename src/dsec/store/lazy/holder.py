"""The holder's socket (`native/holder/holder.h` is its definition) and how the program is started.

The holder outlives the server and the filler. Whoever wants readers to outlive the holder keeps the duplicates that
`HolderClient.take` returns, and hands them to `start_holder`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

from dsec.errors import Unavailable
from dsec.kernel import lasting

ADD, REMOVE, FILL, DONE, TAKE, STATS, STOP, COMPLETE, IDLE, REOPEN, SERVE, PASS = range(1, 13)
OK, FAILED, REQUEST = 64, 65, 66
MESSAGE = struct.Struct("=II6QIi")
"""type, id, token, dev, ino, offset, count, size, chunk, error."""
BLOBS = 4096
"""How many a holder knows at once."""
_REOPENS = 2
"""The first version that knows `REOPEN`."""
_SERVES = 3
"""The first one of which a copier can have a blob of its own."""
_TIMEOUT_S = 10.0


class Waiting(NamedTuple):
    """A read that waits for this range of a blob."""

    token: int
    blob: int
    offset: int
    size: int


class HolderStats(NamedTuple):
    """Reads answered since the holder began, and those that wait."""

    by_itself: int
    by_filler: int
    failed: int
    waiting: int


def connect(path: Path) -> socket.socket:
    """Raises `Unavailable` where no holder listens."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel.settimeout(_TIMEOUT_S)
    try:
        channel.connect(os.fspath(path))
    except OSError as error:
        channel.close()
        raise Unavailable(f"no holder of lazy layers listens at {path}: {error}") from error
    return channel


class HolderClient:
    """Calls that are answered at once. Not for several threads."""

    def __init__(self, path: Path) -> None:
        """Raises `Unavailable`."""
        self._path = path
        self._channel = connect(path)

    def add(self, blob: int, data: os.stat_result, bitmap: int, unit: int) -> None:
        """Tell of a blob: its file's status, the descriptor of its bitmap, bytes for each bit. Replaces the number's
        earlier one. Reads that waited for it are asked for at once."""
        self._call(
            ADD, blob=blob, dev=data.st_dev, ino=data.st_ino, size=data.st_size, chunk=unit, descriptors=[bitmap]
        )

    def remove(self, blob: int) -> None:
        """Nothing is mounted of it any more. Reads that wait fail. Idempotent."""
        try:
            self._call(REMOVE, blob=blob)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def complete(self, blob: int, data: int) -> None:
        """All of it is there: reads of it ask no more. `data`: its descriptor."""
        self._call(COMPLETE, blob=blob, descriptors=[data])

    def reopen(self, blob: int, data: int) -> bool:
        """Reads of it ask again, which counts as one of now. False: this holder is older and can't."""
        if self._call(STATS)[8] < _REOPENS:
            return False
        self._call(REOPEN, blob=blob, descriptors=[data])
        return True

    def knows_copiers(self) -> bool:
        """Whether a copier can have its reads itself."""
        return self._call(STATS)[8] >= _SERVES

    def idle_s(self, blob: int) -> float:
        """How long ago a read of it asked."""
        return float(self._call(IDLE, blob=blob)[2]) / 1000

    def stats(self) -> HolderStats:
        fields = self._call(STATS)
        return HolderStats(fields[2], fields[5], fields[7], fields[6])

    def take(self) -> tuple[int, int]:
        """Duplicates of the group and the table, which keep readers waiting if the holder dies. The caller's to
        close."""
        self._channel.send(MESSAGE.pack(TAKE, 0, 0, 0, 0, 0, 0, 0, 0, 0))
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE.size, 2)
        except OSError as error:
            raise Unavailable(f"the holder of lazy layers is gone: {error}") from error
        if len(data) != MESSAGE.size or len(descriptors) != 2:
            raise Unavailable("the holder of lazy layers is gone")
        return descriptors[0], descriptors[1]

    def stop(self) -> None:
        """End it. Only when nothing is mounted from the marked path."""
        self._call(STOP)

    def close(self) -> None:
        self._channel.close()

    def _call(
        self,
        kind: int,
        *,
        blob: int = 0,
        dev: int = 0,
        ino: int = 0,
        size: int = 0,
        chunk: int = 0,
        descriptors: list[int] | None = None,
    ) -> tuple[int, ...]:
        message = MESSAGE.pack(kind, blob, 0, dev, ino, 0, 0, size, chunk, 0)
        if self._channel.fileno() < 0:
            self._channel = connect(self._path)
        try:
            socket.send_fds(self._channel, [message], descriptors or [])
            answer = self._channel.recv(MESSAGE.size)
        except OSError as error:
            self._channel.close()  # an answer that comes late is none to the next call
            raise Unavailable(f"the holder of lazy layers is gone: {error}") from error
        if len(answer) != MESSAGE.size:
            raise Unavailable("the holder of lazy layers is gone")
        fields: tuple[int, ...] = MESSAGE.unpack(answer)
        if fields[0] != OK:
            raise OSError(fields[9], f"the holder refused call {kind}: {os.strerror(fields[9])}")
        return fields


def start_holder(
    program: Path, path: Path, marked: Path, *, deadline_s: float, inherited: tuple[int, int] | None = None
) -> subprocess.Popen[bytes]:
    """Start a holder for the mount at `marked`; returns when it listens at `path`. `inherited`: a predecessor's group
    and table.

    Raises `Unavailable` with what it said.
    """
    path.unlink(missing_ok=True)
    words = [str(program), str(path), str(marked), str(int(deadline_s * 1000))]
    process = subprocess.Popen(
        lasting.outliving([*words, *map(str, inherited or ())], unit=f"dsec-holder-{marked.parent.name}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=inherited or (),
        start_new_session=True,
    )
    assert process.stderr is not None
    while process.poll() is None:
        try:
            connect(path).close()
        except Unavailable:
            try:
                process.wait(0.005)
            except subprocess.TimeoutExpired:
                continue
            break
        process.stderr.close()
        return process
    said = process.stderr.read().decode(errors="replace").strip()
    process.stderr.close()
    raise Unavailable(f"the holder of lazy layers did not start: {said or process.returncode}")

"""Archives that may be compressed (gzip, bzip2, xz, zstd), read as a stream. What is broken or cut off is the archive's
fault, and is said so; what the disk fails with isn't."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, cast

import zstandard

from dsec.errors import InvalidRequest

_BUFFER = 64 << 10
_MAX_WINDOW = 1 << 27
_MAX_BEHIND = 64 << 20
"""Bytes behind the end of an archive, which are read for the checksum that follows them."""
_ERRORS = (zlib.error, EOFError, lzma.LZMAError, zstandard.ZstdError, OSError)


def _zstd(file: IO[bytes]) -> IO[bytes]:
    opened = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(file, read_across_frames=True)
    return cast(IO[bytes], opened)


_FORMS: tuple[tuple[bytes, Callable[[IO[bytes]], IO[bytes]]], ...] = (
    (b"\x1f\x8b", lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file))),
    (b"BZh", lambda file: cast(IO[bytes], bz2.BZ2File(file))),
    (b"\xfd7zXZ\0", lambda file: cast(IO[bytes], lzma.LZMAFile(file))),  # noqa: SIM115 (its reader goes with it)
    (b"\x28\xb5\x2f\xfd", _zstd),
)


class Unpacked:
    """What a file has, uncompressed where it is compressed. `read` and `peek` raise `InvalidRequest` where that can't
    be done, OSError where the disk fails."""

    def __init__(self, read: Callable[[int], bytes], what: str = "the archive") -> None:
        """`read(n)`: up to n bytes of the file. `what`: names it in errors."""
        self._what = what
        stream = io.BufferedReader(cast(io.RawIOBase, _Raw(read)), _BUFFER)
        head = stream.peek(8)
        opened = next((form(cast(IO[bytes], stream)) for magic, form in _FORMS if head.startswith(magic)), None)
        self.packed = opened is not None
        """It is compressed."""
        self._stream = stream if opened is None else io.BufferedReader(cast(io.RawIOBase, _Raw(opened.read)), _BUFFER)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the end."""
        return self._checked(self._stream.read1, size)

    def peek(self, size: int) -> bytes:
        """The next bytes, which stay; fewer at the end."""
        return self._checked(self._stream.peek, size)

    def finish(self) -> None:
        """Read what is behind an archive's end: a checksum stands there, so damage may be found only now. Raises
        `InvalidRequest`."""
        behind = 0
        while self.packed and (data := self.read(_BUFFER)):
            behind += len(data)
            if behind > _MAX_BEHIND:
                raise InvalidRequest(f"{self._what} has more than {_MAX_BEHIND >> 20} MiB behind its end")

    def _checked(self, call: Callable[[int], bytes], size: int) -> bytes:
        try:
            return call(size)
        except _ERRORS as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InvalidRequest(f"{self._what} can't be uncompressed: {error or 'it is cut off'}") from None


class _Raw(io.RawIOBase):
    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._source = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._source(len(buffer))
        buffer[: len(data)] = data
        return len(data)

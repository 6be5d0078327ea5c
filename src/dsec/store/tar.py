"""Tar archives, read as a stream, of anybody's making: headers, GNU long names, pax. No I/O of its own.

Every length that an archive claims is bounded before anything is allocated for it. Names are bytes. What the entries
mean, and whether they are harmless, is `archive`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dsec.errors import InvalidRequest, Unsupported

BLOCK = 512
MAX_LONG_NAME = 64 << 10
MAX_PAX = 1 << 20
MAX_SIZE = 1 << 46
_SKIP_STEP = 1 << 20
_XATTR = b"SCHILY.xattr."
_PAX_NAMES = {b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"}


class Header(NamedTuple):
    """One entry."""

    name: bytes
    kind: bytes
    """One character: `0` file, `1` hard link, `2` symbolic link, `3` `4` devices, `5` directory, `6` fifo."""
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: bytes
    rdev: tuple[int, int]
    xattrs: dict[bytes, bytes]


class TarReader:
    """Iterates over the entries of a stream. The content of a file is read with `read` before the next entry is asked
    for; what isn't read is skipped."""

    def __init__(self, read: Callable[[int], bytes], skip: Callable[[int], None] | None = None) -> None:
        """`read(n)`: up to n bytes, empty at the end. `skip(n)`: a quicker way past n bytes."""
        self._source = read
        self._skip_source = skip
        self._left = 0
        self.offset = 0
        """Of the next byte, in the stream."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes of the current entry's content."""
        data = self._source(min(size, self._left))
        self._left -= len(data)
        self.offset += len(data)
        return data

    def __iter__(self) -> Iterator[Header]:
        """Raises `InvalidRequest` for what isn't an archive, or a broken one; `Unsupported` for sparse entries."""
        everywhere: dict[bytes, bytes] = {}
        pax: dict[bytes, bytes] = {}
        long_name = long_target = None
        padding = 0
        while True:
            self._skip(self._left + padding)
            block = self._block()
            if block is None:
                return
            kind, size = block[156:157], _number(block[124:136], "a size")
            if kind in (b"L", b"K"):
                text = self._text(size, MAX_LONG_NAME).rstrip(b"\0")
                long_name, long_target = (text, long_target) if kind == b"L" else (long_name, text)
                padding = -size % BLOCK
                continue
            if kind in (b"x", b"g", b"X"):
                records = _parse_pax(self._text(size, MAX_PAX))
                padding = -size % BLOCK
                if kind == b"g":
                    everywhere |= records
                else:
                    pax = records
                continue
            header = _header(block, everywhere | pax, long_name, long_target)
            pax, long_name, long_target = {}, None, None
            has_content = header.kind == b"0"
            self._left = header.size if has_content else 0
            padding = -header.size % BLOCK if has_content else 0
            yield header

    def _block(self) -> bytes | None:
        block = self._raw(BLOCK)
        if not block or block == bytes(BLOCK):
            return None
        if len(block) < BLOCK:
            raise InvalidRequest("the archive is cut off in the middle of a header")
        said = block[148:156].strip(b"\0 ")
        if re.fullmatch(rb"[0-7]+", said) is None or int(said, 8) != 256 + sum(block[:148]) + sum(block[156:]):
            raise InvalidRequest("this is not a tar archive, or it is damaged: a header's checksum is wrong")
        return block

    def _raw(self, size: int) -> bytes:
        data = self._source(size)
        while 0 < len(data) < size and (more := self._source(size - len(data))):
            data += more
        self.offset += len(data)
        return data

    def _text(self, size: int, most: int) -> bytes:
        if size > most:
            raise InvalidRequest(f"the archive has an extended header of {size} bytes; {most} is the limit")
        data = self._raw(size)
        if len(data) < size:
            raise InvalidRequest("the archive is cut off in the middle of a header")
        self._left = 0
        return data

    def _skip(self, size: int) -> None:
        self._left = 0
        if self._skip_source is not None and size:
            self._skip_source(size)
            self.offset += size
            return
        while size > 0:
            data = self._source(min(size, _SKIP_STEP))
            if not data:
                raise InvalidRequest("the archive is cut off in the middle of a file")
            size -= len(data)
            self.offset += len(data)


def _number(field: bytes, what: str) -> int:
    """Octal, or base 256 where the first bit is set."""
    if field[0] & 0x80:
        number = int.from_bytes(field[1:], "big") | (field[0] & 0x7F) << 8 * (len(field) - 1)
        if field[0] & 0x40:
            number -= 1 << 8 * len(field) - 1
        if not -MAX_SIZE < number < MAX_SIZE:
            raise InvalidRequest(f"the archive has {what} that is out of range")
        return number
    text = field.split(b"\0")[0].strip(b" ")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise InvalidRequest(f"the archive has {what} that is no number: {text[:20]!r}") from None


def _parse_pax(data: bytes) -> dict[bytes, bytes]:
    """`length key=value\\n`, over and over. Only the keys that mean something here are kept."""
    found = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 10)
        length = data[at:space]
        if space < 0 or not length.isdigit():
            raise InvalidRequest("the archive has a broken extended header")
        end = at + int(length)
        if end > len(data) or end <= space + 1 or data[end - 1 : end] != b"\n":
            raise InvalidRequest("the archive has a broken extended header")
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals:
            raise InvalidRequest("the archive has a broken extended header")
        if key.startswith(b"GNU.sparse."):
            raise Unsupported("the archive has sparse files", remedy="Pack it again without --sparse.")
        if key in _PAX_NAMES or key.startswith(_XATTR):
            found[key] = value
        at = end
    return found


def _header(block: bytes, pax: dict[bytes, bytes], long_name: bytes | None, long_target: bytes | None) -> Header:
    kind = block[156:157]
    name = block[:100].split(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345:346] != b"\0":
        name = block[345:500].split(b"\0")[0] + b"/" + name
    name = pax.get(b"path", long_name if long_name is not None else name)
    target = pax.get(b"linkpath", long_target if long_target is not None else block[157:257].split(b"\0")[0])
    if kind in (b"\0", b"0", b"7"):
        kind = b"5" if name.endswith(b"/") else b"0"
    if kind == b"S":
        raise Unsupported("the archive has sparse files", remedy="Pack it again without --sparse.")
    if kind not in b"0123456":
        raise Unsupported(f"the archive has an entry of an unknown kind: {kind!r}")
    size = _pax_int(pax, b"size", _number(block[124:136], "a size"))
    if not 0 <= size < MAX_SIZE:
        raise InvalidRequest("the archive has a size that is out of range")
    return Header(
        name=name,
        kind=kind,
        mode=_number(block[100:108], "a mode") & 0o7777,
        uid=_pax_int(pax, b"uid", _number(block[108:116], "a user id")),
        gid=_pax_int(pax, b"gid", _number(block[116:124], "a group id")),
        size=size,
        mtime_ns=_time(pax.get(b"mtime"), _number(block[136:148], "a time")),
        target=target,
        rdev=(_number(block[329:337], "a device"), _number(block[337:345], "a device")) if kind in b"34" else (0, 0),
        xattrs={key[len(_XATTR) :]: value for key, value in pax.items() if key.startswith(_XATTR)},
    )


def _pax_int(pax: dict[bytes, bytes], key: bytes, otherwise: int) -> int:
    text = pax.get(key)
    if text is None:
        return otherwise
    if not text.isdigit() or len(text) > 20:
        raise InvalidRequest(f"the archive has a {key.decode()} that is no number: {text[:30]!r}")
    return int(text)


def _time(text: bytes | None, seconds: int) -> int:
    """In nanoseconds. Times that no file system keeps become the nearest that one does (1901 to 2446)."""
    nanoseconds = seconds * 10**9
    if text is not None:
        whole, _, fraction = text.lstrip(b"-").partition(b".")
        if not whole.isdigit() or len(whole) > 20 or not (fraction + b"0").isdigit():
            raise InvalidRequest(f"the archive has a time that is no number: {text[:30]!r}")
        nanoseconds = int(whole) * 10**9 + int((fraction[:9] or b"0").ljust(9, b"0"))
        if text.startswith(b"-"):
            nanoseconds = -nanoseconds
    return max(-(1 << 31) * 10**9, min(nanoseconds, 15_032_385_535 * 10**9))

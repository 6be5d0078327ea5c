"""Trees as one stream: tar archives, written from a local tree, and their heads taken apart again.

Owns the format: GNU's, with long names; pax paths and sizes are read too. Names are bytes throughout. What comes from a
sandbox is unpacked by `dsec.cli.unpack`.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator

from msgspec import Struct

BLOCK = 512
CHUNK = 1 << 20
PIECE = 2 << 20
"""Of an archive: what is read while the one before it is on its way."""
MAX_NAME = 4096
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_MAGIC = b"ustar  \0"

Note = Callable[[str], None]


class Entry(Struct, frozen=True):
    """One file of a local tree."""

    path: bytes
    name: bytes
    """In the archive."""
    status: os.stat_result


def walk(root: bytes, name: bytes, note: Note, skip: Callable[[bytes, os.stat_result], bool]) -> Iterator[Entry]:
    """A tree's files, directories first, each directory's in order. Symbolic links are kept as such. `note` hears of
    what can't be copied; `skip`: by name in the archive, what need not be."""
    stack = [(root, name)]
    while stack:
        path, here = stack.pop()
        try:
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            names = sorted(os.listdir(path)) if kind == stat.S_IFDIR else []
        except OSError as error:
            note(f"{shown(path)}: {error.strerror}")
            continue
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            note(f"{shown(path)}: a device, pipe or socket is left out")
        elif not skip(here, status):
            yield Entry(path, here, status)
        for each in reversed(names):
            stack.append((path + b"/" + each, here + b"/" + each))


def pack(entries: Iterator[Entry], note: Note) -> Iterator[memoryview]:
    """The archive, in pieces of at most PIECE bytes. A piece is good until the one after the next is asked for.

    Files are read straight into the pieces, of which there are two: with many small files the calls, copies and page
    faults for each are most of the work.
    """
    buffers = memoryview(bytearray(PIECE)), memoryview(bytearray(PIECE))
    turn, at, room = 0, 0, buffers[0]
    for entry in entries:
        descriptor, left, head = _opened(entry, note)
        padding = -left % BLOCK
        try:
            while head or left or padding:
                if at + len(head) + BLOCK > PIECE:
                    yield room[:at]
                    turn, at = 1 - turn, 0
                    room = buffers[turn]
                if head:
                    room[at : at + len(head)] = head
                    at, head = at + len(head), b""
                if left:
                    got = os.readv(descriptor, [room[at : at + left]])
                    if not got:
                        note(f"{shown(entry.path)}: it got shorter while it was read; the rest of it is zeros")
                        os.close(descriptor)
                        descriptor = -1
                        descriptor = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
                    at, left = at + got, left - got
                elif padding:
                    room[at : at + padding] = bytes(padding)
                    at, padding = at + padding, 0
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    yield room[:at]
    yield memoryview(bytes(2 * BLOCK))


def _opened(entry: Entry, note: Note) -> tuple[int, int, bytes]:
    """A file's descriptor (or -1), its bytes, and its head; which is empty where it can't be had."""
    status = entry.status
    mode, mtime = stat.S_IMODE(status.st_mode), max(0, int(status.st_mtime))
    if stat.S_ISDIR(status.st_mode):
        return -1, 0, header(entry.name + b"/", mode, 0, mtime, b"5")
    try:
        if stat.S_ISLNK(status.st_mode):
            return -1, 0, header(entry.name, mode, 0, mtime, b"2", os.readlink(entry.path))
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        note(f"{shown(entry.path)}: {error.strerror}")
        return -1, 0, b""
    size = os.fstat(descriptor).st_size
    return descriptor, size, header(entry.name, mode, size, mtime, b"0")


def header(name: bytes, mode: int, size: int, mtime: int, kind: bytes, link: bytes = b"") -> bytes:
    """One member's head; longer names come in members of their own before it."""
    before = b""
    for text, mark in ((link, b"K"), (name, b"L")):
        if len(text) > 100:
            before += header(b"././@LongLink", 0, len(text) + 1, 0, mark)
            before += text + bytes(1 + (-(len(text) + 1)) % BLOCK)
    fields = (
        name[:100], b"%07o\0" % mode, b"0000000\0", b"0000000\0", _number(size), _number(mtime), b"        ", kind,
        link[:100], _MAGIC, b"root", b"root", b"", b"", b"",
    )  # fmt: skip
    check = b"%06o\0 " % sum(b"".join(fields))
    return before + _HEADER.pack(*fields[:6], check, *fields[7:])


def _number(value: int) -> bytes:
    return b"%011o\0" % value if value < 1 << 33 else b"\x80" + value.to_bytes(11, "big")


class BadArchive(Exception):
    """What came is no archive. The message is for people."""


class Head(Struct, frozen=True):
    """One member's head as it came. Nothing of it is to be trusted."""

    name: bytes
    mode: int
    size: int
    mtime: int
    kind: bytes
    link: bytes


def parse_head(block: bytes) -> Head | None:
    """None: the archive's end. Raises `BadArchive`."""
    if not any(block):
        return None
    fields = _HEADER.unpack(block)
    if sum(block) - sum(fields[6]) + 8 * 32 != _octal(fields[6]):
        raise BadArchive("the stream is no tar archive, or it was damaged")
    name = text(fields[0])
    if fields[9][:6] == b"ustar\0" and fields[14].strip(b"\0"):
        name = text(fields[14]) + b"/" + name
    return Head(name, _octal(fields[1]), _octal(fields[4]), _octal(fields[5]), fields[7], text(fields[8]))


def text(field: bytes) -> bytes:
    """Up to the first NUL."""
    return field.partition(b"\0")[0]


def _octal(field: bytes) -> int:
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") if field[:1] == b"\x80" else 0
    try:
        value = int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise BadArchive("the stream is no tar archive, or it was damaged") from None
    if value < 0:
        raise BadArchive("the archive holds a negative number")
    return value


def decimal(digits: bytes) -> int:
    """A size of an extended header. Raises `BadArchive`."""
    if not digits.isdigit() or len(digits) > 18:
        raise BadArchive("the archive holds a size that is none")
    return int(digits)


def pax(data: bytes) -> dict[str, bytes]:
    """The fields that matter of `LENGTH name=value\\n` records. Raises `BadArchive`."""
    found: dict[str, bytes] = {}
    while data:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or len(length) > 8 or not len(length) + 3 <= int(length) <= len(data):
            raise BadArchive("the archive has a damaged extended header")
        record = data[len(length) + 1 : int(length) - 1]
        data = data[int(length) :]
        name, _, value = record.partition(b"=")
        if name in (b"path", b"linkpath", b"size"):
            found[name.decode()] = value
    return found


def shown(path: bytes) -> str:
    """A name on a terminal: nothing in it can control the terminal."""
    name = path[:MAX_NAME].decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)

"""fanotify(7): marks on another mount namespace's files, and the events that they give.

Owns groups (`Group`), which are descriptors, and the layout of events. Only notifications are used: nobody ever waits
for whoever reads them, so a reader that stops or dies holds nobody up. Measured on Linux 6.18: a mark on the file
system of an overlay sees every access through it from any mount namespace; events about names (`Naming`) are to be had
for single directories of an overlay only, since its handles can't be opened.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from enum import IntFlag

from msgspec import Struct

from dsec.kernel.syscalls import KernelError

_libc = ctypes.CDLL(None, use_errno=True)

_CLOEXEC, _NONBLOCK, _UNLIMITED_MARKS = 0x1, 0x2, 0x20
_REPORT_FID, _REPORT_DIR_FID, _REPORT_NAME = 0x200, 0x400, 0x800
_ADD = 0x1
_ON_MOUNT, _ON_FILESYSTEM = 0x10, 0x100
_AT_FDCWD = -100
_AT_HANDLE_FID, _AT_SYMLINK_FOLLOW = 0x200, 0x400
_NO_FD = -1
_HEAD = struct.Struct("=IBBHQii")
_INFO = struct.Struct("=BBH")
_HANDLE = struct.Struct("=Ii")
_FSID_BYTES = 8
_OPENAT2 = 437
_NO_MAGICLINKS, _IN_ROOT = 0x02, 0x10
_WITH_NAME = 2
"""FAN_EVENT_INFO_TYPE_DFID_NAME"""
_READ_BYTES = 64 * 1024
_HINTS = {
    errno.EMFILE: "fs.fanotify.max_user_groups is reached",
    errno.ENOSPC: "fs.fanotify.max_user_marks is reached",
    errno.ENOSYS: "this kernel has no fanotify",
    errno.EOPNOTSUPP: "this file system can't give such events",
}


class Mask(IntFlag):
    """What an event says, and what a mark asks for."""

    MODIFY = 0x2
    CLOSE_WRITE = 0x8
    OPEN = 0x20
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    OPEN_EXEC = 0x1000
    OVERFLOW = 0x4000
    ON_CHILD = 0x08000000
    ON_DIRECTORY = 0x40000000


NAMES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.ON_DIRECTORY


class Event(Struct, frozen=True):
    """`fd`: the file, open for reading, the receiver's to close; -1 for an event about a name, and an overflow."""

    mask: int
    pid: int
    """As this process counts; 0 for one that it can't name."""
    fd: int
    handle: bytes = b""
    """Of the directory, with `name`."""
    name: bytes = b""


class Group:
    """A queue of events with its marks. Its own process's accesses are in it too."""

    def __init__(self, *, naming: bool = False) -> None:
        """`naming`: events about names in directories instead of events about files. Raises KernelError."""
        flags = _CLOEXEC | _NONBLOCK | _UNLIMITED_MARKS
        if naming:
            flags |= _REPORT_FID | _REPORT_DIR_FID | _REPORT_NAME
        self.fd = _libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)
        if self.fd < 0:
            raise KernelError(ctypes.get_errno(), "fanotify_init", _HINTS)

    def mark(self, mask: int, path: str | bytes, *, filesystem: bool = False, mount: bool = False) -> None:
        """Ask for events: of one file or directory, of everything in its file system, of everything under one mount.
        Raises KernelError."""
        flags = _ADD | (_ON_FILESYSTEM if filesystem else _ON_MOUNT if mount else 0)
        done = _libc.fanotify_mark(self.fd, flags, ctypes.c_uint64(mask), _AT_FDCWD, os.fsencode(path))
        if done < 0:
            raise KernelError(ctypes.get_errno(), f"fanotify_mark {os.fsdecode(path)}", _HINTS)

    def read(self) -> list[Event]:
        """What waits, up to 64 KiB of it; empty: nothing does."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return []
        return list(_events(data))

    def close(self) -> None:
        """Marks and waiting events go with it. Idempotent."""
        fd, self.fd = self.fd, _NO_FD
        if fd >= 0:
            os.close(fd)


def _events(data: bytes) -> Iterator[Event]:
    position = 0
    while position < len(data):
        length, _, _, head, mask, fd, pid = _HEAD.unpack_from(data, position)
        handle, name = b"", b""
        info, end = position + head, position + length
        while info < end:
            kind, _, size = _INFO.unpack_from(data, info)
            if kind == _WITH_NAME:
                at = info + _INFO.size + _FSID_BYTES
                count, _ = _HANDLE.unpack_from(data, at)
                handle = data[at + 4 : at + _HANDLE.size + count]
                name = data[at + _HANDLE.size + count : info + size].partition(b"\0")[0]
            info += size
        yield Event(mask, pid, fd, handle, name)
        position = end


def handle_of(path: str | bytes) -> bytes:
    """What stands for a file or directory in events about names. Raises KernelError."""
    room = 128
    buffer = ctypes.create_string_buffer(_HANDLE.pack(room, 0) + bytes(room), _HANDLE.size + room)
    mount = ctypes.c_int()
    flags = _AT_HANDLE_FID | _AT_SYMLINK_FOLLOW
    done = _libc.name_to_handle_at(_AT_FDCWD, os.fsencode(path), buffer, ctypes.byref(mount), flags)
    if done < 0:
        raise KernelError(ctypes.get_errno(), f"name_to_handle_at {os.fsdecode(path)}")
    count, _ = _HANDLE.unpack_from(buffer)
    return buffer.raw[4 : _HANDLE.size + count]


def open_inside(root: int, path: str | bytes, flags: int = os.O_PATH) -> int:
    """Open a path as who has `root` for its root directory would, so that no link leads out of it. Raises OSError."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _IN_ROOT | _NO_MAGICLINKS)
    found = _libc.syscall(_OPENAT2, root, os.fsencode(path), how, len(how))
    if found < 0:
        number = ctypes.get_errno()
        raise KernelError(number, f"openat2 {os.fsdecode(path)}")
    return int(found)

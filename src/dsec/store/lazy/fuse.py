"""The data of lazy layers as files of a FUSE file system, for kernels without pre-content events (before Linux 6.14).

The file system has one directory, and in it a file for each layer, by its digest: EROFS is mounted with that file as
its device. All reads of what isn't in the page cache come here, also of what is filled: that is what makes it the
slower way. It is read-only and its server speaks the kernel's protocol itself (version 7.31 and newer, Linux 5.4), few
calls of it: libfuse's bindings for Python would bring threads and a C library to a loop that is here already.

It lives as long as its descriptor: when this process ends, also by a kill, every read that waits and every later one of
what was mounted fails (ENOTCONN, which EROFS hands on as EIO) and nothing can answer with zeros. The layers have to be
mounted anew then, from a successor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from dsec.kernel import mounts, syscalls
from dsec.store.lazy.cache import CachedLayer
from dsec.store.lazy.holder import HolderStats, Waiting

READ_BYTES = 1 << 20
"""Of one request at most."""


class _Call(IntEnum):
    LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
    INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 42


_SILENT = (_Call.FORGET, _Call.BATCH_FORGET, _Call.INTERRUPT)
_MAJOR, _MINOR = 7, 31
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_KEEP_CACHE = 1 << 1
_ROOT = 1
_HEAD = struct.Struct("=IIQQIIII")
_OUT = struct.Struct("=IiQ")
_INIT_IN = struct.Struct("=IIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHH8I")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("=QQQQII")
_ATTR_HEAD = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QII")
_READ_IN = struct.Struct("=QQII")
_STATFS_OUT = struct.Struct("=QQQQQIIII6I")
_VALID_S = 3600


class _File(NamedTuple):
    number: int
    data: int
    size: int


class _Read(NamedTuple):
    unique: int
    node: int
    offset: int
    size: int
    timer: asyncio.TimerHandle


class FuseFiles:
    """`questions.Questions`, by a file system at a path."""

    def __init__(self, path: Path, *, deadline_s: float) -> None:
        """Mounts it, in place of a predecessor's. `deadline_s`: reads that nobody answers for so long fail. Raises
        OSError, KernelError where there is no FUSE."""
        self._deadline_s = deadline_s
        self._nodes: dict[str, int] = {}
        """A layer's for ever: what the kernel caches of a node is right as long as it has it."""
        self._files: dict[int, _File] = {}
        """By node."""
        self._numbers: dict[int, int] = {}
        """Nodes by number."""
        self._used: dict[int, float] = {}
        self._reads: dict[int, _Read] = {}
        self._answered = self._failed = 0
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mounts.unmount_under(path)
            options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,max_read={READ_BYTES}"
            options += ",allow_other,default_permissions"  # who is handed a file is another user: a machine's monitor
            flags = syscalls.MS_NODEV | syscalls.MS_NOSUID | syscalls.MS_RDONLY
            syscalls.mount("dsec", path, "fuse", flags, options)
        except OSError:
            os.close(self._fd)
            raise

    def start(self, on_read: Callable[[Waiting], None], on_gone: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(self._fd, self._readable, on_read, on_gone)

    def add(self, number: int, layer: str, root: Path) -> None:
        self.remove(number)
        node = self._nodes.setdefault(layer, _ROOT + 1 + len(self._nodes))
        data = os.open(root / "data", os.O_RDONLY | os.O_CLOEXEC)
        self._files[node] = _File(number, data, os.fstat(data).st_size)
        self._numbers[number] = node
        self._used[number] = time.monotonic()

    def remove(self, number: int) -> None:
        node = self._numbers.pop(number, None)
        if node is not None:
            for read in [read for read in self._reads.values() if read.node == node]:
                self.answer(read.unique, errno.EIO)
            os.close(self._files.pop(node).data)

    def answer(self, token: int, error: int) -> None:
        read = self._reads.pop(token, None)
        if read is None:  # it was too late
            return
        read.timer.cancel()
        data = b""
        if not error:
            try:
                data = os.pread(self._files[read.node].data, read.size, read.offset)
            except OSError:
                error = errno.EIO
        if error:
            self._failed += 1
        else:
            self._answered += 1
        self._reply(read.unique, data, error)

    def complete(self, number: int, cached: CachedLayer) -> None:
        """Its reads come here as before."""

    def reopen(self, number: int, cached: CachedLayer) -> bool:
        """It may be mounted without this file system, because it was complete."""
        return False

    def idle_s(self, number: int) -> float:
        return time.monotonic() - self._used.get(number, 0.0)

    @property
    def to_copier(self) -> bool:
        return False

    def stats(self) -> HolderStats:
        return HolderStats(0, self._answered, self._failed, len(self._reads))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        for file in self._files.values():
            os.close(file.data)

    def _readable(self, on_read: Callable[[Waiting], None], on_gone: Callable[[], None]) -> None:
        for _ in range(64):
            try:
                request = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # who asked is gone already
                    continue
                asyncio.get_running_loop().remove_reader(self._fd)
                on_gone()  # it was unmounted
                return
            _, call, unique, node, *_ = _HEAD.unpack_from(request)
            if call == _Call.READ:
                self._read(unique, node, request[_HEAD.size :], on_read)
            elif call not in _SILENT:
                try:
                    self._reply(unique, self._call(call, node, request[_HEAD.size :]))
                except OSError as error:
                    self._reply(unique, b"", error.errno or errno.EIO)

    def _read(self, unique: int, node: int, body: bytes, on_read: Callable[[Waiting], None]) -> None:
        file = self._files.get(node)
        if file is None:
            self._reply(unique, b"", errno.EIO)
            return
        _, offset, size, _ = _READ_IN.unpack_from(body)
        timer = asyncio.get_running_loop().call_later(self._deadline_s, self.answer, unique, errno.EIO)
        self._reads[unique] = _Read(unique, node, offset, size, timer)
        self._used[file.number] = time.monotonic()
        on_read(Waiting(unique, file.number, offset, size))

    def _call(self, call: int, node: int, body: bytes) -> bytes:
        """The answer's body. Raises OSError: what the caller gets."""
        match call:
            case _Call.INIT:
                return self._hello(body)
            case _Call.LOOKUP:
                child = self._nodes.get(body.split(b"\0", 1)[0].decode(errors="replace"))
                if node != _ROOT or child is None:
                    raise OSError(errno.ENOENT, "")
                return _ENTRY.pack(child, 0, 0, _VALID_S, 0, 0) + self._attributes(child)
            case _Call.GETATTR:
                return _ATTR_HEAD.pack(_VALID_S, 0, 0) + self._attributes(node)
            case _Call.OPEN:
                return _OPEN_OUT.pack(0, _KEEP_CACHE, 0)
            case _Call.OPENDIR:
                return _OPEN_OUT.pack(0, 0, 0)
            case _Call.STATFS:
                return _STATFS_OUT.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0, *[0] * 6)
            case _Call.READDIR | _Call.RELEASE | _Call.RELEASEDIR | _Call.DESTROY:
                return b""
            case _:
                raise OSError(errno.ENOSYS, "")

    @staticmethod
    def _hello(body: bytes) -> bytes:
        major, minor, ahead, flags = _INIT_IN.unpack_from(body)
        if major != _MAJOR or minor < _MINOR:
            raise OSError(errno.EPROTO, "")
        pages = READ_BYTES // 4096
        wanted = flags & (_ASYNC_READ | _MAX_PAGES)
        ahead = min(ahead, READ_BYTES)
        return _INIT_OUT.pack(_MAJOR, _MINOR, ahead, wanted, 64, 48, 4096, 1, pages, 0, *[0] * 8)

    def _attributes(self, node: int) -> bytes:
        size, mode, links = 0, stat.S_IFDIR | 0o500, 2
        if node != _ROOT:
            file = self._files.get(node)
            if file is None:
                raise OSError(errno.ENOENT, "")
            size, mode, links = file.size, stat.S_IFREG | 0o400, 1
        return _ATTR.pack(node, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)

    def _reply(self, unique: int, body: bytes, error: int = 0) -> None:
        with contextlib.suppress(FileNotFoundError, BrokenPipeError):  # who asked was killed, or it was unmounted
            os.writev(self._fd, [_OUT.pack(_OUT.size + len(body), -error, unique), body])

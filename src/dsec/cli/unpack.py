"""Unpacking an archive that comes from a sandbox, and may be hostile, into a local directory.

Invariants: nothing is written, linked or changed outside of the target, whatever the archive says; no symbolic link
below the target is followed, neither one of the archive's nor one that was there; a file appears under its name only
when it is whole; no file gets a set-user-id, set-group-id or sticky bit; devices, pipes and sockets are left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from dsec.cli.tarstream import BLOCK, MAX_NAME, BadArchive, Head, Note, decimal, parse_head, pax, shown, text

_MAX_EXTENDED = 1 << 20
_PART = b".dsec-part"
_LATEST = (1 << 33) - 1
"""The kernel takes no time of any size."""


class Unpacker:
    """Unpacks what it is fed into a directory. `close` it in the end, `finish` before that where all has come."""

    def __init__(
        self, target: bytes, note: Note, done: Callable[[int], None] = lambda _: None, *, root_too: bool = True
    ) -> None:
        """`target`: an existing directory. `note` hears of what is refused or can't be written; `done` of each file's
        size. `root_too`: the target itself gets the mode and time of the archive's root."""
        self.refused = 0
        self.ended = False
        """The archive's end has come."""
        self._note = note
        self._done = done
        self._root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._parent: tuple[bytes, ...] = ()
        self._parent_fd = self._root
        self._buffer = bytearray()
        self._left = 0
        """Of the member's data."""
        self._padding = 0
        self._take: Callable[[bytes], None] = self._drop
        self._at_end: Callable[[], None] = self._nothing
        self._extended = bytearray()
        self._next: dict[str, bytes] = {}
        """What extended headers say of the next member: path, linkpath, size."""
        self._file = -1
        self._part: tuple[int, bytes] | None = None
        """The directory and name of the file that isn't whole yet."""
        self._root_too = root_too
        self._directories: list[tuple[tuple[bytes, ...], int, int]] = []

    # --- the stream ---

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises `BadArchive`."""
        view = memoryview(data)
        while view and not self.ended:
            if self._left:
                part = view[: self._left]
                self._left -= len(part)
                view = view[len(part) :]
                self._take(bytes(part))
                if not self._left:
                    self._end_member()
            elif self._padding:
                part = view[: self._padding]
                self._padding -= len(part)
                view = view[len(part) :]
            else:
                part = view[: BLOCK - len(self._buffer)]
                self._buffer += part
                view = view[len(part) :]
                if len(self._buffer) == BLOCK:
                    block = bytes(self._buffer)
                    self._buffer.clear()
                    self._member(parse_head(block))

    def finish(self) -> None:
        """All has come: give directories their modes and times. Raises `BadArchive` where the archive was cut."""
        if not self.ended:
            raise BadArchive("the archive was cut")
        for parts, mode, mtime in reversed(self._directories):
            self._finish_directory(parts, mode, mtime)

    def close(self) -> None:
        """Let go; a file that isn't whole is removed. Idempotent."""
        if self._root < 0:
            return
        self._abandon_file()
        self._leave_parent()
        os.close(self._root)
        self._root = -1

    # --- members ---

    def _member(self, head: Head | None) -> None:
        if head is None:
            self.ended = True
            return
        if head.kind in (b"x", b"g", b"L", b"K"):
            self._begin_extended(head.kind, head.size)
            return
        extended, self._next = self._next, {}
        size = decimal(extended["size"]) if "size" in extended else head.size
        self._left, self._padding = size, -size % BLOCK
        self._take, self._at_end = self._drop, self._nothing
        name = extended.get("path", head.name)
        try:
            self._begin(head, name, extended.get("linkpath", head.link))
        except _Refused as refused:
            self._refuse(f"{shown(name)}: {refused}")
        except OSError as error:
            self._refuse(f"{shown(name)}: {error.strerror}")
        if not self._left:
            self._end_member()

    def _begin(self, head: Head, name: bytes, link: bytes) -> None:
        parts, kind, mode, mtime = _parts(name), head.kind, head.mode & 0o777, min(head.mtime, _LATEST)
        if kind == b"5":
            if parts:
                self._make_directory(parts)
            self._left = self._padding = 0
            if parts or self._root_too:
                self._directories.append((parts, mode, mtime))
        elif kind in (b"0", b"\0", b"7"):
            self._begin_file(parts, mode, mtime)
        elif kind == b"2":
            if b"\0" in link or len(link) > MAX_NAME:
                raise _Refused("a symbolic link to nowhere")
            parent, last = self._enter(parts)
            _clear(parent, last)
            os.symlink(link, last, dir_fd=parent)
            os.utime(last, (mtime, mtime), dir_fd=parent, follow_symlinks=False)
        elif kind == b"1":
            self._link(parts, _parts(link))
        else:
            raise _Refused("a device, pipe or socket is left out")

    def _begin_file(self, parts: tuple[bytes, ...], mode: int, mtime: int) -> None:
        parent, last = self._enter(parts)
        part = last[: 255 - len(_PART)] + _PART
        _clear(parent, part)
        self._file = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        size = self._left

        def whole() -> None:
            descriptor, self._file = self._file, -1
            try:
                os.fchmod(descriptor, mode)
                os.utime(descriptor, (mtime, mtime))
            finally:
                os.close(descriptor)
            os.rename(part, last, src_dir_fd=parent, dst_dir_fd=parent)
            self._part = None
            self._done(size)

        self._part = (parent, part)
        self._take, self._at_end = self._write, whole

    def _end_member(self) -> None:
        at_end, self._at_end = self._at_end, self._nothing
        try:
            at_end()
        except OSError as error:
            self._refuse(f"a file could not be finished: {error.strerror}")
            self._abandon_file()

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._refuse(f"a file could not be written: {error.strerror}")
            self._abandon_file()
            self._take, self._at_end = self._drop, self._nothing

    def _abandon_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._part is not None:
            (parent, name), self._part = self._part, None
            try:
                os.unlink(name, dir_fd=parent)
            except OSError as error:
                self._note(f"a part of a file is left: {error.strerror}")

    def _link(self, parts: tuple[bytes, ...], source: tuple[bytes, ...]) -> None:
        if not source:
            raise _Refused("a link to nothing")
        origin, first = self._enter(source, make=False)
        origin = os.dup(origin)
        try:
            parent, last = self._enter(parts)
            if not stat.S_ISREG(os.stat(first, dir_fd=origin, follow_symlinks=False).st_mode):
                raise _Refused("a hard link to something that is no file")
            _clear(parent, last)
            os.link(first, last, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(origin)

    # --- extended headers ---

    def _begin_extended(self, kind: bytes, size: int) -> None:
        if not 0 < size <= _MAX_EXTENDED:
            raise BadArchive("the archive has an endless name")
        self._left, self._padding = size, -size % BLOCK
        self._extended.clear()
        self._take = self._extended.extend
        self._at_end = lambda: self._end_extended(kind)

    def _end_extended(self, kind: bytes) -> None:
        data = bytes(self._extended)
        if kind == b"L":
            self._next["path"] = text(data)
        elif kind == b"K":
            self._next["linkpath"] = text(data)
        elif kind == b"x":
            self._next |= pax(data)

    # --- places below the target ---

    def _enter(self, parts: tuple[bytes, ...], *, make: bool = True) -> tuple[int, bytes]:
        """The directory of a path, and its last name. No link is followed."""
        if not parts:
            raise _Refused("the name is empty")
        *above, last = parts
        wanted = tuple(above)
        if wanted != self._parent:
            descriptor = self._walk(wanted, make=make)
            self._leave_parent()
            self._parent, self._parent_fd = wanted, descriptor
        return self._parent_fd, last

    def _leave_parent(self) -> None:
        if self._parent_fd != self._root:
            os.close(self._parent_fd)
        self._parent, self._parent_fd = (), self._root

    def _walk(self, parts: tuple[bytes, ...], *, make: bool) -> int:
        """A descriptor of a directory below the target, for the caller to close unless it is the target's own."""
        here = self._root
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        for part in parts:
            try:
                try:
                    below = os.open(part, flags, dir_fd=here)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, 0o700, dir_fd=here)
                    below = os.open(part, flags, dir_fd=here)
            except NotADirectoryError:
                raise _Refused("its directory is a file or a symbolic link") from None
            finally:
                if here != self._root:
                    os.close(here)
            here = below
        return here

    def _make_directory(self, parts: tuple[bytes, ...]) -> None:
        parent, last = self._enter(parts)
        try:
            os.mkdir(last, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                raise _Refused("there is something else in place of this directory") from None

    def _finish_directory(self, parts: tuple[bytes, ...], mode: int, mtime: int) -> None:
        try:
            descriptor = self._walk(parts, make=False)
            try:
                os.fchmod(descriptor, mode)
                os.utime(descriptor, (mtime, mtime))
            finally:
                if descriptor != self._root:
                    os.close(descriptor)
        except (OSError, _Refused) as error:
            self._refuse(f"{shown(b'/'.join(parts))}: its mode could not be set: {error}")

    # --- small ---

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self._note(why)

    def _drop(self, data: bytes) -> None:
        """Data of a member that is left out."""

    def _nothing(self) -> None:
        """At the end of such a one."""


class _Refused(Exception):
    """Why a member is left out."""


def _parts(name: bytes) -> tuple[bytes, ...]:
    """A path of an archive, taken apart. Raises `_Refused` for one that leads out."""
    if len(name) > MAX_NAME:
        raise _Refused("the name is too long")
    if name.startswith(b"/") or b"\0" in name:
        raise _Refused("an absolute path is refused")
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise _Refused("a path with .. is refused")
    return parts


def _clear(parent: int, name: bytes) -> None:
    """Make way for a file; a directory stays, and is an error for whoever wants its name."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise _Refused("there is a directory in its place") from None

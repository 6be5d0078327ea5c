"""FAT16 file systems made of files in memory: the boot partition of a disk, the seed of a machine.

Nothing is mounted and no tool is needed. Names may be long (they get a VFAT entry); times are left at zero, so that the
same files give the same bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from dsec.errors import InvalidRequest

SECTOR = 512
LEAST_CLUSTERS, MOST_CLUSTERS = 4085, 65524
"""Beyond these it would be a FAT12 or a FAT32."""
_ROOT_ENTRIES = 512
_END = 0xFFFF
_DIRECTORY, _ARCHIVE, _LABEL, _LONG = 0x10, 0x20, 0x08, 0x0F
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")

Tree = Mapping[str, bytes]
"""Content by path (`EFI/BOOT/BOOTX64.EFI`)."""


def make(files: Tree, label: str, size: int = 0, *, hidden: int = 0) -> bytes:
    """The file system, of `size` bytes or as small as it can be. `hidden`: sectors before it on its disk. Raises
    `InvalidRequest` where the files don't fit."""
    return _Volume(files, label, size, hidden).image()


class _Directory:
    def __init__(self) -> None:
        self.directories: dict[str, _Directory] = {}
        self.files: dict[str, bytes] = {}

    def entries(self) -> int:
        """How many 32-byte entries its content takes."""
        return sum(1 + _long_entries(name) for name in (*self.directories, *self.files))


class _Volume:
    def __init__(self, files: Tree, label: str, size: int, hidden: int) -> None:
        self._label = label.encode("ascii").ljust(11)[:11]
        self._hidden = hidden
        self._root = _Directory()
        for path, data in files.items():
            *above, name = path.split("/")
            at = self._root
            for part in above:
                at = at.directories.setdefault(part, _Directory())
            at.files[name] = data
        wanted = max(size // SECTOR, (sum(map(len, files.values())) + (1 << 20)) // SECTOR)
        self._cluster = 1
        while wanted / self._cluster > MOST_CLUSTERS:
            self._cluster *= 2
        if self._cluster > 64:
            raise InvalidRequest("that is more than a FAT16 file system holds")
        clusters = max(LEAST_CLUSTERS + 16, min(MOST_CLUSTERS, wanted // self._cluster))
        self._fat_sectors = math.ceil((clusters + 2) * 2 / SECTOR)
        self._first = 1 + 2 * self._fat_sectors + _ROOT_ENTRIES * 32 // SECTOR
        if size:
            clusters = min(clusters, (size // SECTOR - self._first) // self._cluster)
        if clusters < LEAST_CLUSTERS:
            raise InvalidRequest("a FAT16 file system is larger than that")
        self._sectors = self._first + clusters * self._cluster
        self._fat = [0xFFF8, _END]
        self._most = clusters + 2
        self._data = bytearray()

    def image(self) -> bytes:
        root = self._content(self._root, 0, root=True)
        if len(root) > _ROOT_ENTRIES * 32 or len(self._fat) > self._most:
            raise InvalidRequest("the files don't fit into the file system")
        table = struct.pack(f"<{len(self._fat)}H", *self._fat).ljust(self._fat_sectors * SECTOR, b"\0")
        head = self._boot_sector() + table * 2 + root.ljust(_ROOT_ENTRIES * 32, b"\0")
        return (head + bytes(self._data)).ljust(self._sectors * SECTOR, b"\0")

    def _boot_sector(self) -> bytes:
        small = self._sectors if self._sectors < 1 << 16 else 0
        shape = (SECTOR, self._cluster, 1, 2, _ROOT_ENTRIES, small, 0xF8, self._fat_sectors, 63, 255, self._hidden)
        large = 0 if small else self._sectors
        head = struct.pack("<3s8sHBHBHHBHHHII", b"\xeb\x3c\x90", b"MSWIN4.1", *shape, large)
        rest = struct.pack("<BBBI11s8s", 0x80, 0, 0x29, 0x64736563, self._label, b"FAT16   ")
        return (head + rest).ljust(510, b"\0") + b"\x55\xaa"

    def _take(self, data: bytes) -> int:
        """Put data into clusters of its own: the first."""
        if not data:
            return 0
        count = math.ceil(len(data) / (self._cluster * SECTOR))
        first = len(self._fat)
        self._fat += [*range(first + 1, first + count), _END]
        self._data += data.ljust(count * self._cluster * SECTOR, b"\0")
        return first

    def _reserve(self, size: int) -> int:
        return self._take(bytes(max(size, 1)))

    def _content(self, directory: _Directory, own: int, *, root: bool = False, above: int = 0) -> bytes:
        if root:
            found = struct.pack("<11sB20x", self._label, _LABEL)
        else:
            found = _entry(b".          ", _DIRECTORY, own, 0) + _entry(b"..         ", _DIRECTORY, above, 0)
        taken: set[bytes] = set()
        for name, inner in directory.directories.items():
            first = self._reserve((inner.entries() + 2) * 32)
            data = self._content(inner, first, above=own)
            at = (first - 2) * self._cluster * SECTOR
            self._data[at : at + len(data)] = data
            found += _named(name, taken, _DIRECTORY, first, 0)
        for name, data in directory.files.items():
            found += _named(name, taken, _ARCHIVE, self._take(data), len(data))
        return found


def _entry(short: bytes, kind: int, first: int, size: int) -> bytes:
    return struct.pack("<11sB14xHI", short, kind, first, size)


def _named(name: str, taken: set[bytes], kind: int, first: int, size: int) -> bytes:
    """Its entries: the long name, last part first, then the short one."""
    short = _short(name, taken)
    taken.add(short)
    total = 0
    for byte in short:
        total = (((total & 1) << 7) + (total >> 1) + byte) & 0xFF
    count = _long_entries(name)
    encoded = name.encode("utf-16-le")
    if len(encoded) % 26:
        encoded = (encoded + b"\0\0").ljust(count * 26, b"\xff")
    found = b""
    for number in range(count, 0, -1):
        part = encoded[(number - 1) * 26 : number * 26]
        mark = number | (0x40 if number == count else 0)
        found += struct.pack("<B10sBBB12sH4s", mark, part[:10], _LONG, 0, total, part[10:22], 0, part[22:])
    return found + _entry(short, kind, first, size)


def _long_entries(name: str) -> int:
    stem, _, suffix = name.partition(".")
    plain = set(stem) | set(suffix) <= _PLAIN and 0 < len(stem) <= 8 and len(suffix) <= 3
    return 0 if plain and (suffix or "." not in name) else math.ceil(len(name) / 13)


def _short(name: str, taken: set[bytes]) -> bytes:
    stem, _, suffix = name.upper().rpartition(".") if "." in name.strip(".") else (name.upper(), "", "")
    stem, suffix = ("".join(each for each in part if each in _PLAIN) for part in (stem, suffix))
    if not _long_entries(name):
        return stem.encode().ljust(8) + suffix.encode().ljust(3)
    for number in range(1, 100):
        found = f"{stem[:5]}~{number}".encode().ljust(8) + suffix[:3].encode().ljust(3)
        if found not in taken:
            return found
    raise InvalidRequest(f"too many names like {name!r} in one directory")

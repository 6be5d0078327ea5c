"""The first file system of a virtual machine: the guest as /init, and the kernel's modules. A cpio archive ("newc")."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping

_TRAILER = "TRAILER!!!"


def make(guest: bytes, modules: Mapping[str, bytes]) -> bytes:
    """The archive. `modules`: content by name, loaded in the order of the names."""
    return b"".join(_members(guest, modules))


def _members(guest: bytes, modules: Mapping[str, bytes]) -> Iterator[bytes]:
    for name in ("dev", "proc", "sys", "modules"):
        yield _member(name, stat.S_IFDIR | 0o755)
    yield _member("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))  # the kernel opens it for /init
    yield _member("init", stat.S_IFREG | 0o755, guest)
    for name in sorted(modules):
        yield _member(f"modules/{name}", stat.S_IFREG | 0o644, modules[name])
    yield _member(_TRAILER, 0)


def _member(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    encoded = name.encode() + b"\0"
    # inode, mode, uid, gid, links, mtime, size, device of the file, device that it is, length of the name, checksum
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)

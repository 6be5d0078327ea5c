"""What a qcow2 file says in its header, before any program that could be deceived by it opens it.

A qcow2 image may name other files: a backing file, an external data file. Whoever opens one follows; so these are
refused here, on the bytes alone, as are encryption and what isn't known.
"""

from __future__ import annotations

import struct

from dsec.errors import InvalidRequest

MAGIC = b"QFI\xfb"
HEADER_BYTES = 1 << 16
"""What `check` wants of the file's beginning."""
_DIRTY, _CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED_L2 = 1, 2, 4, 8, 16
_END_OF_EXTENSIONS, _BACKING_FORMAT, _DATA_FILE_NAME = 0, 0xE2792ACA, 0x44415441


def is_qcow2(head: bytes) -> bool:
    return head.startswith(MAGIC)


def check(head: bytes, most_bytes: int) -> int:
    """The size of the disk inside, in bytes. Raises `InvalidRequest` for an image that names another file, is
    encrypted, damaged, of an unknown kind, or larger than `most_bytes`."""
    if len(head) < 72 or not is_qcow2(head):
        raise InvalidRequest("this is no qcow2 image")
    version, backing, backing_size, cluster_bits, size, crypt = struct.unpack_from(">IQIIQI", head, 4)
    if version not in (2, 3):
        raise InvalidRequest(f"a qcow2 image of version {version}; 2 and 3 are known")
    if backing or backing_size:
        raise _names("a backing file")
    if crypt:
        raise InvalidRequest("the image is encrypted", remedy="Convert it: `qemu-img convert -O raw`.")
    if not 9 <= cluster_bits <= 21:
        raise InvalidRequest("the image's cluster size is not valid")
    if not 0 < size <= most_bytes:
        raise InvalidRequest(f"a disk of {size} bytes; at most {most_bytes} are taken")
    header_bytes = 72
    if version == 3:
        if len(head) < 104:
            raise InvalidRequest("the image's header is cut short")
        incompatible, header_bytes = struct.unpack_from(">Q", head, 72)[0], struct.unpack_from(">I", head, 100)[0]
        if incompatible & _DATA_FILE:
            raise _names("an external data file")
        if incompatible & _CORRUPT or incompatible & ~(_DIRTY | _CORRUPT | _COMPRESSION | _EXTENDED_L2):
            raise InvalidRequest("the image is marked as damaged, or needs what isn't known here")
        if not 104 <= header_bytes <= 1 << cluster_bits:
            raise InvalidRequest("the image's header has no valid length")
    _check_extensions(head, header_bytes)
    return int(size)


def _check_extensions(head: bytes, at: int) -> None:
    while at + 8 <= len(head):
        kind, length = struct.unpack_from(">II", head, at)
        if kind == _END_OF_EXTENSIONS:
            return
        if kind == _DATA_FILE_NAME:
            raise _names("an external data file")
        if kind == _BACKING_FORMAT:
            raise _names("the format of a backing file")
        at += 8 + (length + 7) // 8 * 8
    raise InvalidRequest("the image's header extensions have no end")


def _names(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the image names {what}, which would be read from this host",
        remedy="Make it whole first: `qemu-img convert -O qcow2 IMAGE WHOLE`.",
    )

"""Disks that full machines boot from, as artifacts of a node's store.

On disk `store/disks/<digest>/`: `disk` (raw, sparse) and `disk.json` (`Image`); `store/disks/names/NAME` holds a
digest. An image is immutable, complete, and never read by the server: qcow2 is converted by qemu-img in a jail
(`imaging`), of a copy that nobody else can change, and what is left is a plain file that a machine sees as its disk. A
disk appears by the rename of a finished directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from dsec.errors import EnvironmentNotFound, InvalidRequest, NotFound
from dsec.store.scratch import ScratchRoot
from dsec.vmm import debian, imaging, qcow2
from dsec.vmm.disks import copy_file

Progress = Callable[[str], None]

MOST_BYTES = 1 << 42
_PIECE = 1 << 16
_HEAD_BYTES = 1 << 16
_FOREIGN = {
    b"KDMV": "a VMDK image",
    b"# Disk DescriptorFile": "a VMDK image",
    b"<<< ": "a VDI image",
    b"vhdxfile": "a VHDX image",
    b"conectix": "a VHD image",
    b"\x1f\x8b": "compressed",
    b"\xfd7zXZ": "compressed",
    b"\x28\xb5\x2f\xfd": "compressed",
    b"BZh": "compressed",
    b"PK\3\4": "compressed",
}
"""Of what isn't known, as a file of it begins."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


class Traits(Struct, frozen=True, kw_only=True):
    """How a machine is made for a disk: what can't be seen from outside."""

    firmware: Literal["uefi", "bios"] = "uefi"
    machine: Literal["q35", "pc"] = "q35"
    guest: bool = True
    """It starts our guest: a service that `dsec disk build` put there, or that cloud-init installs. Without it there
    are the consoles, the screen, keys and mouse, and nothing else."""
    pointer: Literal["virtio", "usb"] = "virtio"
    """The tablet that clicks come from."""
    boot_s: float = 600.0
    """When a boot has failed."""


class Image(Struct, frozen=True, kw_only=True):
    """A disk that is on this node."""

    digest: str
    names: list[str] = []
    traits: Traits
    source: str
    """What it was imported from."""
    size_bytes: int
    """As the machine sees it, before it is enlarged."""
    created_at: float


class ImageStore:
    """The disks below a state directory."""

    def __init__(self, state: Path) -> None:
        self.root = state / "store" / "disks"
        self._scratch = ScratchRoot(state)

    # --- finding ---

    def list(self) -> list[Image]:
        """The newest first."""
        names: dict[str, list[str]] = {}
        for path in sorted(self.root.glob("names/*")):
            names.setdefault(path.read_text(), []).append(path.name)
        found = []
        for note in self.root.glob("*/disk.json"):
            image = msgspec.json.decode(note.read_bytes(), type=Image)
            found.append(msgspec.structs.replace(image, names=names.get(image.digest, [])))
        return sorted(found, key=lambda each: -each.created_at)

    def find(self, name: str) -> Image:
        """By name or digest. Raises `EnvironmentNotFound`."""
        digest = name
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                digest = (self.root / "names" / name).read_text()
        try:
            if re.fullmatch(r"[0-9a-f]{64}", digest):
                return msgspec.json.decode((self.root / digest / "disk.json").read_bytes(), type=Image)
        except OSError:
            pass
        raise EnvironmentNotFound(
            f"there is no disk {name!r} on this node",
            remedy="`dsec disk list` names those that are there; `dsec disk build` and `dsec disk import` make one.",
        )

    def path(self, image: Image) -> Path:
        """The file with its content, which nobody may write to."""
        return self.root / image.digest / "disk"

    def remove(self, name: str) -> None:
        """A name, and the disk with its last one; or a disk by its digest, names and all. Machines that run go on.
        Raises `NotFound`."""
        named = self.root / "names" / name
        if _NAME.fullmatch(name) and named.is_file():
            digest = named.read_text()
            named.unlink()
            if not any(path.read_text() == digest for path in self.root.glob("names/*")):
                shutil.rmtree(self.root / digest, ignore_errors=True)
            return
        matches = [each for each in self.list() if each.digest.startswith(name)]
        if len(name) < 6 or len(matches) != 1:
            raise NotFound(f"there is no disk {name!r}, or more than one", remedy="`dsec disk list` names them.")
        for each in matches[0].names:
            (self.root / "names" / each).unlink(missing_ok=True)
        shutil.rmtree(self.root / matches[0].digest)

    # --- making ---

    def import_file(self, source: Path, name: str, traits: Traits, progress: Progress | None = None) -> Image:
        """Take a raw or qcow2 file, told apart by its first bytes. Blocks while it is copied.

        Raises `InvalidRequest` for what is no whole disk (an image that names other files above all), nothing to boot
        from, or a bad name, `Unsupported` without qemu-img, OSError.
        """
        say = progress or (lambda _: None)
        _check_name(name)
        with self._scratch.make() as directory:
            scratch = Path(directory)
            copy = scratch / "copy"
            say(f"copying {source.name}")
            with copy.open("xb") as file:
                copy_file(source, file.fileno())
            with copy.open("rb") as file:
                head = file.read(qcow2.HEADER_BYTES)
            if qcow2.is_qcow2(head):
                size = qcow2.check(head, MOST_BYTES)
                say("converting it")
                disk = scratch / "disk"
                with copy.open("rb") as image, disk.open("xb") as target:
                    imaging.convert(image.fileno(), target.fileno(), size)
                os.chown(disk, 0, 0)
                copy.unlink()
            else:
                disk = copy
            _check_boots(disk)
            return self._place(disk, name, traits, source.name, say)

    def build(self, name: str, packages: Sequence[str] = (), progress: Progress | None = None) -> Image:
        """Make a Debian with our guest as a service, and `packages`. Blocks for about a minute. Raises as
        `debian.build`, `InvalidRequest` for a bad name."""
        say = progress or (lambda _: None)
        _check_name(name)
        with self._scratch.make() as directory:
            scratch = Path(directory)
            disk = debian.build(scratch, packages, say)
            return self._place(disk, name, Traits(), " ".join(("debian", *packages)), say)

    def _place(self, disk: Path, name: str, traits: Traits, source: str, say: Progress) -> Image:
        size = disk.stat().st_size
        if not 0 < size <= MOST_BYTES:
            raise InvalidRequest(f"a disk of {size} bytes; 1 to {MOST_BYTES} are taken")
        if size % 512:
            size += 512 - size % 512
            os.truncate(disk, size)
        say("naming it by its content")
        digest = hashlib.sha256(_hash(disk) + msgspec.json.encode(traits)).hexdigest()
        image = Image(digest=digest, traits=traits, source=source, size_bytes=size, created_at=time.time())
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = disk.parent / "done"
        done.mkdir(mode=0o700)
        disk.chmod(0o400)
        disk.rename(done / "disk")
        (done / "disk.json").write_bytes(msgspec.json.encode(image))
        with contextlib.suppress(FileExistsError, OSError):  # the same disk is there already
            done.rename(self.root / digest)
        names = self.root / "names"
        names.mkdir(exist_ok=True)
        temporary = names / f".{secrets.token_hex(8)}"
        temporary.write_text(digest)
        temporary.rename(names / name)
        return msgspec.structs.replace(self.find(digest), names=[name])


def _check_boots(disk: Path) -> None:
    """Raises `InvalidRequest` for what no firmware begins with: boot sector, partitions and a CD each have a mark."""
    with disk.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise InvalidRequest("a disk of 0 bytes")
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise InvalidRequest(
                f"this is {kind}, not a raw or qcow2 disk",
                remedy="Unpack it first." if kind == "compressed" else "Convert it: `qemu-img convert -O qcow2`.",
            )
    if head[510:512] != b"\x55\xaa" and head[512:520] != b"EFI PART" and head[0x8001:0x8006] != b"CD001":
        raise InvalidRequest(
            "no machine would boot from this: it has neither a boot sector nor a table of partitions",
            remedy="Import a whole disk; `dsec disk build` makes one.",
        )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest("a disk's name is of a-z, 0-9 and ._-, at most 100 characters", field="name")


def _hash(path: Path) -> bytes:
    """Of where data is and what, in pieces; holes cost nothing, and zeros count as such."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        fd, size, at = file.fileno(), path.stat().st_size, 0
        found.update(str(size).encode())
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole is left
                break
            at, start = os.lseek(fd, start, os.SEEK_HOLE), start // _PIECE * _PIECE
            while start < at:
                data = os.pread(fd, _PIECE, start)
                if data != bytes(len(data)):
                    found.update(start.to_bytes(8, "little") + data)
                start += _PIECE
            at = start
    return found.digest()

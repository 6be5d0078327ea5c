"""The disks that virtual machines write to: sparse files with an ext4 file system, `<volume>/vm/NAME.disk`.

A clone's begins as a copy of its template's; on a volume that can, copies share what neither changes, and take a
millisecond. A disk can't outgrow its size, which is the sandbox's limit.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Set
from pathlib import Path

from dsec.errors import CreateFailed, Unsupported

_FICLONE = 0x40049409
LEAST_BYTES = 8 << 20
_OPTIONS = ("-q", "-F", "-O", "^has_journal,^resize_inode,uninit_bg", "-m", "0")
_EXTENDED = ("-E", "lazy_itable_init=1,nodiscard,root_owner=0:0")


class Disks:
    """All disks of a node. Blocking calls of some milliseconds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(mode=0o700, exist_ok=True)

    def make(self, name: str, size: int) -> int:
        """A new one with an empty file system: a descriptor for reading and writing. Raises `Unsupported` without
        mkfs.ext4, OSError."""
        path = self.path(name)
        try:
            _format(path, size)
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def copy(self, name: str, source: Path) -> int:
        """A new one that begins as `source` is: the same."""
        path = self.path(name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copy_file(source, fd)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return fd

    def template_path(self, key: str) -> Path:
        """The disk of a template."""
        return self.root / f"{key}.template"

    def keep(self, name: str, key: str) -> None:
        """A machine's disk becomes its template's: the machine has stopped."""
        os.rename(self.path(name), self.template_path(key))

    def drop_templates(self, keep: Set[str]) -> None:
        """All but those."""
        for path in self.root.glob("*.template"):
            if path.stem not in keep:
                path.unlink(missing_ok=True)

    def bring(self, source: Path, key: str) -> None:
        """A template's disk from elsewhere. Raises OSError."""
        temporary = self.root / f"{key}.{os.getpid()}"
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                copy_file(source, fd)
            finally:
                os.close(fd)
            os.rename(temporary, self.template_path(key))
        finally:
            temporary.unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        return self.root / f"{name}.disk"

    def used_bytes(self, name: str) -> int:
        """What it takes of the volume, what it shares with others included."""
        try:
            return self.path(name).stat().st_blocks * 512
        except OSError:
            return 0

    def remove(self, name: str) -> None:
        """Idempotent."""
        self.path(name).unlink(missing_ok=True)

    def list(self) -> set[str]:
        """The disks that are there."""
        return {path.stem for path in self.root.glob("*.disk")}

    def remove_all(self) -> None:
        """Templates' too."""
        shutil.rmtree(self.root, ignore_errors=True)


def disk_size(wanted: int) -> int:
    """The size that a disk gets: whole MiB, and room for a file system."""
    return max(LEAST_BYTES, (wanted + (1 << 20) - 1) >> 20 << 20)


def _format(path: Path, size: int) -> None:
    program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise Unsupported("mkfs.ext4 is missing", remedy="apt-get install e2fsprogs")
    with open(path, "xb") as file:
        file.truncate(size)
    done = subprocess.run([program, *_OPTIONS, *_EXTENDED, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CreateFailed(f"mkfs.ext4 failed: {done.stderr.strip()[-300:]}")


def copy_file(source: Path, target: int) -> None:
    """Into an empty file: shared where the file system can, else without the holes. Raises OSError."""
    with open(source, "rb") as file:
        try:
            fcntl.ioctl(target, _FICLONE, file.fileno())
        except OSError:
            copy_data(file.fileno(), target)


def copy_data(source: int, target: int) -> None:
    """What isn't a hole, into an empty file."""
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(target, size)
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole is left
            return
        at = os.lseek(source, start, os.SEEK_HOLE)
        while start < at:
            start += os.pwrite(target, os.pread(source, min(1 << 20, at - start), start), start)

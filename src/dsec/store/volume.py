"""The data volume: where sandboxes write.

On btrfs each sandbox has a subvolume `sandboxes/<id>` with `upper` and `work` in it, and a byte quota; it is made and
removed in well under a millisecond, so that the event loop calls directly. A state directory that is on btrfs is used
as it is. Anywhere else a sparse file `volume.btrfs` beside it is mounted by a loop device at `<run>/volume`; a host
without btrfs or loop devices gets plain directories, without byte quotas, removed by a thread. `spool/<id>` holds
output that the server keeps for a sandbox.

Invariant: nothing here may ever fill the host's disk. A loop file system whose backing file can't grow fails for all
sandboxes at once, so `check_space` refuses new sandboxes while there is a reserve left, and the file's size is a part
of what was free. Others may fill that disk all the same: then the kernel makes the volume read-only for good
(`failed`), which is said as what it is, and a server that starts ends what stands on it and mounts it anew
(`app_volume.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from enum import StrEnum
from pathlib import Path

from dsec.errors import Unavailable
from dsec.kernel import btrfs, loop, mounts, syscalls
from dsec.kernel.ledger import Ledger
from dsec.kernel.syscalls import KernelError

log = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30
LEAST_SIZE = 1 * GIB
SHARE = 0.8
"""Of what is free on the host's disk, when the volume is made."""
RESERVE = 0.02
RESERVE_MOST = 2 * GIB
QUOTA_SLACK = 1 * MIB
"""Added to a sandbox's quota: the trees of an empty subvolume, and what the kernel reserves for metadata while it
writes."""

_LOOK_EVERY_S = 0.1
_OPTIONS = "discard=async,commit=10"
"""Freed space goes back to the host's disk, at a bounded rate; and the kernel looks every 10 s for what was removed."""


class Kind(StrEnum):
    """What the volume stands on."""

    LOOP = "btrfs in a file"
    BTRFS = "btrfs"
    DIRECTORY = "plain directories"


class Volume:
    """An open data volume. One process at a time."""

    def __init__(self, root: Path, kind: Kind, state_dir: Path) -> None:
        self.root = root
        self.kind = kind
        self._state = state_dir
        for name in ("sandboxes", "spool", "trash", "captures"):
            (root / name).mkdir(exist_ok=True)
        root.chmod(0o711)
        self._sandboxes, self._spools = root / "sandboxes", root / "spool"
        self._fd = os.open(self._sandboxes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._quotas = btrfs.Quotas(self._fd) if kind is not Kind.DIRECTORY else None
        self.quota = False
        """Whether a sandbox's bytes are limited."""
        self._ids: dict[str, int] = {}
        self._room_until = 0.0
        self._trash = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._empty_trash, name="dsec-trash", daemon=True)
        self._thread.start()
        for name in os.listdir(root / "captures"):  # of a server that died
            self.drop_capture(name)
        if any((root / "trash").iterdir()):
            self._trash.set()

    # opening and closing

    @classmethod
    def open(
        cls, state_dir: Path, run_dir: Path, ledger: Ledger | None = None, *, size_bytes: int | None = None
    ) -> Volume:
        """Mount or find the volume. Blocks (tens of milliseconds the first time).

        Raises `Unavailable` where the disk is too full for one, or the volume's file can't be mounted.
        """
        if _on_btrfs(state_dir):
            (state_dir / "volume").mkdir(mode=0o700, exist_ok=True)
            volume = cls(state_dir / "volume", Kind.BTRFS, state_dir)
        else:
            target = run_dir / "volume"
            target.mkdir(parents=True, exist_ok=True)
            found = mounts.find_mount(target)
            if found is None and not _mount_file(state_dir / "volume.btrfs", target, size_bytes):
                (state_dir / "volume").mkdir(mode=0o700, exist_ok=True)
                return cls(state_dir / "volume", Kind.DIRECTORY, state_dir)
            volume = cls(target, Kind.LOOP, state_dir)
        volume._enable_quota(ledger)
        return volume

    @property
    def failed(self) -> bool:
        """Whether no sandbox can write any more, until it is mounted anew. Takes a microsecond or two."""
        return bool(os.statvfs(self.root).f_flag & os.ST_RDONLY)

    @staticmethod
    def trouble(state_dir: Path, run_dir: Path) -> str:
        """Why nobody can go on with the volume that is mounted, in words; "": one can, or none is."""
        found = mounts.find_mount(run_dir / "volume")
        if found is None:
            return ""
        if "ro" in found.super_options:
            return "the data volume is read-only, since the disk below it was full or failed"
        backing = loop.backing_file(found.source)
        # Not by comparing paths: to another mount namespace than the one that attached it, it has another one.
        if not (state_dir / "volume.btrfs").exists() or str(backing).endswith(" (deleted)"):
            return "the file of the data volume that is mounted was removed"
        return ""

    @staticmethod
    def let_go(run_dir: Path, timeout_s: float = 30.0) -> None:
        """Unmount it, once nothing stands on it any more. Blocks until the kernel has let go of its file; raises
        `Unavailable` where it doesn't."""
        found = mounts.find_mount(run_dir / "volume")
        if found is None:
            return
        mounts.unmount(found.target)
        deadline = time.monotonic() + timeout_s
        while loop.backing_file(found.source) is not None:
            if time.monotonic() > deadline:
                raise Unavailable(
                    "the data volume that failed is still in use",
                    remedy=f"End what uses {found.source}, or start this host again.",
                )
            time.sleep(0.02)

    def _enable_quota(self, ledger: Ledger | None) -> None:
        assert self._quotas is not None
        if self._quotas.mode == "off":
            try:
                btrfs.enable_simple_quota(self._fd)
            except KernelError as error:
                log.warning("sandboxes have no disk limit: %s", error.strerror)
                return
            if ledger and self.kind is Kind.BTRFS:
                ledger.record("quota", str(self.root))
        self.quota = True

    def close(self, *, keep: bool = True) -> None:
        """Let go of it. Without `keep` its mount goes as well, and everything that sandboxes wrote."""
        self._closing = True
        self._trash.set()
        self._thread.join()
        if not keep:
            for sandbox_id in self.list():
                self.remove(sandbox_id)
            for name in os.listdir(self.root / "spool"):
                self.remove_spool(name)
            for name in os.listdir(self.root / "captures"):
                self.drop_capture(name)
            for entry in os.scandir(self.root / "trash"):
                shutil.rmtree(entry, ignore_errors=True)
        os.close(self._fd)
        if not keep and self.kind is Kind.LOOP:
            mounts.unmount(self.root)

    # sandboxes

    def path(self, sandbox_id: str) -> Path:
        return self._sandboxes / sandbox_id

    def written(self, sandbox_id: str) -> tuple[Path, int]:
        """What a sandbox has written: its upper directory, and the id on this host of the root inside. Raises
        FileNotFoundError."""
        path = self.path(sandbox_id)
        return path / "upper", (path / "work").stat().st_uid

    def make(self, sandbox_id: str, disk_bytes: int, uid_base: int, capture: str = "") -> tuple[str, str]:
        """A sandbox's `(upper, work)` directories, limited to `disk_bytes` where the volume can; `upper` belongs to
        `uid_base`, the root inside. `capture`: with the files of that one, which belong to the same root.

        Raises FileExistsError, and `Unavailable` where the volume is full. On failure nothing is left.
        """
        try:
            if capture:
                self._copy(self.capture_path(capture), self.path(sandbox_id))
            elif self._quotas is None:
                os.mkdir(sandbox_id, 0o700, dir_fd=self._fd)
            else:
                btrfs.create_subvolume(self._fd, sandbox_id)
        except OSError as error:
            raise self._explained(error) from None
        try:
            fd = os.open(sandbox_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                if self.quota:
                    btrfs.limit(fd, disk_bytes + QUOTA_SLACK)
                if capture:
                    shutil.rmtree("work", dir_fd=fd)
                else:
                    os.mkdir("upper", 0o755, dir_fd=fd)
                    os.chown("upper", uid_base, uid_base, dir_fd=fd)
                os.mkdir("work", 0o700, dir_fd=fd)
                os.chown("work", uid_base, uid_base, dir_fd=fd)  # says whose it is, where nobody inside can change it
                os.fchmod(fd, 0o711)
            finally:
                os.close(fd)
        except OSError as error:
            self.remove(sandbox_id)
            raise self._explained(error) from None
        path = f"{self._sandboxes}/{sandbox_id}"
        return f"{path}/upper", f"{path}/work"

    def capture(self, sandbox_id: str, name: str) -> None:
        """Keep what a sandbox has written until now as `name`, until `drop_capture`. Blocks: milliseconds on btrfs, as
        long as a copy takes elsewhere. Raises `Unavailable` where the volume is full."""
        try:
            self._copy(self.path(sandbox_id), self.capture_path(name))
        except OSError as error:
            self.drop_capture(name)
            raise self._explained(error) from None

    def make_capture(self, name: str, most_bytes: int) -> Path:
        """An empty one whose files come from elsewhere: its `upper`. Raises `Unavailable` where the volume is full."""
        path = self.capture_path(name)
        try:
            if self._quotas is None:
                path.mkdir(mode=0o700)
            else:
                fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    btrfs.create_subvolume(fd, name)
                finally:
                    os.close(fd)
            if self.quota:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    btrfs.limit(fd, most_bytes + QUOTA_SLACK)
                finally:
                    os.close(fd)
            (path / "upper").mkdir(mode=0o755)
        except OSError as error:
            self.drop_capture(name)
            raise self._explained(error) from None
        return path / "upper"

    def capture_path(self, name: str) -> Path:
        """Where `upper` of a capture is."""
        return self.root / "captures" / name

    def drop_capture(self, name: str) -> None:
        """Idempotent."""
        parent = self.root / "captures"
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._remove(fd, parent, name)
        finally:
            os.close(fd)

    def _copy(self, source: Path, target: Path) -> None:
        if self._quotas is None:
            try:
                subprocess.run(["cp", "-a", "--reflink=auto", source, target], check=True, capture_output=True)
            except subprocess.CalledProcessError as error:
                full = b"No space left" in error.stderr
                raise OSError(
                    errno.ENOSPC if full else errno.EIO, error.stderr.decode(errors="replace")[-300:]
                ) from None
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fd = os.open(source, flags)
        try:
            parent = os.open(target.parent, flags)
            try:
                btrfs.snapshot_subvolume(fd, parent, target.name)
            finally:
                os.close(parent)
        finally:
            os.close(fd)

    def _explained(self, error: OSError) -> OSError | Unavailable:
        if error.errno == errno.EEXIST:
            return FileExistsError(error.errno, error.strerror, str(self.root))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Unavailable("the data volume is full", remedy="Delete sandboxes, or give the server a larger disk.")
        if error.errno in (errno.EROFS, errno.EIO):
            return _failure()
        return error

    def used_bytes(self, sandbox_id: str) -> int:
        """What a sandbox has written, in a few microseconds. 0 where the volume doesn't count, or there is no such
        sandbox."""
        if not self.quota or self._quotas is None:
            return 0
        try:
            return self._quotas.used_bytes(self._root_id(sandbox_id))
        except FileNotFoundError:
            return 0

    def _root_id(self, sandbox_id: str) -> int:
        known = self._ids.get(sandbox_id)
        if known is None:
            fd = os.open(sandbox_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                known = self._ids[sandbox_id] = btrfs.root_id(fd)
            finally:
                os.close(fd)
        return known

    def remove(self, sandbox_id: str) -> None:
        """Remove everything a sandbox wrote. Its space comes back in the background. Idempotent."""
        self._ids.pop(sandbox_id, None)
        self._remove(self._fd, self._sandboxes, sandbox_id)

    def _remove(self, fd: int, parent: Path, name: str) -> None:
        """`fd`: `parent`, open."""
        if self._quotas is not None:
            try:
                btrfs.destroy_subvolume(fd, name)
                return
            except KernelError as error:
                if error.errno == errno.ENOENT:
                    return
                if error.errno in (errno.EROFS, errno.EIO):
                    raise _failure() from None
                log.warning("%s: it is deleted file by file", error.strerror)
        self._discard(parent / name)

    def list(self) -> set[str]:
        """The sandboxes that have something here."""
        # By path: btrfs lists through an open descriptor only what was there when it was opened.
        return set(os.listdir(self.root / "sandboxes"))

    # spool

    def spool_path(self, sandbox_id: str) -> str:
        """The directory for output that is kept for a sandbox; made by who needs it."""
        return f"{self._spools}/{sandbox_id}"

    def spool(self, sandbox_id: str) -> Path:
        """The same, made if it is missing."""
        path = self._spools / sandbox_id
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def remove_spool(self, sandbox_id: str) -> None:
        """Remove kept output. Idempotent."""
        try:
            os.rmdir(f"{self._spools}/{sandbox_id}")
        except FileNotFoundError:
            pass
        except OSError:  # there is something in it
            self._discard(self._spools / sandbox_id)

    def _discard(self, path: Path) -> None:
        """Move it away at once and delete it in the background."""
        try:
            path.rename(self.root / "trash" / f"{path.parent.name}-{path.name}-{os.urandom(4).hex()}")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._explained(error) from None
        self._trash.set()

    def _empty_trash(self) -> None:
        while True:
            self._trash.wait()
            self._trash.clear()
            if self._closing:
                return
            try:
                if self._quotas is not None:
                    btrfs.sync(self._fd)
                for entry in os.scandir(self.root / "trash"):
                    shutil.rmtree(
                        entry.path, onerror=lambda _, path, why: log.warning("cannot delete %s: %s", path, why[1])
                    )
            except OSError as error:  # the thread goes on: what is left is tried again with the next
                log.warning("what was removed can't be deleted: %s", error)

    # space

    def free_bytes(self) -> int:
        """What may still be written, by the volume's measure and by the disk's below it."""
        free = []
        for place in {self.root, self._state}:
            stat = os.statvfs(place)
            free.append(stat.f_bavail * stat.f_frsize - int(min(RESERVE_MOST, RESERVE * stat.f_blocks * stat.f_frsize)))
        return max(0, min(free))

    def check_space(self) -> None:
        """Raise `Unavailable` where so little is left that no new sandbox may begin, or the volume has failed. Looks no
        more often than every 100 ms while there is room."""
        now = time.monotonic()
        if now < self._room_until:
            return
        if self.failed:
            raise _failure()
        if self.free_bytes() > 0:
            self._room_until = now + _LOOK_EVERY_S
        else:
            self._trash.set()  # what was removed may not be free yet
            raise Unavailable("the server's disk is full", remedy="Delete sandboxes, or give the server a larger disk.")

    def sweep(self, most: int = 64) -> int:
        """Remove quota groups that older kernels leave of removed sandboxes: a bounded number a call, so that it may
        be called from a timer. Returns how many went. Only on a volume of our own, where we know every subvolume."""
        if self.kind is not Kind.LOOP or self._quotas is None or not self.quota or btrfs.GROUPS_GO:
            return 0
        groups = self._quotas.groups()
        if len(groups) <= len(self._ids) + most:
            return 0
        live = set()
        for sandbox_id in self.list():
            with contextlib.suppress(FileNotFoundError):
                live.add(self._root_id(sandbox_id))
        return self._quotas.sweep(live, most)


def _failure() -> Unavailable:
    return Unavailable(
        "the data volume has failed: the kernel made it read-only, since the disk below it was full or broke",
        remedy="See to the state directory's disk, then start the server again: that ends what runs here.",
    )


def _on_btrfs(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        btrfs.fs_uuid(fd)
    except KernelError:
        return False
    finally:
        os.close(fd)
    return True


def _mount_file(file: Path, target: Path, size_bytes: int | None) -> bool:
    """Mount the volume's file, made if it is missing. False where this host can't."""
    if "btrfs" not in Path("/proc/filesystems").read_text().split():
        log.warning("this kernel has no btrfs: sandboxes have no disk limit, and are removed file by file")
        return False
    if not file.exists():
        mkfs = shutil.which("mkfs.btrfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if mkfs is None:
            log.warning("mkfs.btrfs is missing (btrfs-progs): sandboxes have no disk limit")
            return False
        _make_file(file, mkfs, size_bytes)
    try:
        # Direct I/O: else every page of the volume is cached twice.
        with loop.attach(file, direct_io=True) as device:
            syscalls.mount(device.path, target, "btrfs", syscalls.MS_NOATIME | syscalls.MS_NODEV, _OPTIONS)
    except KernelError as error:
        if error.errno == errno.ENOENT:  # no loop devices here
            log.warning("%s: sandboxes have no disk limit", error.strerror)
            return False
        raise Unavailable(
            f"the data volume can't be mounted: {error}",
            remedy=f"The kernel's log says why. Where its file is damaged, remove {file}: sandboxes' files go with it.",
        ) from None
    return True


def _make_file(file: Path, mkfs: str, size_bytes: int | None) -> None:
    if size_bytes is None:
        stat = os.statvfs(file.parent)
        size_bytes = int(stat.f_bavail * stat.f_frsize * SHARE) // MIB * MIB
        if size_bytes < LEAST_SIZE:
            raise Unavailable(
                f"only {stat.f_bavail * stat.f_frsize // MIB} MiB are free at {file.parent}",
                remedy="The data volume needs 1.3 GiB or more; set another state directory or free some space.",
            )
    fresh = file.with_suffix(".new")
    with open(fresh, "wb") as opened:
        os.fchmod(opened.fileno(), 0o600)
        opened.truncate(size_bytes)
    # For every change to a small file the kernel reserves some nodes of the sandbox's quota until the next commit, and
    # commits at once where they don't fit: with small nodes that comes four times later, and each change is cheaper.
    subprocess.run([mkfs, "-q", "-m", "single", "-n", "4096", fresh], check=True, capture_output=True)
    fresh.rename(file)

"""The ledger: what dsec changed on this host, so that it can be taken back.

`host.json` holds a list of changes in the order in which they were made. A change is recorded *before* it is made: a
crash in between costs an undo of something that isn't there, which is harmless. `undo` goes backwards, says what it
did, and keeps what it could not take back.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.kernel import btrfs, cgroups, mounts, sysctl, zram
from dsec.kernel.files import replace_file
from dsec.kernel.syscalls import KernelError


class Change(Struct, frozen=True, omit_defaults=True):
    """One change. `kind` says how it is undone: see `_UNDO`."""

    kind: str
    what: str
    old: str = ""
    new: str = ""


class Ledger:
    """The changes on record in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._changes = msgspec.json.decode(path.read_bytes(), type=list[Change])
        except FileNotFoundError:
            self._changes = []

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(self._changes)

    def record(self, kind: str, what: str, *, old: str = "", new: str = "") -> None:
        """Put a change on record, durably, before it is made. A second one of the same kind and thing keeps the first
        one's `old`."""
        if kind not in _UNDO:
            raise ValueError(f"nobody knows how to undo a {kind!r}")
        with self._lock:
            for at, change in enumerate(self._changes):
                if (change.kind, change.what) == (kind, what):
                    if change.new == new:
                        return
                    self._changes[at] = Change(kind, what, change.old, new)
                    break
            else:
                self._changes.append(Change(kind, what, old, new))
            self._save()

    def set_sysctl(self, name: str, value: str) -> None:
        """Change a kernel setting, with its old value on record. Raises KernelError."""
        old = sysctl.read(name)
        if old is None or old == value:
            return
        self.record("sysctl", name, old=old, new=value)
        sysctl.write(name, value)

    def undo_kind(self, kind: str) -> Iterable[str]:
        """As `undo`, for the changes of one kind."""
        for change in reversed(self.changes):
            if change.kind == kind:
                yield self._take_back(change)

    def undo(self, *, packages: bool = False) -> Iterable[str]:
        """Take everything back in reverse; yields a line for each change. `packages`: remove installed packages too.

        What fails, and packages that stay, remain on record.
        """
        for change in reversed(self.changes):
            if change.kind == "packages" and not packages:
                yield f"kept: packages {change.what} (dsec installed them; --packages removes them)"
                continue
            yield self._take_back(change)

    def _take_back(self, change: Change) -> str:
        try:
            done = _UNDO[change.kind](change)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"FAILED: {change.kind} {change.what}: {error}"
        with self._lock:
            self._changes.remove(change)
            self._save()
        return done

    def _save(self) -> None:
        if not self._changes:
            self._path.unlink(missing_ok=True)
            return
        replace_file(self._path, msgspec.json.format(msgspec.json.encode(self._changes), indent=1), 0o644)


def _undo_sysctl(change: Change) -> str:
    now = sysctl.read(change.what)
    if now != change.new:
        return f"left: sysctl {change.what} = {now} (somebody changed it since)"
    sysctl.write(change.what, change.old)
    return f"restored: sysctl {change.what} = {change.old} (was {change.new})"


def _undo_mount(change: Change) -> str:
    count = mounts.unmount_under(change.what) if Path(change.what).exists() else 0
    return f"unmounted: {count} below {change.what}"


def _undo_directory(change: Change) -> str:
    path = Path(change.what)
    if any(entry.target == path or path in entry.target.parents for entry in mounts.mounted()):
        raise OSError(errno.EBUSY, "something is mounted in it")
    if not path.exists():
        return f"gone already: {path}"
    shutil.rmtree(path)
    return f"removed: {path}"


def _undo_file(change: Change) -> str:
    Path(change.what).unlink(missing_ok=True)
    return f"removed: {change.what}"


def _undo_packages(change: Change) -> str:
    subprocess.run(
        ["apt-get", "-y", "-qq", "purge", "--autoremove", *change.what.split()],
        check=True,
        capture_output=True,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
    )
    return f"removed: packages {change.what}"


def _undo_quota(change: Change) -> str:
    try:
        fd = os.open(change.what, os.O_RDONLY)
    except FileNotFoundError:
        return f"gone already: {change.what}"
    try:
        btrfs.disable_quota(fd)
    finally:
        os.close(fd)
    return f"switched off: quotas of the btrfs file system at {change.what}"


def _undo_cgroups(change: Change) -> str:
    """`what` is the directory in one hierarchy; only an empty tree goes."""
    top = Path(change.what)
    for directory, _, _ in os.walk(top, topdown=False):
        os.rmdir(directory)
    return f"removed: cgroup {top}"


def _undo_favordynmods(change: Change) -> str:
    cgroups.forget_moves(change.what)
    return f"restored: {change.what} without favordynmods"


def _undo_zram(change: Change) -> str:
    zram.remove(change.what)
    return f"removed: compressed swap {change.what}"


_UNDO: dict[str, Callable[[Change], str]] = {
    "sysctl": _undo_sysctl,
    "mount": _undo_mount,
    "directory": _undo_directory,
    "file": _undo_file,
    "packages": _undo_packages,
    "quota": _undo_quota,
    "cgroups": _undo_cgroups,
    "favordynmods": _undo_favordynmods,
    "zram": _undo_zram,
}


def prepare_host(ledger: Ledger) -> list[str]:
    """Raise the kernel settings that dsec needs. Returns what it did and what it could not do, a line each."""
    said = []
    for setting in sysctl.WANTED:
        old = sysctl.too_low(setting)
        if old is None:
            continue
        try:
            ledger.set_sysctl(setting.name, str(setting.least))
        except KernelError as error:
            said.append(f"could not raise {setting.name} from {old} to {setting.least}: {error.strerror}")
        else:
            said.append(f"raised {setting.name} from {old} to {setting.least}: {setting.why}")
    return said

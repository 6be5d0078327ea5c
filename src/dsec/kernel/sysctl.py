"""Kernel settings that many sandboxes on one host need, as data with their reasons, and how to change them.

Settings are only ever raised; what was there before goes into the ledger so that `dsec host undo` puts it back.
"""

from __future__ import annotations

import errno
from pathlib import Path

from msgspec import Struct

from dsec.kernel.syscalls import KernelError


class Setting(Struct, frozen=True):
    """One sysctl and the least value that dsec wants."""

    name: str
    least: int
    why: str
    unlimited: int | None = None
    """A value below `least` that means no limit."""


WANTED = (
    Setting(
        "kernel.pid_max", 4_194_304, "one number space for the processes of all sandboxes; the default ends at 32,768"
    ),
    Setting("kernel.threads-max", 1_000_000, "threads of all sandboxes together"),
    Setting("fs.inotify.max_user_instances", 1_048_576, "all sandboxes together; the zygote allows each of them 128"),
    Setting("fs.inotify.max_user_watches", 4_194_304, "the same, for watches"),
    Setting(
        "fs.pipe-user-pages-soft", 1_048_576, "past it new pipes get one page instead of 16; it is per id", unlimited=0
    ),
    Setting("kernel.pty.max", 262_144, "terminals of all sandboxes together; each of them may make 256"),
    Setting("fs.fanotify.max_user_groups", 65_536, "up to three a sandbox with tripwires"),
    Setting("fs.fanotify.max_user_marks", 4_194_304, "the same, for marks"),
    Setting("fs.file-max", 4_194_304, "open files of all sandboxes together"),
    Setting("fs.nr_open", 1_048_576, "the server and the zygote hold descriptors for every sandbox"),
    Setting("fs.mount-max", 1_000_000, "mounts in one mount namespace: layers times id ranges"),
    Setting("fs.aio-max-nr", 1_048_576, "asynchronous I/O contexts of all sandboxes together"),
    Setting("kernel.keys.maxkeys", 20_000, "a session keyring per sandbox where a program makes one; it is per id"),
    Setting("kernel.keys.maxbytes", 2_000_000, "the same, in bytes"),
    Setting("user.max_user_namespaces", 65_536, "a user namespace per sandbox"),
    Setting("user.max_mnt_namespaces", 65_536, "a mount namespace per sandbox"),
    Setting("user.max_pid_namespaces", 65_536, "a pid namespace per sandbox"),
    Setting("user.max_net_namespaces", 65_536, "a net namespace per sandbox"),
    Setting("user.max_ipc_namespaces", 65_536, "an ipc namespace per sandbox"),
    Setting("user.max_uts_namespaces", 65_536, "a uts namespace per sandbox"),
    Setting("user.max_cgroup_namespaces", 65_536, "a cgroup namespace per sandbox"),
    Setting("vm.max_map_count", 262_144, "programs that map many files, such as debuggers and databases"),
)


def _path(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def read(name: str) -> str | None:
    """The value of a setting, or None where this kernel lacks it."""
    try:
        return _path(name).read_text().strip()
    except FileNotFoundError:
        return None


def write(name: str, value: str) -> None:
    """Set it. Raises KernelError."""
    try:
        _path(name).write_text(value)
    except OSError as error:
        raise KernelError(
            error.errno or 0, f"set {name} = {value}", {errno.EROFS: "/proc/sys is read-only in this container"}
        ) from None


def too_low(setting: Setting) -> str | None:
    """The present value where it is below what is wanted, else None."""
    value = read(setting.name)
    if value is None or not value.lstrip("-").isdigit():
        return None
    number = int(value)
    return None if number >= setting.least or number == setting.unlimited else value

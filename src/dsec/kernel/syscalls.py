"""Linux system calls that Python has no function for, one thin wrapper each.

Invariants: a wrapper makes one call and either returns its result or raises `KernelError` (an OSError) that says what
was tried and, where an errno has a usual reason, that reason. Nothing here keeps state or knows about sandboxes. Only
`ctypes` is imported, so that the module is cheap on the hot path. The numbers of the calls made by number are the
same on every architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

_OPEN_TREE = 428
_PIDFD_GETFD = 438
_MOVE_MOUNT = 429
_FSOPEN = 430
_FSCONFIG = 431
_FSMOUNT = 432
_MOUNT_SETATTR = 442

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_VM = 0x00000100

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x4
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FALLOC_FL_KEEP_SIZE = 1
_SYNC_FILE_RANGE_WRITE = 2
FALLOC_FL_PUNCH_HOLE = 2
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36
PR_SCHED_CORE = 62
PR_SCHED_CORE_GET = 0

_ROOT = "this needs root with CAP_SYS_ADMIN in the host's user namespace"


class KernelError(OSError):
    """A system call failed. `strerror` holds what was tried, the kernel's word for it and the likely cause."""

    def __init__(self, number: int, call: str, hints: Mapping[int, str] | None = None) -> None:
        text = f"{call}: {os.strerror(number)}"
        hint = (hints or {}).get(number) or (_ROOT if number == errno.EPERM else None)
        super().__init__(number, f"{text} ({hint})" if hint else text)


def _check(result: int, call: str, hints: Mapping[int, str] | None = None) -> int:
    if result < 0:
        raise KernelError(ctypes.get_errno(), call, hints)
    return result


def _check_context(result: int, fd: int, call: str) -> None:
    """As `_check` for a file system context, which says itself what was wrong when it is read."""
    if result < 0:
        number = ctypes.get_errno()
        try:
            why = {number: os.read(fd, 1024).decode(errors="replace").strip()}
        except OSError:
            why = {}
        raise KernelError(number, call, why)


def _bytes(value: str | os.PathLike[str] | bytes | None) -> bytes | None:
    return None if value is None else os.fsencode(value)


def mount(
    source: str | os.PathLike[str] | None,
    target: str | os.PathLike[str],
    fstype: str | None = None,
    flags: int = 0,
    data: str | None = None,
) -> None:
    """mount(2)."""
    _check(
        _libc.mount(_bytes(source), _bytes(target), _bytes(fstype), ctypes.c_ulong(flags), _bytes(data)),
        f"mount {fstype or 'bind'} {source} on {target}" + (f" with {data}" if data else ""),
        {
            errno.ENODEV: f"this kernel has no {fstype}",
            errno.ENOENT: "the source or the mount point is missing",
            errno.ENOTBLK: f"this kernel mounts {fstype} from block devices only: attach a loop device",
            errno.EINVAL: "not a valid image, or an option that this kernel doesn't know",
            errno.EBUSY: "the source is in use by another mount",
            errno.ENOSPC: "fs.mount-max is reached in this mount namespace",
        },
    )


def umount(target: str | os.PathLike[str], flags: int = 0) -> None:
    """umount2(2)."""
    _check(
        _libc.umount2(_bytes(target), flags),
        f"umount {target}",
        {
            errno.EBUSY: "something in it is open or mounted; see /proc/*/mountinfo and lsof",
            errno.EINVAL: "not a mount point",
        },
    )


def fsopen(fstype: str) -> int:
    """A descriptor for a new file system context."""
    return _check(
        _syscall(_FSOPEN, fstype.encode(), FSOPEN_CLOEXEC),
        f"fsopen {fstype}",
        {errno.ENODEV: f"this kernel has no {fstype}", errno.ENOSYS: "needs Linux 5.2 or newer"},
    )


def fsconfig_string(fd: int, key: str, value: str | os.PathLike[str]) -> None:
    """Set a `key=value` option of a context."""
    call = f"fsconfig {key}={value}"
    _check_context(_syscall(_FSCONFIG, fd, FSCONFIG_SET_STRING, key.encode(), _bytes(value), 0), fd, call)


def fsconfig_flag(fd: int, key: str) -> None:
    """Set an option without a value."""
    _check_context(_syscall(_FSCONFIG, fd, FSCONFIG_SET_FLAG, key.encode(), None, 0), fd, f"fsconfig {key}")


def fsconfig_create(fd: int) -> None:
    """Make the superblock that the context describes."""
    _check_context(_syscall(_FSCONFIG, fd, FSCONFIG_CMD_CREATE, None, None, 0), fd, "fsconfig create")


def fsmount(fd: int, attributes: int = 0) -> int:
    """A detached mount of a created context, as a descriptor."""
    return _check(_syscall(_FSMOUNT, fd, FSMOUNT_CLOEXEC, attributes), "fsmount")


def open_tree(
    path: str | os.PathLike[str], *, clone: bool = False, recursive: bool = False, dirfd: int = AT_FDCWD
) -> int:
    """A descriptor for the mount at `path`; with `clone` for a detached copy of it."""
    flags = OPEN_TREE_CLOEXEC | (OPEN_TREE_CLONE if clone else 0) | (AT_RECURSIVE if recursive else 0)
    return _check(
        _syscall(_OPEN_TREE, dirfd, _bytes(path), flags),
        f"open_tree {path}",
        {errno.ENOSYS: "needs Linux 5.2 or newer", errno.EINVAL: "an unbindable or foreign mount"},
    )


def move_mount(from_fd: int, target: str | os.PathLike[str], to_dirfd: int = AT_FDCWD) -> None:
    """Attach a detached mount (a descriptor of `fsmount` or `open_tree`) at `target`."""
    _check(
        _syscall(_MOVE_MOUNT, from_fd, b"", to_dirfd, _bytes(target), MOVE_MOUNT_F_EMPTY_PATH),
        f"move_mount to {target}",
        {
            errno.ENOENT: "the mount point is missing",
            errno.EINVAL: "the mount is attached already, or the target is no directory",
        },
    )


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def mount_setattr(
    mount_fd: int, attr_set: int = 0, *, attr_clr: int = 0, userns_fd: int = -1, recursive: bool = False
) -> None:
    """Change attributes of the mount behind a descriptor; with MOUNT_ATTR_IDMAP the id map of `userns_fd` is put on
    it."""
    attr = _MountAttr(attr_set, attr_clr, 0, userns_fd if userns_fd >= 0 else 0)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _check(
        _syscall(_MOUNT_SETATTR, mount_fd, b"", flags, ctypes.byref(attr), ctypes.sizeof(attr)),
        f"mount_setattr {attr_set:#x}",
        {
            errno.EINVAL: "this file system takes no id map on this kernel, or it is mapped already",
            errno.ENOSYS: "needs Linux 5.12 or newer",
        },
    )


def setns(fd: int, nstype: int = 0) -> None:
    """Enter the namespace behind `fd` (this thread)."""
    _check(
        _libc.setns(fd, nstype),
        f"setns {nstype:#x}",
        {errno.EINVAL: "not such a namespace, or this process has threads (user and mount namespaces refuse that)"},
    )


def unshare(flags: int) -> None:
    """Move this thread into new namespaces."""
    _check(
        _libc.unshare(flags),
        f"unshare {flags:#x}",
        {
            errno.EPERM: "needs CAP_SYS_ADMIN, or for a user namespace kernel.unprivileged_userns_clone=1",
            errno.ENOSPC: "a limit in /proc/sys/user is reached",
            errno.EINVAL: "the kernel lacks it, or a process with threads asked for a user namespace",
            errno.EUSERS: "namespaces are nested too deep",
        },
    )


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """prctl(2)."""
    args = [ctypes.c_ulong(arg) for arg in (arg2, arg3, arg4, arg5)]
    return _check(_libc.prctl(option, *args), f"prctl {option}", {errno.EINVAL: "this kernel doesn't have it"})


def pidfd_open(pid: int) -> int:
    """A descriptor for a process: it can't come to mean another one."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise KernelError(error.errno or 0, f"pidfd_open {pid}", {errno.EINVAL: "no thread group leader"}) from None


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A descriptor of ours for what is another process's `fd`."""
    return _check(_syscall(_PIDFD_GETFD, pidfd, fd, 0), "pidfd_getfd")


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Have the kernel begin to write a range of a file to its disk, without waiting for it; a hint: never fails."""
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the disk space of a range of a file back; it reads as zeros from then on."""
    _check(
        _libc.fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(size)),
        "fallocate punch hole",
        {errno.EOPNOTSUPP: "this file system can't punch holes"},
    )

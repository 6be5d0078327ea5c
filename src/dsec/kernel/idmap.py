"""User namespaces that exist only as an id map: a descriptor for `mount_setattr`.

The namespace is made by a child that runs nothing but pause(2) for the few microseconds in which its maps are
written: no interpreter is forked, so that this is safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from pathlib import Path

from dsec.kernel.mounts import IdmappedClone
from dsec.kernel.syscalls import CLONE_NEWUSER, CLONE_VM, KernelError

_libc = ctypes.CDLL(None, use_errno=True)
_STACK = 64 << 10


def make_userns(base: int, count: int) -> int:
    """A descriptor of a user namespace where 0..count-1 are base..base+count-1 outside, for users and groups.

    The caller closes it; mounts that use the map keep it alive. Raises KernelError, mostly where user namespaces are
    off.
    """
    stack = mmap.mmap(-1, _STACK)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + _STACK
    pause = ctypes.cast(_libc.pause, ctypes.c_void_p)
    # The child shares our memory (no copy of page tables): no handler of ours may run in it.
    old = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = _libc.clone(pause, ctypes.c_void_p(top), CLONE_NEWUSER | CLONE_VM | signal.SIGCHLD, None)
        number = ctypes.get_errno()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    if pid < 0:
        hint = "see user.max_user_namespaces and kernel.unprivileged_userns_clone"
        raise KernelError(number, "clone into a user namespace", {1: hint, 28: hint, 87: hint})
    try:
        line = f"0 {base} {count}\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(line)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def place_clone(source: Path, target: Path, base: int, count: int) -> None:
    """Mount at `target` (a directory that exists) the tree at `source` with its owners shifted by `base`."""
    fd = make_userns(base, count)
    try:
        IdmappedClone(source, target, fd).mount()
    finally:
        os.close(fd)

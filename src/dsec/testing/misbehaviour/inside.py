"""Runs inside a sandbox, as its `python3 -`, on nothing but the standard library: makes attempts one by one, each in a
process of its own, and says what came of them. Never imported by the server: `dsec.testing.misbehaviour.arena` sends
its text in, followed by a call of `main`.

Each attempt is Python text that sets `seen`: the name of an errno, `allowed`, or words. What the sandbox says of
itself is not believed where it matters: cases look from outside too.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

TIMEOUT_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)
_ARM = os.uname().machine == "aarch64"
# name: (x86-64, aarch64). Calls since Linux 5.1 have one number everywhere.
NUMBERS = {
    "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "swapon": (167, 224),
    "reboot": (169, 142), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "quotactl": (179, 60), "kexec_load": (246, 104), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "bpf": (321, 280), "userfaultfd": (323, 282), "memfd_create": (319, 279),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "acct": (163, 89), "syslog": (103, 116), "personality": (135, 92), "sched_setscheduler": (144, 119),
    "mknodat": (259, 33), "iopl": (172, -1), "seccomp": (317, 277), "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18), "kcmp": (312, 272), "sethostname": (170, 161), "mq_open": (240, 180),
    "shmget": (29, 194), "inotify_init1": (294, 26), "clone": (56, 220), "ioctl": (16, 29), "migrate_pages": (256, 238),
    "io_uring_setup": (425, 425), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "clone3": (435, 435),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "process_madvise": (440, 440), "quotactl_fd": (443, 443), "process_mrelease": (448, 448),
    "memfd_secret": (447, 447),
}  # fmt: skip


def call(name: str, *args: Any) -> str:
    """One system call: `allowed`, or the name of its errno."""
    number = NUMBERS[name][_ARM]
    if number < 0:
        return "ENOSYS"
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else a if a is None else ctypes.c_long(a) for a in args]
    return "allowed" if _libc.syscall(ctypes.c_long(number), *words) >= 0 else errno.errorcode[ctypes.get_errno()]


def attempt(function: Any, *args: Any) -> str:
    """A call of Python's: `allowed`, or the name of its errno."""
    try:
        function(*args)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    return "allowed"


def read(path: str, size: int = 4096) -> str:
    """Reading a file: `empty`, `allowed`, or the name of an errno."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return "allowed" if os.read(fd, size) else "empty"
        finally:
            os.close(fd)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def write(path: str, data: bytes) -> str:
    """Writing to a file that is there."""
    try:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "allowed"


def ioctl(request: int, path: str = "/tmp/ioctl") -> str:
    """An ioctl on a file of one's own, with room for its argument."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return call("ioctl", fd, request, bytes(4096))
    finally:
        os.close(fd)


def connect(host: str, port: int, timeout_s: float = 2.0) -> str:
    """A TCP connection."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except socket.gaierror:
        return "no such name"
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    return "allowed"


def run(*argv: str, timeout_s: float = 15.0) -> str:
    """A program: its exit code, or why it didn't start."""
    try:
        return str(subprocess.run(argv, capture_output=True, timeout=timeout_s, check=False).returncode)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except subprocess.TimeoutExpired:
        return "timeout"


def _one(code: str) -> str:
    """Make one attempt in a child, which may hang or die of it."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        os.setsid()
        space: dict[str, Any] = dict(globals())
        try:
            exec(code, space)
            seen = str(space.get("seen"))
        except BaseException as error:  # noqa: BLE001  whatever an attempt ends by is its result
            seen = f"{type(error).__name__}: {error}"
        os.write(into, seen.encode(errors="replace")[:2000])
        os._exit(0)
    os.close(into)
    said = b""
    deadline = time.monotonic() + TIMEOUT_S
    while select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(out, 4096)
        if not data:
            break
        said += data
    os.close(out)
    late = not said and time.monotonic() >= deadline
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if said:
        return said.decode(errors="replace")
    return "timeout" if late else f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "nothing"


def main(attempts: str) -> None:
    """`attempts`: a JSON object, name to code. Writes a line `{"name", "seen"}` for each."""
    for name, code in json.loads(attempts).items():
        sys.stdout.write(json.dumps({"name": name, "seen": _one(code)}) + "\n")
        sys.stdout.flush()


_USED_BY_ATTEMPTS = (struct,)

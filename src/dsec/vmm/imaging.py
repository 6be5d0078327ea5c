"""qemu-img in a jail: what somebody's disk image is read with.

Run as a program: `python -m dsec.vmm.imaging UID SOURCE TARGET MOST_BYTES`, with descriptors. It becomes `qemu-img
convert` as a user of its own without capabilities, in namespaces of its own (no network), with qemu-img and its
libraries as all of the file system, under the launcher's seccomp filter, with limits for CPU time, memory and what it
may write. What the image makes it do ends there.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from dsec.errors import InvalidRequest, Unavailable, Unsupported
from dsec.vmm.launcher import calls
from dsec.vmm.launcher.jail import FAILED, make_root
from dsec.vmm.launcher.seccomp import load_filter

UID_BASE = (1 << 30) + (1 << 21)
"""Beyond those of machines."""
UIDS = 1 << 16
CPU_S = 600
MEMORY_BYTES = 2 << 30
WALL_S = 1800


def convert(source: int, target: int, most_bytes: int) -> None:
    """Write what a qcow2 image holds to an empty file. Both become the jail's user's. Blocks. Raises `Unsupported`
    without qemu-img, `InvalidRequest` with its last words where the image is damaged, `Unavailable`."""
    if shutil.which("qemu-img") is None:
        raise Unsupported("qemu-img is missing", remedy="apt-get install --no-install-recommends qemu-utils")
    uid = UID_BASE + secrets.randbelow(UIDS)
    for fd in (source, target):
        os.fchown(fd, uid, uid)
    command = [sys.executable, "-m", "dsec.vmm.imaging", *map(str, (uid, source, target, most_bytes))]
    try:
        done = subprocess.run(
            command,
            pass_fds=(source, target),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequest(f"the image could not be read within {WALL_S} s") from None
    said = done.stderr.decode(errors="replace").strip()[-500:]
    if done.returncode == FAILED:
        raise Unavailable(f"qemu-img's jail can't be made: {said}", remedy="`dsec doctor` lists what the host lacks.")
    if done.returncode:
        raise InvalidRequest(f"the image can't be read: {said or f'qemu-img ended with {done.returncode}'}")


def _paths() -> list[str]:
    libraries = [path for path in map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")) if path.is_dir()]
    program = Path(str(shutil.which("qemu-img"))).resolve()
    return [str(program), *(str(path) for path in libraries if not path.is_symlink())]


def main() -> None:
    uid, source, target, most_bytes = map(int, sys.argv[1:])
    try:
        paths = _paths()
        calls.unshare(calls.NEWNET | calls.NEWIPC | calls.NEWUTS | calls.NEWCGROUP | calls.NEWPID)
        pid = os.fork()  # into the new pid namespace
        if pid:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        calls.prctl(calls.PR_SET_PDEATHSIG, 9)
        make_root(paths)
        calls.mount("proc", "/proc", "proc", calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC)
        load_filter()
        limits = {"CPU": CPU_S, "AS": MEMORY_BYTES, "FSIZE": most_bytes, "CORE": 0, "NOFILE": 64, "NPROC": 64}
        for name, most in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1)
        names = [f"/proc/self/fd/{fd}" for fd in (source, target)]
        os.execve(paths[0], [paths[0], "convert", "-f", "qcow2", "-O", "raw", *names], {})
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(FAILED)


if __name__ == "__main__":
    main()

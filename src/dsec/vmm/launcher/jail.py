"""What a VMM lives in: a user of its own without capabilities, namespaces of its own (pid, mount, network, ipc, uts,
cgroup), and a root that holds its program, that one's libraries and nothing else, read-only. What it may use beyond
that it is handed as open descriptors.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
from typing import Any

from dsec.vmm.launcher import UID_BASE, UIDS
from dsec.vmm.launcher.calls import (
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWUSER,
    NEWUTS,
    PR_CAPBSET_DROP,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    check,
    libc,
    mount,
    prctl,
    unshare,
)

STEM_UID = UID_BASE + UIDS
STEM_CAPABILITIES = (6, 7, 21)
"""SETGID, SETUID, SYS_ADMIN: of stems, in the user namespace that they share, to make namespaces for branches."""
FAILED = 71
"""The exit code of a child that could not become its program."""


def make_root(paths: list[str], *, sockets: bool = False) -> None:
    """This process's root from now on: `paths` of the host, read-only, a few devices, nothing else of the host's."""
    unshare(NEWNS)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    top = "/mnt"
    mount("dsec", top, "tmpfs", MS_NOSUID, "size=64k,mode=0755")
    for name in ("proc", "dev", "old"):
        os.mkdir(f"{top}/{name}", 0o755)
    for name in ("kvm", "userfaultfd")[: 1 + sockets]:  # nodes of their own: the host's may be for a group alone
        if os.path.exists(f"/dev/{name}"):
            os.mknod(f"{top}/dev/{name}", stat.S_IFCHR, os.stat(f"/dev/{name}").st_rdev)
            os.chmod(f"{top}/dev/{name}", 0o666)
    for name in ("null", "zero", "urandom"):
        if os.path.exists(f"/dev/{name}"):
            os.close(os.open(f"{top}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            mount(f"/dev/{name}", f"{top}/dev/{name}", None, MS_BIND)
    for link in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{link}"):
            os.symlink(os.readlink(f"/{link}"), f"{top}/{link}")
    for path in paths:
        target = top + path
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(path):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(path, target, None, MS_BIND)
        mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(top)
    check(libc.syscall(155, b".", b"old"), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "leave the host's root")
    os.rmdir("/old")
    mount(None, "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID, "size=64k,mode=0755")


def make_users() -> int:
    """A user namespace for stems: a descriptor of it, or -1 on a host that has none. Root in it is STEM_UID, its other
    users are those of VMMs."""
    (wait, go_on), (made, say) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(go_on)
        if libc.unshare(NEWUSER) == 0:
            os.write(say, b"1")
            os.read(wait, 1)
        os._exit(0)
    os.close(say)
    try:
        if not os.read(made, 1):
            return -1
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {STEM_UID} 1\n1 {UID_BASE} {UIDS}\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (wait, go_on, made):
            os.close(fd)
        os.waitpid(pid, 0)


def start(request: dict[str, Any], fds: list[int], said: int, failed: int, stem: tuple[int, int] | None) -> None:
    """The child: become the VMM. `stem`: its end of a socket, and the user namespace."""
    signal.set_wakeup_fd(-1)
    for each in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
    for group in fds[: request["cgroups"]]:
        os.write(group, b"0")
    os.setsid()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(request.get("oom_score_adj", 0)))
    unshare(NEWNS | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=invisible" if stem else None)
    passed, uid = fds[request["cgroups"] :], request["uid"]
    environment = {"LD_PRELOAD": f"/proc/self/fd/{2 + len(passed)}"} if request.get("library") else {}
    if stem:
        check(libc.setns(stem[1], NEWUSER), "enter the user namespace of stems")
        environment["DSEC_STEM"] = str(3 + len(passed))
        passed, uid = [*passed, stem[0]], 0
    first = 3 + len(passed)
    low = [
        os.dup2(fd, at, inheritable=False)
        for at, fd in enumerate([*passed, said, failed], max(first, *fds, *passed, said, failed) + 1)
    ]
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(low[-2], 1)
    os.dup2(low[-2], 2)
    for number, fd in enumerate(low[:-2], 3):
        os.dup2(fd, number)
    report = os.dup2(low[-1], first, inheritable=False)
    check(libc.syscall(436, ctypes.c_uint(first + 1), ctypes.c_uint(0xFFFFFFFF), 0), "close_range")
    try:
        for limit, most in (("NOFILE", request["nofile"]), ("FSIZE", request["fsize"]), ("CORE", 0), ("MEMLOCK", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        for capability in set(range(64)) - set(STEM_CAPABILITIES) if stem else ():
            libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # some are of newer kernels
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execve(request["argv"][0], request["argv"], environment)
    except BaseException as error:  # noqa: BLE001  as in `spawn`
        os.write(report, str(error).encode()[:1000] or b"?")
        os._exit(FAILED)

"""The launcher: the process that starts virtual machine monitors (VMMs), and outlives the server.

Run as a program by its path, without the rest of dsec: `launcher.py SOCKET [--sockets] PROGRAM [DIRECTORY...]`. It
listens on SOCKET (SOCK_SEQPACKET; the last connection is the one that counts), goes to the background when it does, and
ends by `shutdown`. Messages are JSON objects, descriptors travel beside them.

    hello                        -> {"epoch", "version", "live": {id: pid}, "ended": {id: end}, "held": [key...]}
    spawn id argv uid cgroups fds nofile fsize  + descriptors -> {"pid"} or {"error"}
        The first `cgroups` descriptors are cgroup.procs files to enter, the others become 3, 4, ... of the VMM.
        With `library` it loads the last descriptor (native/stem/stem.c); with `stem`, too, it becomes one.
    branch id stem uid cgroups files sockets + descriptors -> the same, of a copy of the stem of that id
        `files`: device and inode of each of the stem's that is replaced; `sockets`: how many. The descriptors are
        stem.c's, without its output. With `also` it is a stem, too.
    forget id                              -> {}            its end was heard
    hold key + descriptors, take key, drop key   what must outlive the server: the memory and state of templates
    shutdown                               -> {}            all VMMs are killed
    and unasked: {"exited": id, "status": wait status, "said": its last words}

A VMM runs as a user of its own with no capability, in namespaces of its own (pid, mount, network, ipc, uts, cgroup),
its root a tree that holds PROGRAM, its libraries and nothing else, read-only. What it may use beyond that it is handed
as open descriptors. It dies with the launcher. One seccomp filter is loaded here, before anything is started, and
inherited by all: never a BPF program for each (the kernel frees them through one work queue, and has wedged over
thousands at once). What the filter leaves that only root may do, set-up needs here; a VMM lacks the capabilities.
`--sockets`: VMMs may make unix sockets, and serve page faults of their own (`userfaultfd`).
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
from typing import Any

VERSION = 4
UID_BASE = 1 << 30
"""VMMs run as users of their own from here on, far from those of containers."""
UIDS = 1 << 20
STEM_UID = UID_BASE + UIDS
STEM_CAPABILITIES = (6, 7, 21)
"""SETGID, SETUID, SYS_ADMIN: of stems, in the user namespace that they share, to make namespaces for branches."""
STEM_FILES = 4  # stem.c's MOST_FILES
STEM_ANSWER_S = 10.0
MAX_MESSAGE = 128 << 10
MAX_FDS = 250
SAID = 4000
FAILED = 71
"""The exit code of a child that could not become its program."""

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 15, 22, 24, 38

# --- the seccomp filter ---------------------------------------------------------------------------------------------

ALLOWED = (
    # files and memory
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 17, 18,
    19, 20, 21, 25, 26, 27, 28, 32, 33, 72, 73, 74, 75, 77, 78, 79,
    80, 89, 137, 138, 217, 221, 257, 262, 267, 269, 277,
    285, 292, 293, 295, 296, 319, 326, 327, 328, 332, 436, 439,
    # signals, time, waiting
    13, 14, 15, 22, 23, 24, 34, 35, 36, 37, 38, 62, 96,
    127, 128, 130, 131, 200, 202, 222, 223, 224, 225, 226, 228, 229,
    230, 232, 233, 234, 240, 270, 271, 281, 282, 283, 284, 286, 287, 289, 290, 291, 324, 449,
    # sockets that are there
    43, 44, 45, 46, 47, 48, 50, 51, 52, 53, 54, 55, 288, 299, 307,
    # processes and threads
    39, 56, 57, 58, 59, 60, 61, 63, 95, 97, 98, 99, 100,
    102, 104, 107, 108, 110, 111, 112, 115, 118, 120, 121, 124, 143,
    144, 145, 146, 147, 157, 158, 160, 186, 203, 204, 218, 219, 231, 247, 273, 274, 302, 309, 318, 334,
    # of set-up alone: without capabilities they do nothing
    116, 117, 119, 161, 165, 166, 272, 308,
)  # fmt: skip
"""Numbers of x86-64's system calls."""
ALLOWED_SOCKETS = (42, 49, 87, 323)
"""connect, bind, unlink, userfaultfd: with `--sockets`."""

_ARCH = 0xC000003E
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_SOCKET, _CLONE, _UNSHARE, _PRCTL, _SETSOCKOPT, _CLONE3 = 41, 56, 272, 157, 54, 435
_AF_UNIX = 1
_EPERM, _ENOSYS = 1, 38


def filter_program(*, sockets: bool = False) -> list[tuple[int, int, int, int]]:
    """The filter: (code, jump if true, jump if false, operand) each. `sockets`: as `--sockets`."""
    load, equal, is_set, answer = 0x20, 0x15, 0x45, 0x06

    def argument(number: int) -> tuple[int, int, int, int]:
        return (load, 0, 0, 16 + 8 * number)

    program = [(load, 0, 0, 4), (equal, 1, 0, _ARCH), (answer, 0, 0, _KILL), (load, 0, 0, 0)]
    for number in (_CLONE, _UNSHARE):  # no user namespace, which would give capabilities
        program += [(equal, 0, 4, number), argument(0), (is_set, 0, 1, NEWUSER), (answer, 0, 0, _ERRNO | _EPERM)]
        program += [(answer, 0, 0, _ALLOW)]
    program += [(equal, 0, 4, _PRCTL), argument(0), (equal, 0, 1, PR_SET_SECCOMP), (answer, 0, 0, _ERRNO | _EPERM)]
    program += [(answer, 0, 0, _ALLOW)]
    options = (26, 50, 51, 52)  # SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF
    program += [(equal, 0, 2 + len(options) * 2, _SETSOCKOPT), argument(2)]
    for option in options:
        program += [(equal, 0, 1, option), (answer, 0, 0, _ERRNO | _EPERM)]
    program += [(answer, 0, 0, _ALLOW)]
    program += [(equal, 0, 1, _CLONE3), (answer, 0, 0, _ERRNO | _ENOSYS)]  # its flags can't be seen: use clone
    if sockets:
        program += [(equal, 0, 4, _SOCKET), argument(0), (equal, 1, 0, _AF_UNIX), (answer, 0, 0, _ERRNO | _EPERM)]
        program += [(answer, 0, 0, _ALLOW)]
    for number in sorted(set(ALLOWED + (ALLOWED_SOCKETS if sockets else ())) - {_CLONE, _UNSHARE, _PRCTL, _SETSOCKOPT}):
        program += [(equal, 0, 1, number), (answer, 0, 0, _ALLOW)]
    return [*program, (answer, 0, 0, _ERRNO | _EPERM)]


def load_filter(*, sockets: bool = False) -> None:
    program = filter_program(sockets=sockets)
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
    header = struct.pack("<H6xQ", len(program), ctypes.addressof(code))
    _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0), "load the seccomp filter")


# --- system calls -----------------------------------------------------------------------------------------------------


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    done = _libc.mount(encoded(source), encoded(target), encoded(kind), ctypes.c_ulong(flags), encoded(data))
    _check(done, f"mount {kind or source} on {target}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


# --- the root of a VMM ------------------------------------------------------------------------------------------------


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
    _check(_libc.syscall(155, b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", MNT_DETACH), "leave the host's root")
    os.rmdir("/old")
    mount(None, "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID, "size=64k,mode=0755")


def make_users() -> int:
    """A user namespace for stems: a descriptor of it, or -1 on a host that has none. Root in it is STEM_UID, its other
    users are those of VMMs."""
    (wait, go_on), (made, say) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(go_on)
        if _libc.unshare(NEWUSER) == 0:
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


# --- VMMs -------------------------------------------------------------------------------------------------------------


class Launcher:
    """What runs, what ended, and what is held."""

    def __init__(self, listening: socket.socket, users: int) -> None:
        """`users`: of `make_users`."""
        self.listening = listening
        self.users = users
        self.stems: dict[str, socket.socket] = {}
        self.client: socket.socket | None = None
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.live: dict[str, int] = {}
        self.said: dict[str, int] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.held: dict[str, list[int]] = {}
        self.epoch = 0
        while not self.epoch:
            self.epoch = int.from_bytes(os.urandom(3), "little")

    def serve(self) -> None:
        wake, note = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(note)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            wanted: list[Any] = [self.listening, wake, *([self.client] if self.client else [])]
            ready, _, _ = select.select(wanted, [], [])
            if wake in ready:
                os.read(wake, 4096)
                self.reap()
            if self.client in ready and not self.receive():
                return
            if self.listening in ready:
                if self.client:
                    self.client.close()
                self.client = self.listening.accept()[0]

    def receive(self) -> bool:
        """One request. False: it was to shut down."""
        assert self.client
        fds = array.array("i")
        try:
            data, ancillary, _, _ = self.client.recvmsg(
                MAX_MESSAGE, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data:
            self.client.close()
            self.client = None
            return True
        request = json.loads(data)
        try:
            answer, passed = self.answer(request, list(fds))
        except (OSError, ValueError, KeyError) as error:
            answer, passed = {"error": str(error)}, []
        self.say(answer | {"op": request.get("op", 0)}, passed)
        return bool(request["do"] != "shutdown")

    def say(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if self.client is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.client.sendmsg([json.dumps(message).encode()], rights)
        except OSError:
            self.client.close()
            self.client = None

    def answer(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        done: dict[str, Any] = {}
        passed: list[int] = []
        keep = False
        try:
            match request["do"]:
                case "hello":
                    done = {"epoch": self.epoch, "version": VERSION, "live": self.live}
                    done |= {"ended": self.ended, "held": list(self.held)}
                case "spawn":
                    done = {"pid": self.spawn(request, fds)}
                case "branch":
                    done = {"pid": self.branch(request, fds)}
                case "forget":
                    self.ended.pop(request["id"], None)
                case "hold":
                    self.drop(request["key"])
                    self.held[request["key"]], keep = fds, True
                case "take":
                    passed = self.held[request["key"]]
                case "drop":
                    self.drop(request["key"])
                case "shutdown":
                    self.end_all()
                case other:
                    raise ValueError(f"what is {other!r}?")
        finally:
            for fd in () if keep else fds:
                os.close(fd)
        return done, passed

    def drop(self, key: str) -> None:
        for fd in self.held.pop(key, ()):
            os.close(fd)

    def spawn(self, request: dict[str, Any], fds: list[int]) -> int:
        if request["id"] in self.live or request["id"] in self.ended:
            raise ValueError(f"{request['id']} is there already")
        report, failed = os.pipe2(os.O_CLOEXEC)
        words, said = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stem = bool(request.get("stem"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not stem:  # the first in a pid namespace can't have its parent's children
            unshare(NEWPID)
        pid = os.fork()
        if pid == 0:
            try:
                start(request, fds, said, failed, (theirs.fileno(), self.users) if stem else None)
            except BaseException as error:  # noqa: BLE001  whatever it is, the other side says it
                os.write(failed, str(error).encode()[:1000] or b"?")
            os._exit(FAILED)
        _check(_libc.setns(self.own_pids, NEWPID), "go back to the pid namespace")
        os.close(failed)
        os.close(said)
        wrong = os.read(report, 1000)
        os.close(report)
        theirs.close()
        if wrong:
            os.close(words)
            os.waitpid(pid, 0)
            raise OSError(wrong.decode(errors="replace"))
        self.live[request["id"]], self.said[request["id"]] = pid, words
        if stem:
            self.keep_stem(request["id"], ours)
        return pid

    def branch(self, request: dict[str, Any], fds: list[int]) -> int:
        if request["id"] in self.live or request["id"] in self.ended:
            raise ValueError(f"{request['id']} is there already")
        stem, groups = self.stems[request["stem"]], request["cgroups"]
        words, said = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        files = [*request["files"], *([[0, 0]] * STEM_FILES)][:STEM_FILES]
        also = bool(request.get("also"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        head = (request["uid"] - UID_BASE + 1, groups, len(request["files"]), request["sockets"], also, request["over"])
        message = struct.pack("=6I", *head) + b"".join(struct.pack("=QQ", *each) for each in files)
        passed = array.array("i", [*fds[:groups], said, *fds[groups:], *([theirs.fileno()] if also else ())])
        try:
            stem.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            answer = stem.recv(1000)
            pid = int.from_bytes(answer[:4], "little")
            if pid == 0:
                raise OSError(answer[4:].decode(errors="replace"))
            with open(f"/proc/{pid}/stat") as file:  # what it says of itself isn't taken for granted
                if int(file.read().rpartition(")")[2].split()[1]) != os.getpid() or pid in self.live.values():
                    raise OSError(f"{pid} is no branch")
        except OSError as error:
            os.close(words)
            os.kill(self.live[request["stem"]], signal.SIGKILL)
            raise OSError(f"a stem can't branch: {error}") from None
        finally:
            os.close(said)
            theirs.close()
        self.live[request["id"]], self.said[request["id"]] = pid, words
        if also:
            self.keep_stem(request["id"], ours)
        return pid

    def keep_stem(self, name: str, ours: socket.socket) -> None:
        ours.settimeout(STEM_ANSWER_S)
        self.stems[name] = ours

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = next((name for name, each in self.live.items() if each == pid), None)
            if name is None:
                continue
            del self.live[name]
            stem = self.stems.pop(name, None)
            if stem:
                stem.close()
            words = self.said.pop(name)
            try:
                text = os.read(words, 65536)[-SAID:].decode(errors="replace")
            except BlockingIOError:
                text = ""
            os.close(words)
            self.ended[name] = {"status": status, "said": text}
            self.say({"exited": name} | self.ended[name])

    def end_all(self) -> None:
        for pid in self.live.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self.live.values():
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
        _check(_libc.setns(stem[1], NEWUSER), "enter the user namespace of stems")
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
    _check(_libc.syscall(436, ctypes.c_uint(first + 1), ctypes.c_uint(0xFFFFFFFF), 0), "close_range")
    try:
        for limit, most in (("NOFILE", request["nofile"]), ("FSIZE", request["fsize"]), ("CORE", 0), ("MEMLOCK", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        for capability in set(range(64)) - set(STEM_CAPABILITIES) if stem else ():
            _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # some are of newer kernels
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execve(request["argv"][0], request["argv"], environment)
    except BaseException as error:  # noqa: BLE001  as in `spawn`
        os.write(report, str(error).encode()[:1000] or b"?")
        os._exit(FAILED)


def main() -> None:
    path, paths = sys.argv[1], sys.argv[2:]
    sockets = paths[0] == "--sockets"
    if sockets:
        del paths[0]
    os.umask(0o077)
    if os.path.exists(path):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(4)
    os.umask(0o022)
    make_root(paths, sockets=sockets)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    users = make_users()
    load_filter(sockets=sockets)
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    _check(_libc.prctl(PR_SET_NAME, b"dsec-launcher", 0, 0, 0), "prctl")
    Launcher(listening, users).serve()


if __name__ == "__main__":
    main()

"""The launcher itself: what runs, what ended, what is held, and one request after the other."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

from dsec.vmm.launcher import MAX_FDS, MAX_MESSAGE, UID_BASE, VERSION
from dsec.vmm.launcher.calls import (
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    NEWPID,
    PR_SET_NAME,
    check,
    libc,
    mount,
    unshare,
)
from dsec.vmm.launcher.jail import FAILED, make_root, make_users, start
from dsec.vmm.launcher.seccomp import load_filter

STEM_FILES = 4  # stem.c's MOST_FILES
STEM_ANSWER_S = 10.0
SAID = 4000
FIRST_S = 60.0
"""How long it waits for the first who connects."""


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
        first_s: float | None = FIRST_S
        while True:
            wanted: list[Any] = [self.listening, wake, *([self.client] if self.client else [])]
            ready, _, _ = select.select(wanted, [], [], first_s)
            if not ready:
                return  # who started it is gone, and nobody else knows of it
            first_s = None
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
                    done = {"pid": os.getpid(), "epoch": self.epoch, "version": VERSION, "live": self.live}
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
        check(libc.setns(self.own_pids, NEWPID), "go back to the pid namespace")
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


def main() -> None:
    """The program."""
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
    check(libc.prctl(PR_SET_NAME, b"dsec-launcher", 0, 0, 0), "prctl")
    Launcher(listening, users).serve()

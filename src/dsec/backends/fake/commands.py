"""The commands that the fake guest knows, each a coroutine over a `Process`, and a shell that understands a few words.

They behave as the Debian programs of the same name do in the cases that the conformance suite uses; anything else
is a missing binary.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
from collections.abc import Awaitable, Callable
from typing import Protocol

from dsec.backends.fake.files import Directory, File, FileSystem, Node, fail
from dsec.backends.fake.terminal import Terminal
from dsec.wire.entries import to_bytes, to_text

PATH = (b"/usr/local/bin", b"/usr/bin", b"/bin")
_CHUNK = 64 << 10


class Signaled(Exception):
    """The process ended itself by a signal."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Process(Protocol):
    """What a command sees of the guest."""

    fs: FileSystem
    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes
    uid: int
    gid: int
    pid: int
    hostname: bytes
    ports: set[int]
    terminal: Terminal | None

    async def out(self, data: bytes) -> None: ...
    async def err(self, data: bytes) -> None: ...
    async def stdin(self) -> bytes:
        """Some bytes, or b"" at the end."""
        ...


Command = Callable[[Process], Awaitable[int]]


async def _true(_: Process) -> int:
    return 0


async def _false(_: Process) -> int:
    return 1


async def _echo(process: Process) -> int:
    await process.out(b" ".join(process.argv[1:]) + b"\n")
    return 0


async def _printf(process: Process) -> int:
    """Octal escapes and newlines only."""
    text = re.sub(rb"\\([0-7]{1,3})", lambda match: bytes([int(match[1], 8) & 255]), process.argv[1])
    await process.out(text.replace(b"\\n", b"\n"))
    return 0


async def _cat(process: Process) -> int:
    status = 0
    for name in process.argv[1:] or [b"-"]:
        if name == b"-":
            while data := await process.stdin():
                await process.out(data)
            continue
        try:
            content = process.fs.open_for_reading(_absolute(process, name), process.uid, process.gid)
        except OSError as error:
            await process.err(b"cat: %s: %s\n" % (name, os.strerror(error.errno or 0).encode()))
            status = 1
        else:
            await process.out(content)
    return status


async def _sleep(process: Process) -> int:
    await asyncio.sleep(float(process.argv[1]))
    return 0


async def _yes(process: Process) -> int:
    while True:
        await process.out(b"y\n" * (_CHUNK // 2))
        await asyncio.sleep(0)


async def _env(process: Process) -> int:
    await process.out(b"".join(b"%s=%s\n" % item for item in process.env.items()))
    return 0


async def _pwd(process: Process) -> int:
    await process.out(process.cwd + b"\n")
    return 0


async def _id(process: Process) -> int:
    await process.out(b"%d\n" % (process.gid if b"-g" in process.argv else process.uid))
    return 0


async def _hostname(process: Process) -> int:
    await process.out(process.hostname + b"\n")
    return 0


async def _seq(process: Process) -> int:
    first, last = (int(word) for word in process.argv[1:3])
    for at in range(first, last + 1, 4096):
        await process.out(b"".join(b"%d\n" % n for n in range(at, min(at + 4096, last + 1))))
    return 0


async def _head(process: Process) -> int:
    """`head -c N /dev/zero` and `head -c N` of stdin."""
    left = int(process.argv[2])
    zeros = process.argv[3:] == [b"/dev/zero"]
    while left:
        data = bytes(min(left, _CHUNK)) if zeros else (await process.stdin())[:left]
        if not data:
            break
        await process.out(data)
        left -= len(data)
    return 0


async def _ln(process: Process) -> int:
    process.fs.symlink(process.argv[2], _absolute(process, process.argv[3]), process.uid, process.gid)
    return 0


async def _sh(process: Process) -> int:
    """`sh -c`: commands apart by `;` and `&&`, `$NAME`, `$$`, `>&2`, `exit N`, `kill -N $$`."""
    status = 0
    text = to_text(process.argv[2]).replace("&&", " && ").replace(";", " ; ")
    words: list[str] = []
    for word in [*shlex.split(text), ";"]:
        if word not in (";", "&&"):
            words.append(word)
            continue
        if words:
            status = await _simple(process, [_expand(process, w) for w in words])
        words = []
        if word == "&&" and status:
            break
    return status


def _expand(process: Process, word: str) -> bytes:
    raw = to_bytes(word).replace(b"$$", b"%d" % process.pid)
    return re.sub(rb"\$([A-Za-z_]\w*)", lambda match: process.env.get(match[1], b""), raw)


async def _simple(process: Process, words: list[bytes]) -> int:
    if words[0] == b"exit":
        raise SystemExit(int(words[1]))
    if words[0] == b"kill":
        raise Signaled(int(words[1].lstrip(b"-")))
    argv, process.argv = process.argv, [word for word in words if word != b">&2"]
    out = process.out
    if b">&2" in words:
        process.out = process.err  # type: ignore[method-assign]
    try:
        return await lookup(process)(process)
    except OSError as error:
        await process.err(b"sh: %s: %s\n" % (words[0], os.strerror(error.errno or 0).encode()))
        return 127
    finally:
        process.argv = argv
        process.out = out  # type: ignore[method-assign]


async def _stty(process: Process) -> int:
    """`stty size`."""
    if process.terminal is None:
        await process.err(b"stty: 'standard input': Inappropriate ioctl for device\n")
        return 1
    await process.out(b"%d %d\n" % (process.terminal.rows, process.terminal.cols))
    return 0


async def _python(process: Process) -> int:
    """An echo server on the port that is its last argument, whatever program it is given: the suite's own."""
    port = int(process.argv[-1])
    process.ports.add(port)
    try:
        await process.out(b"ready\n")
        await asyncio.Event().wait()
    finally:
        process.ports.discard(port)
    return 0


COMMANDS: dict[bytes, Command] = {
    b"true": _true,
    b"false": _false,
    b"echo": _echo,
    b"printf": _printf,
    b"cat": _cat,
    b"sleep": _sleep,
    b"yes": _yes,
    b"env": _env,
    b"pwd": _pwd,
    b"id": _id,
    b"hostname": _hostname,
    b"seq": _seq,
    b"head": _head,
    b"ln": _ln,
    b"stty": _stty,
    b"python3": _python,
    b"sh": _sh,
}


def _absolute(process: Process, name: bytes) -> bytes:
    return name if name.startswith(b"/") else process.cwd + b"/" + name


def lookup(process: Process) -> Command:
    """What argv[0] names. Raises OSError as execvpe would."""
    name = process.argv[0]
    places = [_absolute(process, name)] if b"/" in name else [directory + b"/" + name for directory in PATH]
    found = [node for node in (_at(process, place) for place in places) if node is not None]
    if not found:
        raise fail(errno.ENOENT)
    if isinstance(found[0], Directory) or not found[0].allows(process.uid, process.gid, 1):
        raise fail(errno.EACCES)
    command = COMMANDS.get(name.rpartition(b"/")[2])
    if command is None:
        raise fail(errno.ENOEXEC)
    return command


def _at(process: Process, path: bytes) -> Node | None:
    try:
        return process.fs.find(path, process.uid, process.gid)
    except OSError:
        return None


def base_system() -> FileSystem:
    """A fresh root file system with the commands, users and the usual directories."""
    fs = FileSystem()
    for path in (b"/usr/bin", b"/bin", b"/etc", b"/proc", b"/root", b"/home", b"/var", b"/dev"):
        fs.mkdir(path, 0o755, 0, 0, parents=True)
    fs.mkdir(b"/tmp", 0o1777, 0, 0)
    fs.find(b"/root").mode = 0o700
    for name in COMMANDS:
        for directory in (b"/usr/bin/", b"/bin/"):
            fs.write(directory + name, b"\x7fELF", 0o755, 0, 0)
    passwd = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
    fs.write(b"/etc/passwd", passwd, 0o644, 0, 0)
    fs.write(b"/etc/shadow", b"root:*:1::::::\n", 0o600, 0, 0)
    proc = fs.find(b"/proc")
    assert isinstance(proc, Directory)
    proc.entries[b"self"] = Directory()
    self_dir = proc.entries[b"self"]
    assert isinstance(self_dir, Directory)
    self_dir.entries[b"environ"] = File(0o400, refused=True)
    return fs

"""The server's side of the launcher: start it, connect, start VMMs, hear of their ends.

Owns one SOCK_SEQPACKET connection. A request that gets no answer before the connection ends fails. The messages are
those of `launcher/__init__.py`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dsec.errors import CreateFailed, Unavailable
from dsec.kernel import lasting
from dsec.vmm.launcher import MAX_FDS, MAX_MESSAGE, VERSION

_PROGRAM = Path(__file__).with_name("launcher")
_ANSWER_S = 30.0


class Ended(Struct, frozen=True):
    """How a VMM ended."""

    status: int
    """As wait(2) says."""
    said: str
    """Its last words."""


class LauncherState(Struct, frozen=True):
    """What a launcher says of itself."""

    epoch: int
    live: dict[str, int]
    """The host's numbers of VMMs."""
    ended: dict[str, Ended]
    held: frozenset[str]


async def start_launcher(path: Path, paths: Sequence[str], *, unit: str, sockets: bool = False) -> None:
    """Start a launcher that outlives this process; returns when it listens. `paths`: what its VMMs see of the host.
    `sockets`: whether they make sockets (`VmmDriver.listens`). Where systemd runs the host it gets a scope of its own.
    Raises `Unavailable` with what it said."""
    argv = [sys.executable, "-I", "-S", str(_PROGRAM), str(path), *(["--sockets"] if sockets else []), *paths]
    try:
        said = await lasting.start(argv, unit=unit, cwd="/", static=False)
    except OSError as error:
        raise Unavailable(f"the launcher of virtual machines cannot be started: {error}") from error
    if said:
        raise Unavailable(
            f"the launcher of virtual machines did not start: {said[-500:]}",
            remedy="`dsec doctor` lists what the host lacks.",
        )


class LauncherClient:
    """One connection to a launcher. A later one of anyone's ends it."""

    def __init__(self, *, on_exit: Callable[[str, Ended], None], on_lost: Callable[[], None]) -> None:
        """`on_exit(id, end)`; `on_lost()` when the connection ends without `close`."""
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._ops = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._pid = -1
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(self, path: Path) -> LauncherState:
        """Say hello and learn what runs. Raises `Unavailable` where no launcher of our version serves there; one of
        another version is ended, and all its VMMs: nobody could ever do it later."""
        self._loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise Unavailable(f"no launcher of virtual machines serves: {error}") from None
        self._socket = sock
        self._loop.add_reader(sock.fileno(), self._readable)
        try:
            found, _ = await self._ask("hello")
            if found.get("version") != VERSION:
                await self._ask("shutdown")
                raise Unavailable("the launcher of virtual machines is of another version")
        except BaseException:
            self.close()
            raise
        self._pid = found.get("pid", -1)  # older ones don't say it, and machines shall go on over an upgrade
        return LauncherState(
            found["epoch"],
            found["live"],
            {name: msgspec.convert(end, Ended) for name, end in found["ended"].items()},
            frozenset(found["held"]),
        )

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        *,
        groups: Sequence[int],
        fds: Sequence[int],
        uid: int,
        file_bytes: int,
        oom_score_adj: int,
        library: int | None = None,
        stem: bool = False,
    ) -> int:
        """Start a VMM: its pid. `groups`: cgroup.procs files. `file_bytes`: how large a file it may make. `library`:
        what it loads (native/stem). `stem`: it is to `branch`, by that. Raises `CreateFailed`, `Unavailable`."""
        if library is not None:
            fds = [*fds, library]
        if len(groups) + len(fds) > MAX_FDS:
            raise CreateFailed(f"a machine of {len(fds)} files; {MAX_FDS - len(groups)} are the most")
        answer, _ = await self._ask(
            "spawn",
            [*groups, *fds],
            id=name,
            argv=list(argv),
            cgroups=len(groups),
            uid=uid,
            nofile=1024,
            fsize=file_bytes,
            oom_score_adj=oom_score_adj,
            library=library is not None,
            stem=stem,
        )
        return _pid(answer)

    async def branch(
        self,
        name: str,
        stem: str,
        *,
        groups: Sequence[int],
        files: Sequence[tuple[os.stat_result, int]],
        sockets: Sequence[tuple[int, int]],
        uid: int,
        also: bool = False,
        layer: int = -1,
    ) -> int:
        """Have a VMM that was started for it copy itself: the copy's pid. `files`: the stem's, and what takes their
        places; `sockets`: pairs as in `launcher`; `also`: it is a stem, too; `layer`: as in `Machines.branch`.
        Raises `CreateFailed`, and the stem is ended; `Unavailable`."""
        over = [layer] if layer >= 0 else []
        answer, _ = await self._ask(
            "branch",
            [*groups, *(fd for _, fd in files), *over, *itertools.chain.from_iterable(sockets)],
            id=name,
            stem=stem,
            cgroups=len(groups),
            uid=uid,
            files=[(stat.st_dev, stat.st_ino) for stat, _ in files],
            sockets=len(sockets),
            also=also,
            over=len(over),
        )
        return _pid(answer)

    async def forget(self, name: str) -> None:
        """Its end is on record."""
        await self._ask("forget", id=name)

    async def hold(self, key: str, fds: Sequence[int]) -> None:
        """Keep descriptors beyond this process."""
        await self._ask("hold", fds, key=key)

    async def take(self, key: str) -> list[int]:
        """What is held, as descriptors of the caller's. Raises `Unavailable`."""
        answer, fds = await self._ask("take", key=key)
        if "error" in answer:
            raise Unavailable(f"the launcher doesn't hold {key}")
        return fds

    async def drop(self, key: str) -> None:
        """Hold it no more. Idempotent."""
        await self._ask("drop", key=key)

    async def shutdown(self) -> None:
        """End it and all its VMMs; it is gone then, and not about to be: what it holds takes a moment to go."""
        gone = -1
        try:
            with contextlib.suppress(OSError):
                gone = os.pidfd_open(self._pid)
            await self._ask("shutdown")
            self.close()
            if gone >= 0:
                poll = select.poll()
                poll.register(gone, select.POLLIN)
                await asyncio.to_thread(poll.poll, _ANSWER_S * 1000)
        finally:
            if gone >= 0:
                os.close(gone)

    def close(self) -> None:
        """Let go of it; it goes on. Idempotent."""
        sock, self._socket = self._socket, None
        if sock is None or self._loop is None:
            return
        self._loop.remove_reader(sock.fileno())
        sock.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("the launcher of virtual machines is gone"))
                waiting.exception()

    async def _ask(self, do: str, fds: Sequence[int] = (), **fields: Any) -> tuple[dict[str, Any], list[int]]:
        if self._socket is None or self._loop is None:
            raise Unavailable("the launcher of virtual machines is gone")
        number = next(self._ops)
        waiting = self._waiting[number] = self._loop.create_future()
        try:
            data = msgspec.json.encode({"do": do, "op": number, **fields})
            if fds:
                socket.send_fds(self._socket, [data], list(fds))
            else:
                self._socket.send(data)
            async with asyncio.timeout(_ANSWER_S):
                answer: tuple[dict[str, Any], list[int]] = await waiting
                return answer
        except OSError as error:
            raise Unavailable(f"the launcher of virtual machines can't be asked to {do}: {error}") from None
        except TimeoutError:
            raise Unavailable(f"the launcher of virtual machines doesn't answer {do}") from None
        finally:
            self._waiting.pop(number, None)

    def _readable(self) -> None:
        assert self._socket
        fds = array.array("i")
        data, ancillary = b"", list[tuple[int, int, bytes]]()
        with contextlib.suppress(OSError):
            data, ancillary, _, _ = self._socket.recvmsg(
                MAX_MESSAGE, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data:
            self.close()
            self._on_lost()
            return
        message = msgspec.json.decode(data, type=dict[str, Any])
        if "exited" in message:
            self._on_exit(message["exited"], Ended(message["status"], message["said"]))
            return
        waiting = self._waiting.get(message["op"])
        if waiting is not None and not waiting.done():
            waiting.set_result((message, list(fds)))
        else:
            for fd in fds:
                os.close(fd)


def _pid(answer: dict[str, Any]) -> int:
    if "error" in answer:
        raise CreateFailed(f"a virtual machine's monitor can't be started: {answer['error']}")
    return int(answer["pid"])

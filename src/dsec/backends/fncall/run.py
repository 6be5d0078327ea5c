"""One call in a lane: it gets what it shall do, and is watched until it answers, ends, or breaks a limit.

Invariants: whatever a worker does, `Run.done` resolves within its wall time and a little; nothing is read beyond the
limits of output and answer; the answer's bytes are the worker's, so the caller decodes them as hostile.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import signal
import socket
import struct
import termios
import time
from collections.abc import Sequence

from msgspec import Struct

from dsec.backends.fncall.lane import Lane
from dsec.errors import OutcomeUnknown
from dsec.kernel.cgroups import Shape
from dsec.spec.causes import Cause
from dsec.spec.functions import FunctionLimits

_UNWATCHED_S = 0.005
"""A call that is over by then is not looked at in between: its output fits into its pipes."""
_LEAST_LOOK_S = 0.02
_STATUS_S = 5.0
"""How long the wait status of a worker that closed its socket may take."""
_CHUNK = 1 << 18
_WORD = struct.Struct("<I")


class Ended(Struct, kw_only=True):
    """How a call ended."""

    cause: Cause
    exit_code: int = 0
    signal: int | None = None
    answer: bytes | None = None
    too_large: bool = False
    """The answer was longer than it may be."""
    start_error: int = 0
    """Of a plain worker that could not execute: an errno, and at what."""
    start_text: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int = 0


class Run:
    """A call that begins when it is made; await `done`, then `stop` in any case."""

    def __init__(
        self, lane: Lane, payload: bytes, limits: FunctionLimits, *, answers: bool, fds: Sequence[int] = ()
    ) -> None:
        """`answers`: it answers on its socket, else its end is the answer. `fds` go with the payload. Raises
        OSError."""
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Ended] = self._loop.create_future()
        self._lane = lane
        self._limits = limits
        self._answers = answers
        self._answer = bytearray()
        self._size = -1
        self._streams = (bytearray(), bytearray())
        self._room = limits.output_bytes
        self._truncated = False
        self._watched = False
        self._writing = False
        self._payload = memoryview(payload)
        lane.set_shape(Shape(limits.memory_bytes, limits.cpus, limits.pids))
        lane.on_ended = self._ended
        self._begun = time.monotonic()
        self._timer = self._loop.call_later(min(_UNWATCHED_S, limits.wall_s), self._look)
        if answers:
            self._loop.add_reader(lane.call, self._readable)
        self._write(fds)
        lane.meter.begin()  # while it wakes up

    def stop(self) -> None:
        """Let go of the lane. Idempotent."""
        self._timer.cancel()
        lane = self._lane
        if lane.on_ended is None:
            return
        lane.on_ended = None
        self._loop.remove_reader(lane.call)
        self._write_no_more()
        if self._watched:
            for fd in lane.outputs:
                self._loop.remove_reader(fd)
        if not self.done.done():
            self.done.cancel()

    # --- what comes and goes ---

    def _write(self, fds: Sequence[int] = ()) -> None:
        try:
            if fds:
                self._payload = self._payload[socket.send_fds(self._lane.call, [self._payload[:_CHUNK]], fds) :]
            while self._payload:
                self._payload = self._payload[self._lane.call.send(self._payload[:_CHUNK]) :]
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._lane.call, self._write)
            return
        except OSError:
            self._payload = memoryview(b"")  # it ended without reading: its end says the rest
        self._write_no_more()

    def _write_no_more(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._lane.call)

    def _readable(self) -> None:
        try:
            data = self._lane.call.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:  # it ended, or closed its descriptors: its wait status says which
            self._loop.remove_reader(self._lane.call)
            self._timer.cancel()
            left = self._limits.wall_s - self._wall_s()
            self._timer = self._loop.call_later(max(0.0, min(_STATUS_S, left)), self._silent)
            return
        self._answer += data
        if self._size < 0 and len(self._answer) >= _WORD.size:
            (self._size,) = _WORD.unpack_from(self._answer)
            if self._size > self._limits.result_bytes + (64 << 10):
                self._finish(Ended(cause=Cause.EXITED, too_large=True))
                return
        if self._size >= 0 and len(self._answer) >= self._size + _WORD.size:
            answer = bytes(self._answer[_WORD.size : self._size + _WORD.size])
            self._finish(Ended(cause=Cause.EXITED, answer=answer))

    def _silent(self) -> None:
        """It closed its socket and goes on."""
        over = self._wall_s() >= self._limits.wall_s
        self._finish(Ended(cause=Cause.COMMAND_TIMEOUT if over else Cause.KILLED))

    def _ended(self, status: int) -> None:
        if self.done.done():
            return
        if status == -1:
            self.done.set_exception(
                OutcomeUnknown("the function environment ended under the call", remedy="Try again.")
            )
            return
        if self._answers:  # what it said before it ended
            self._loop.remove_reader(self._lane.call)
            while not self.done.done():
                before = len(self._answer)
                self._readable()
                if len(self._answer) == before:
                    break
            if self.done.done():
                return
        ended = Ended(cause=Cause.EXITED)
        if os.WIFSIGNALED(status):
            ended.signal = os.WTERMSIG(status)
            ended.exit_code = 128 + ended.signal
            ended.cause = Cause.SIGNALED
            if ended.signal == signal.SIGXCPU or self._cpu_over():
                ended.cause = Cause.COMMAND_TIMEOUT
        else:
            ended.exit_code = os.WEXITSTATUS(status)
        if self._lane.meter.out_of_memory() and ended.exit_code:
            ended.cause = Cause.MEMORY_LIMIT
        if not self._answers and ended.exit_code == 126:
            self._start_failed(ended)
        self._finish(ended)

    def _start_failed(self, ended: Ended) -> None:
        try:
            said = self._lane.call.recv(4096)
        except OSError:
            return
        if len(said) > _WORD.size:
            ended.cause = Cause.START_FAILED
            (ended.start_error,) = _WORD.unpack_from(said)
            ended.start_text = said[_WORD.size :].decode(errors="replace")

    # --- watching ---

    def _wall_s(self) -> float:
        return time.monotonic() - self._begun

    def _cpu_over(self) -> bool:
        return self._lane.meter.cpu_s() > self._limits.cpu_s

    def _look(self) -> None:
        if not self._watched:
            self._watched = True
            for number, fd in enumerate(self._lane.outputs):
                self._loop.add_reader(fd, self._drain, number, fd)
        left = self._limits.wall_s - self._wall_s()
        cpu_left = self._limits.cpu_s - self._lane.meter.cpu_s()
        if left <= 0 or cpu_left <= 0:
            self._finish(Ended(cause=Cause.COMMAND_TIMEOUT))
            return
        wait = min(left, max(_LEAST_LOOK_S, cpu_left / max(1.0, self._limits.cpus)))
        self._timer = self._loop.call_later(wait, self._look)

    def _drain(self, number: int, fd: int, most: int = _CHUNK) -> int:
        """Read what is there, once; 0: nothing more for now, or too much."""
        try:
            data = os.read(fd, most)
        except OSError:
            return 0
        if not data:
            if self._watched:
                self._loop.remove_reader(fd)
            return 0
        room, self._room = self._room, max(0, self._room - len(data))
        self._streams[number].extend(data[:room])
        if len(data) > room and not self._truncated:
            self._truncated = True
            self._finish(Ended(cause=Cause.OUTPUT_LIMIT))
        return 0 if self._truncated else len(data)

    def _finish(self, ended: Ended) -> None:
        if self.done.done():
            return
        self.done.set_result(ended)  # before the rest: it may break the output's limit, too
        ended.wall_s = self._wall_s()
        ended.cpu_s = self._lane.meter.cpu_s()
        ended.memory_bytes = self._lane.meter.memory_bytes()
        for number, fd in enumerate(self._lane.outputs):
            left = _waiting(fd)  # now: what goes on writing doesn't keep us here
            while left > 0 and (size := self._drain(number, fd, min(left, _CHUNK))):
                left -= size
        if self._truncated:
            ended.truncated = True
            if ended.cause is Cause.EXITED and not ended.exit_code:  # also where it was too fast to be ended for it
                ended.cause, ended.answer = Cause.OUTPUT_LIMIT, None
        if ended.cause in (Cause.COMMAND_TIMEOUT, Cause.OUTPUT_LIMIT, Cause.KILLED) and not ended.exit_code:
            ended.exit_code, ended.signal = 128 + signal.SIGKILL, signal.SIGKILL
        ended.stdout, ended.stderr = bytes(self._streams[0]), bytes(self._streams[1])


def _waiting(fd: int) -> int:
    """Bytes in a pipe."""
    size = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, size)
    return size[0]

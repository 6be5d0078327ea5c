"""Programs in cells: what compilers, languages without a parent and the judge run by (`grading.running.Runner`)."""

from __future__ import annotations

import errno
import math
import os
import signal
import stat
from collections.abc import Mapping

from dsec.backends.fncall import messages
from dsec.backends.fncall.calling import calling
from dsec.backends.fncall.pool import Jails, Key
from dsec.backends.fncall.run import Ended
from dsec.errors import InvalidRequest
from dsec.grading.running import Job, Ran
from dsec.spec.causes import Cause
from dsec.spec.functions import FunctionLimits
from dsec.spec.judging import JudgeLimits
from dsec.spec.sandbox import ExecStatus

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CellRunner:
    """Runs each job in a fresh cell."""

    def __init__(self, jails: Jails) -> None:
        self._jails = jails

    async def run(self, job: Job, env: Mapping[str, str] | None = None) -> Ran:
        """See `Runner`. `env`: on top of what every program has."""
        limits = _limits(job.limits)
        key = self._jails.key(job.project, job.environment, None)
        call = messages.plain_call(job.argv, env=dict(key.env) | dict(env or {}), cpu_s=math.ceil(limits.cpu_s) + 1)
        if len(call) > 1 << 20:
            raise InvalidRequest("the command and its environment are more than 1 MiB")
        given = [_memfd(job.stdin)]
        try:
            if job.files:
                given.append(_memfd(messages.file_of_files(job.files)))
            ended, fetched = await self._run(key, call, limits, given, job)
        finally:
            for fd in given:
                os.close(fd)
        return Ran(status=_status(ended, job.limits), stdout=ended.stdout, stderr=ended.stderr, fetched=fetched)

    async def _run(
        self, key: Key, call: bytes, limits: FunctionLimits, given: list[int], job: Job
    ) -> tuple[Ended, dict[bytes, bytes]]:
        async with calling(self._jails, key, call, limits, answers=False, fds=given) as begun:
            ended = await begun.run.done
            if not job.fetch:
                return ended, {}
            top = await begun.jail.directory(begun.lane)
            try:
                return ended, _fetched(top, job)
            finally:
                os.close(top)


def _limits(limits: JudgeLimits) -> FunctionLimits:
    return FunctionLimits(
        wall_s=limits.wall_s,
        cpu_s=limits.cpu_s,
        memory_bytes=limits.memory_bytes,
        cpus=float(os.cpu_count() or 1),
        pids=limits.pids,
        output_bytes=limits.output_bytes,
    )


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("given", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        os.fchmod(fd, 0o444)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _message(ended: Ended, limits: JudgeLimits) -> str:
    if ended.start_error:
        return f"{ended.start_text}: {os.strerror(ended.start_error)}"
    if ended.cause is Cause.SIGNALED and ended.signal:
        return f"ended by {_signal_name(ended.signal)}"
    return {
        Cause.COMMAND_TIMEOUT: f"its cpu_s of {limits.cpu_s:g} s were used up"
        if ended.wall_s < limits.wall_s
        else f"its wall_s of {limits.wall_s:g} s passed",
        Cause.OUTPUT_LIMIT: f"it wrote more than its output_bytes of {limits.output_bytes} bytes",
        Cause.MEMORY_LIMIT: f"it ran into its memory limit of {limits.memory_bytes} bytes",
    }.get(ended.cause, "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _status(ended: Ended, limits: JudgeLimits) -> ExecStatus:
    code = ended.exit_code
    if ended.cause is Cause.START_FAILED:
        code = 127 if ended.start_error == errno.ENOENT else 126
    return ExecStatus(
        exit_code=code,
        cause=ended.cause,
        infra=ended.cause.infra,
        signal=ended.signal,
        message=_message(ended, limits),
        truncated=ended.truncated,
        stdout_bytes=len(ended.stdout),
        stderr_bytes=len(ended.stderr),
        cpu_s=ended.cpu_s,
        wall_s=ended.wall_s,
        max_rss_bytes=ended.memory_bytes,
    )


def _fetched(top: int, job: Job) -> dict[bytes, bytes]:
    """Files below a cell's /tmp, where anything may lie: no link is followed, only plain files are read."""
    found: dict[bytes, bytes] = {}
    room = job.fetch_bytes
    for path in job.fetch:
        parts = path.removeprefix(b"/tmp/").split(b"/")
        content = None if b".." in parts else _read(top, parts, room)
        if content is not None:
            found[path] = content
            room -= len(content)
    return found


def _read(top: int, parts: list[bytes], room: int) -> bytes | None:
    opened = []
    at = top
    try:
        for part in parts[:-1]:
            at = os.open(part, _DIRECTORY, dir_fd=at)
            opened.append(at)
        at = os.open(parts[-1], _FILE, dir_fd=at)
        opened.append(at)
        if not stat.S_ISREG(os.fstat(at).st_mode):
            return None
        content = bytearray()
        while len(content) <= room and (data := os.read(at, min(1 << 20, room + 1 - len(content)))):
            content += data
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)
    return bytes(content) if len(content) <= room else None

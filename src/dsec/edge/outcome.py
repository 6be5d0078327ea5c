"""How a command ended, in the caller's words. Pure: the guest's report and the sandbox's counters before and after go
in.

The counters are the sandbox's, not the command's: with several commands at once a limit that one of them hit explains
the failure of any that failed in that time. A command that succeeded is never given a limit as its cause.
"""

from __future__ import annotations

import errno
import os
import signal as signals
from collections.abc import Sequence

from msgspec import Struct

from dsec.errors import DsecError, Internal, InvalidRequest, QuotaExceeded
from dsec.ports import Usage
from dsec.spec.causes import Cause
from dsec.spec.operations import EndKind, OpEnd, Stage
from dsec.spec.sandbox import ExecStatus

MIB = 1 << 20
_KILL = 9
_TOO_SHORT_CPU_US = 5_000
_TOO_SHORT_WAIT_US = 50_000
"""Half of a period of the CPU limit: whoever is throttled waits for about that long or longer."""
_NOT_FOUND = 127
_NOT_RUNNABLE = 126


class Asked(Struct, frozen=True):
    """What the caller asked for, for messages; empty strings where an earlier edge took the request."""

    argv0: str = ""
    user: str = ""
    cwd: str = ""
    path: str = ""
    """The PATH that argv[0] was looked up in."""
    timeout_s: float | None = None
    output_bytes: int | None = None
    argv: Sequence[str] = ()
    pty: bool = False


def met_no_limit(end: OpEnd) -> bool:
    """Whether a command did so little that no counter can have anything to say of it: it succeeded, in less CPU time
    than a limit takes to be met, and wasn't kept from the CPU. Then the counters need not be read, which costs as much
    as a short command's other bookkeeping together."""
    return (
        end.kind is EndKind.EXITED
        and end.code == 0
        and end.cpu_us < _TOO_SHORT_CPU_US
        and end.wall_us - end.cpu_us < _TOO_SHORT_WAIT_US
    )


def status_of(end: OpEnd, before: Usage, after: Usage, asked: Asked, signalled: int) -> ExecStatus:
    """`signalled`: bit n set where the caller sent signal n.

    Raises `Internal` where the platform could not start the command, `InvalidRequest` or `QuotaExceeded` where the
    guest refused it.
    """
    exit_code, signal, cause, message = _what(end, asked, signalled)
    image_failed = after.image_failures > before.image_failures
    if image_failed and exit_code != 0 and cause in (Cause.EXITED, Cause.SIGNALED, Cause.START_FAILED):
        cause = Cause.INFRA_IMAGE
        message = "it failed after files of its environment could not be had from the store, or the node's disk failed"
    elif cause in (Cause.EXITED, Cause.SIGNALED) and exit_code != 0:
        limit = _limit(end, before, after)
        if limit is not None:
            cause, message = limit
    elif cause is Cause.EXITED and after.oom_kills > before.oom_kills:
        message = "a process in the sandbox was ended for its memory limit"
    return ExecStatus(
        exit_code=exit_code,
        cause=cause,
        infra=cause.infra,
        signal=signal,
        message=message,
        truncated=end.truncated,
        stdout_bytes=end.stdout_bytes,
        stderr_bytes=end.stderr_bytes,
        dropped_bytes=end.dropped_bytes,
        cpu_s=end.cpu_us / 1e6,
        wall_s=end.wall_us / 1e6,
        throttled_s=max(0, after.throttled_us - before.throttled_us) / 1e6,
        max_rss_bytes=end.max_rss_bytes,
    )


def _what(end: OpEnd, asked: Asked, signalled: int) -> tuple[int, int | None, Cause, str]:
    """Exit code, signal, cause, message, before limits are looked at."""
    match end.kind:
        case EndKind.EXITED:
            return end.code, None, Cause.EXITED, ""
        case EndKind.SIGNALED:
            by_caller = 0 < end.code < 128 and bool(signalled >> end.code & 1)
            cause = Cause.KILLED if by_caller else Cause.SIGNALED
            return 128 + end.code, end.code, cause, f"ended by {_signal_name(end.code)}"
        case EndKind.TIMEOUT:
            limit = f" of {asked.timeout_s:g} s" if asked.timeout_s is not None else ""
            return 128 + _KILL, _KILL, Cause.COMMAND_TIMEOUT, f"its command_timeout_s{limit} passed"
        case EndKind.OUTPUT_LIMIT:
            limit = f" of {asked.output_bytes} bytes" if asked.output_bytes is not None else ""
            return 128 + _KILL, _KILL, Cause.OUTPUT_LIMIT, f"it wrote more than its output_bytes{limit}"
        case EndKind.KILLED:
            return 128 + _KILL, _KILL, Cause.KILLED, "ended whole by the caller"
        case EndKind.START_FAILED:
            return _start_failed(end, asked)


def _start_failed(end: OpEnd, asked: Asked) -> tuple[int, int | None, Cause, str]:
    reason = os.strerror(end.code)
    name = f" {asked.argv0!r}" if asked.argv0 else ""
    if end.stage is Stage.EXEC:
        return _exec_failed(end.code, reason, name, asked)
    if end.stage is Stage.USER:
        who = f"the user {asked.user!r}" if asked.user else "the user"
        why = (
            "does not exist in the sandbox"
            if end.code in (errno.ENOENT, errno.EINVAL, 0)
            else f"can't be used: {reason}"
        )
        return _NOT_RUNNABLE, None, Cause.START_FAILED, f"{who} {why}"
    if end.stage is Stage.CWD:
        where = f"the directory {asked.cwd!r}" if asked.cwd else "the working directory"
        return _NOT_RUNNABLE, None, Cause.START_FAILED, f"{where} can't be entered: {reason}"
    if end.stage in (Stage.FORK, Stage.CGROUP) and end.code == errno.EAGAIN:
        return _NOT_RUNNABLE, None, Cause.PIDS_LIMIT, "the sandbox is at its limit of processes (pids)"
    if end.stage in (Stage.FORK, Stage.CGROUP) and end.code == errno.ENOMEM:
        return _NOT_RUNNABLE, None, Cause.MEMORY_LIMIT, "the sandbox has no memory left to start a process"
    if end.stage is Stage.REQUEST and end.code == errno.EAGAIN:
        raise QuotaExceeded(end.message)
    if end.stage is Stage.REQUEST and end.code == errno.EINVAL:
        raise InvalidRequest(end.message)
    if end.stage is Stage.TERMINAL and end.code == errno.ENOSPC:
        return _NOT_RUNNABLE, None, Cause.PIDS_LIMIT, "the sandbox has no room for another terminal"
    raise _platform_failed(end, reason)


def _exec_failed(code: int, reason: str, name: str, asked: Asked) -> tuple[int, int | None, Cause, str]:
    if code == errno.ENOENT:
        where = f" in PATH ({asked.path})" if asked.argv0 and "/" not in asked.argv0 else ""
        script = ", or the interpreter that it names is missing" if "/" in asked.argv0 else ""
        return _NOT_FOUND, None, Cause.START_FAILED, f"there is no program{name}{where}{script}"
    if code == errno.ENOEXEC:
        reason = "it is neither a program for this machine nor a script with a first line that names its interpreter"
    return _NOT_RUNNABLE, None, Cause.START_FAILED, f"the program{name} can't be run: {reason}"


def _platform_failed(end: OpEnd, reason: str) -> DsecError:
    return Internal(
        f"the guest could not start the command at stage {end.stage.name.lower()}: {end.message or reason}",
        remedy="Report this; the command did not run.",
        errno=errno.errorcode.get(end.code, str(end.code)),
    )


def _limit(end: OpEnd, before: Usage, after: Usage) -> tuple[Cause, str] | None:
    """The limit of the sandbox's that explains a failure."""
    if after.oom_kills > before.oom_kills:
        return Cause.MEMORY_LIMIT, "ended, or a process of its, for the sandbox's memory limit (memory_bytes)"
    if after.pids_refused > before.pids_refused:
        return Cause.PIDS_LIMIT, "it failed after the sandbox's limit of processes (pids) refused it another one"
    limit = after.disk_limit_bytes
    if end.kind is EndKind.EXITED and limit and after.disk_bytes >= limit - max(MIB, limit // 100):
        return Cause.DISK_LIMIT, "it failed with the sandbox's disk full (disk_bytes)"
    return None


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"

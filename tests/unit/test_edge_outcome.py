"""What a command's end is called."""

from __future__ import annotations

import errno

import pytest

from dsec.edge.outcome import Asked, status_of
from dsec.errors import Internal
from dsec.ports import Usage
from dsec.spec.causes import Cause
from dsec.spec.operations import EndKind, OpEnd, Stage
from dsec.spec.sandbox import ExecStatus

ASKED = Asked("prog", "alice", "/work", "/bin:/usr/bin", 5.0, 1000)
NOTHING = Usage(disk_limit_bytes=1 << 30)


def status(end: OpEnd, after: Usage = NOTHING, signalled: int = 0, asked: Asked = ASKED) -> ExecStatus:
    return status_of(end, NOTHING, after, asked, signalled)


FULL = Usage(disk_limit_bytes=1 << 30, disk_bytes=(1 << 30) - 1000)
OOM = Usage(oom_kills=1)
PIDS = Usage(pids_refused=3)


@pytest.mark.parametrize(
    ("end", "after", "signalled", "exit_code", "cause"),
    [
        (OpEnd(kind=EndKind.EXITED, code=0), NOTHING, 0, 0, Cause.EXITED),
        (OpEnd(kind=EndKind.EXITED, code=3), NOTHING, 0, 3, Cause.EXITED),
        # a limit explains a failure, never a success
        (OpEnd(kind=EndKind.EXITED, code=0), OOM, 0, 0, Cause.EXITED),
        (OpEnd(kind=EndKind.EXITED, code=0), PIDS, 0, 0, Cause.EXITED),
        (OpEnd(kind=EndKind.EXITED, code=0), FULL, 0, 0, Cause.EXITED),
        (OpEnd(kind=EndKind.EXITED, code=1), OOM, 0, 1, Cause.MEMORY_LIMIT),
        (OpEnd(kind=EndKind.SIGNALED, code=9), OOM, 0, 137, Cause.MEMORY_LIMIT),
        (OpEnd(kind=EndKind.EXITED, code=2), PIDS, 0, 2, Cause.PIDS_LIMIT),
        (OpEnd(kind=EndKind.EXITED, code=1), FULL, 0, 1, Cause.DISK_LIMIT),
        (OpEnd(kind=EndKind.SIGNALED, code=11), NOTHING, 0, 139, Cause.SIGNALED),
        (OpEnd(kind=EndKind.SIGNALED, code=15), NOTHING, 1 << 15, 143, Cause.KILLED),
        (OpEnd(kind=EndKind.SIGNALED, code=9), NOTHING, 1 << 15, 137, Cause.SIGNALED),
        (OpEnd(kind=EndKind.SIGNALED, code=9), OOM, 1 << 9, 137, Cause.KILLED),
        (OpEnd(kind=EndKind.TIMEOUT), OOM, 0, 137, Cause.COMMAND_TIMEOUT),
        (OpEnd(kind=EndKind.OUTPUT_LIMIT, truncated=True), NOTHING, 0, 137, Cause.OUTPUT_LIMIT),
        (OpEnd(kind=EndKind.KILLED), NOTHING, 0, 137, Cause.KILLED),
    ],
)
def test_cause(end: OpEnd, after: Usage, signalled: int, exit_code: int, cause: Cause) -> None:
    found = status(end, after, signalled)
    assert (found.exit_code, found.cause) == (exit_code, cause)
    assert not found.infra
    if cause is not Cause.EXITED:
        assert found.message


def test_a_store_that_fails_explains_a_failure_and_is_the_platforms_fault() -> None:
    image = Usage(disk_limit_bytes=1 << 30, image_failures=1)
    for end in (
        OpEnd(kind=EndKind.EXITED, code=1),
        OpEnd(kind=EndKind.SIGNALED, code=7),
        OpEnd(kind=EndKind.START_FAILED, code=errno.EIO, stage=Stage.EXEC),
    ):
        found = status(end, image)
        assert (found.cause, found.infra) == (Cause.INFRA_IMAGE, True)
        assert "store" in found.message
    assert status(OpEnd(kind=EndKind.EXITED, code=0), image).cause is Cause.EXITED
    assert status(OpEnd(kind=EndKind.TIMEOUT), image).cause is Cause.COMMAND_TIMEOUT


@pytest.mark.parametrize(
    ("stage", "code", "exit_code", "cause", "words"),
    [
        (Stage.EXEC, errno.ENOENT, 127, Cause.START_FAILED, ["'prog'", "/bin:/usr/bin"]),
        (Stage.EXEC, errno.EACCES, 126, Cause.START_FAILED, ["'prog'", "ermission"]),
        (Stage.EXEC, errno.ENOEXEC, 126, Cause.START_FAILED, ["'prog'", "interpreter"]),
        (Stage.USER, errno.ENOENT, 126, Cause.START_FAILED, ["'alice'", "does not exist"]),
        (Stage.USER, errno.EPERM, 126, Cause.START_FAILED, ["'alice'"]),
        (Stage.CWD, errno.ENOENT, 126, Cause.START_FAILED, ["'/work'", "No such file"]),
        (Stage.CWD, errno.ENOTDIR, 126, Cause.START_FAILED, ["'/work'"]),
        (Stage.FORK, errno.EAGAIN, 126, Cause.PIDS_LIMIT, ["pids"]),
        (Stage.FORK, errno.ENOMEM, 126, Cause.MEMORY_LIMIT, ["memory"]),
    ],
)
def test_a_failed_start(stage: Stage, code: int, exit_code: int, cause: Cause, words: list[str]) -> None:
    found = status(OpEnd(kind=EndKind.START_FAILED, stage=stage, code=code))
    assert (found.exit_code, found.cause) == (exit_code, cause)
    for word in words:
        assert word in found.message
    unknown = status(OpEnd(kind=EndKind.START_FAILED, stage=stage, code=code), asked=Asked())
    assert unknown.message
    assert "''" not in unknown.message


def test_a_missing_interpreter_is_hinted_at() -> None:
    end = OpEnd(kind=EndKind.START_FAILED, stage=Stage.EXEC, code=errno.ENOENT)
    assert "interpreter" in status(end, asked=Asked("/work/script")).message


@pytest.mark.parametrize("stage", [Stage.CGROUP, Stage.REQUEST, Stage.NONE])
def test_a_start_that_the_platform_failed_is_no_result(stage: Stage) -> None:
    with pytest.raises(Internal) as caught:
        status(OpEnd(kind=EndKind.START_FAILED, stage=stage, code=errno.EIO))
    assert caught.value.infra


def test_numbers() -> None:
    end = OpEnd(
        kind=EndKind.EXITED,
        cpu_us=1_500_000,
        wall_us=2_000_000,
        max_rss_bytes=7,
        stdout_bytes=1,
        stderr_bytes=2,
        dropped_bytes=3,
        truncated=True,
    )
    found = status_of(end, Usage(throttled_us=100), Usage(throttled_us=500_100), ASKED, 0)
    assert (found.cpu_s, found.wall_s, found.throttled_s) == (1.5, 2.0, 0.5)
    assert (found.max_rss_bytes, found.stdout_bytes, found.stderr_bytes, found.dropped_bytes) == (7, 1, 2, 3)
    assert found.truncated

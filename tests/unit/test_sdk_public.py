"""What `import dsec` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import dsec

PUBLIC = [
    "AsyncClient",
    "AsyncCommand",
    "AsyncFunction",
    "AsyncGroup",
    "AsyncPortStream",
    "AsyncRun",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncWatch",
    "CallerError",
    "Case",
    "CaseVerdict",
    "Cause",
    "Client",
    "Command",
    "CommandFailed",
    "CommandResult",
    "CreateResult",
    "DsecError",
    "ExecSpec",
    "FileEvent",
    "FileInfo",
    "Function",
    "FunctionCall",
    "FunctionFailed",
    "FunctionLimits",
    "FunctionResult",
    "FunctionSpec",
    "Grader",
    "Group",
    "Health",
    "JudgeLimits",
    "JudgeResult",
    "JudgeSpec",
    "Judged",
    "KeyPolicy",
    "NetworkInfo",
    "Output",
    "PermissionOptions",
    "PlatformError",
    "PortStream",
    "Problem",
    "ProcessInfo",
    "PtySize",
    "Run",
    "RunResult",
    "Sandbox",
    "SandboxEvent",
    "SandboxInfo",
    "SandboxSpec",
    "Service",
    "Session",
    "SessionInfo",
    "SessionLog",
    "SessionResult",
    "State",
    "Verdict",
    "Watch",
    "errors",
]
"""A name is added here on purpose, and taken away with a major version only."""


def test_the_public_names() -> None:
    assert dsec.__all__ == PUBLIC
    assert all(getattr(dsec, name) is not None for name in PUBLIC)


def test_the_import_is_light_and_needs_no_server() -> None:
    program = "import sys, dsec; print('\\n'.join(sys.modules))"
    modules = set(
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path)},
        ).stdout.split()
    )
    ours = {name.split(".")[1] for name in modules if name.startswith("dsec.")}
    assert ours <= {"spec", "errors", "ports", "wire", "sdk", "recipe", "sockets"}
    heavy = {"aiohttp", "yarl", "uvicorn", "litestar", "uvloop", "click", "rich", "sqlite3"}
    assert not heavy & modules


def test_instances_say_what_they_are() -> None:
    result = dsec.CommandResult(exit_code=1, stdout_bytes=b"\xff", stderr_bytes=b"a\nlast words\n")
    assert (result.stdout, result.stderr, result.ok) == ("\ufffd", "a\nlast words\n", False)
    error = dsec.CommandFailed(result)
    assert "last words" in str(error)
    assert error.code == "command_failed"
    lost = dsec.CommandFailed(dsec.CommandResult(exit_code=1, cause=dsec.Cause.OUTCOME_UNKNOWN, infra=True))
    assert lost.infra
    assert not dsec.CommandFailed.infra

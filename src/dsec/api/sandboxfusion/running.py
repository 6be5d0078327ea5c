"""`/run_code`: one program, compiled and run by the judge, told in SandboxFusion's words."""

from __future__ import annotations

import base64
import binascii
import posixpath
import time

from msgspec.structs import replace

from dsec.api.sandboxfusion.config import FusionConfig
from dsec.api.sandboxfusion.wire import (
    LANGUAGES,
    CommandResult,
    CommandStatus,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
)
from dsec.errors import InvalidRequest, SandboxEnded, Unsupported
from dsec.grading.judge import Judge, missing, run_job
from dsec.grading.running import Job, Ran, check_files
from dsec.grading.tools import TOOLS
from dsec.plan.turns import Path
from dsec.spec.causes import Cause
from dsec.spec.judging import JudgeLimits
from dsec.spec.sandbox import MIB

OUTPUT_BYTES = 16 * MIB
FETCH_BYTES = 32 * MIB
PIDS = 256
_MOST_CPU_S = 3600.0
_HOME = "/tmp"


class Program:
    """What a request asks to be run. Raises `InvalidRequest`."""

    def __init__(self, request: RunCodeRequest) -> None:
        language = LANGUAGES.get(request.language)
        if language is None:
            known = ", ".join(LANGUAGES)
            raise InvalidRequest(f"language {request.language[:100]!r} is not served here", remedy=f"known: {known}")
        self.language = language
        self.request = request
        self.source = request.code.encode()
        self.stdin = (request.stdin or "").encode()
        self.files = {
            _path(name): _decoded(name, content) for name, content in request.files.items() if content is not None
        }
        tool = TOOLS[language]
        check_files({*self.files, tool.source, tool.made})
        self.fetch = {_path(name): name for name in request.fetch_files}


class Runs:
    """Runs programs."""

    def __init__(self, judge: Judge, config: FusionConfig) -> None:
        self._judge = judge
        self._config = config

    async def run(
        self, caller: Path, project: str, environment: str, program: Program, *, patient: bool = False
    ) -> RunCodeResponse:
        """Run one. Unless `patient`, it has to begin before its client gives up: raises `AdmissionTimeout`. Raises
        `EnvironmentNotFound`, and what the platform fails with."""
        compiled: CommandResult | None = None
        began = time.monotonic()
        wait_s, compile_s = self._config.wait_s, program.request.compile_timeout
        try:
            built = await self._judge.build(
                caller,
                project,
                environment,
                program.language,
                program.source,
                files=program.files,
                compile_s=compile_s,
                deadline_s=None if patient else wait_s,
            )
            if built is not None:
                compiled = _result(built.ran)
                if built.program is None:
                    return RunCodeResponse(status=RunStatus.FAILED, compile_result=compiled)
            content = program.source if built is None or built.program is None else built.program
            left_s = None if patient else max(0.0, wait_s + compile_s - (time.monotonic() - began))
            ran = await self._judge.run(caller, self._job(project, environment, program, content), left_s)
            if ran.missing and built is None:
                raise missing(program.language, environment)
        except Unsupported as error:
            return RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=str(error), compile_result=compiled)
        except SandboxEnded as error:
            if error.details.get("cause") != Cause.MEMORY_LIMIT:
                return RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=str(error), compile_result=compiled)
            ended = CommandResult(status=CommandStatus.FINISHED, return_code=-9, stdout="", stderr=error.message)
            return RunCodeResponse(status=RunStatus.FAILED, compile_result=compiled, run_result=ended)
        result = _result(ran)
        done = result.status is CommandStatus.FINISHED and result.return_code == 0
        return RunCodeResponse(
            status=RunStatus.SUCCESS if done else RunStatus.FAILED,
            compile_result=compiled,
            run_result=result,
            files={program.fetch[path]: base64.b64encode(data).decode() for path, data in ran.fetched.items()},
        )

    def _job(self, project: str, environment: str, program: Program, content: bytes) -> Job:
        request = program.request
        asked = request.memory_limit_MB
        limits = JudgeLimits(
            cpu_s=_MOST_CPU_S,
            wall_s=request.run_timeout,
            memory_bytes=max(16, asked) * MIB if asked > 0 else self._config.memory_bytes,
            output_bytes=OUTPUT_BYTES,
            pids=PIDS,
        )
        job = run_job(project, environment, program.language, content, limits)
        return replace(
            job,
            files={**program.files, **job.files},
            stdin=program.stdin,
            fetch=tuple(program.fetch),
            fetch_bytes=FETCH_BYTES,
        )


def _result(ran: Ran) -> CommandResult:
    status = ran.status
    late = status.cause is Cause.COMMAND_TIMEOUT
    stderr = ran.stderr.decode(errors="replace")
    if status.cause not in (Cause.EXITED, Cause.SIGNALED, Cause.COMMAND_TIMEOUT):
        stderr += f"\n{status.message or status.cause.value}\n"
    return CommandResult(
        status=CommandStatus.TIME_LIMIT if late else CommandStatus.FINISHED,
        execution_time=status.wall_s,
        cpu_time=status.cpu_s,
        return_code=None if late else -status.signal if status.signal else status.exit_code,
        stdout=ran.stdout.decode(errors="replace"),
        stderr=stderr,
    )


def _path(name: str) -> bytes:
    if "\0" in name:
        raise InvalidRequest("a file's name has a NUL", field="files")
    path = posixpath.normpath(posixpath.join(_HOME, name))
    if not path.startswith(f"{_HOME}/"):
        raise InvalidRequest(
            f"{name[:200]!r} is outside of the program's directory", remedy=f"It is {_HOME}.", field="files"
        )
    return path.encode()


def _decoded(name: str, content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"the content of {name[:200]!r} is not base64", field="files") from None

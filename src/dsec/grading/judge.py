"""An online judge: each case of a submission in a place of its own.

Invariants: nothing outlives a case, so nothing leaks to the next; what is expected never enters a place in which the
submission runs; the submission is an unprivileged user there and has no network; a verdict comes from exit status,
limits and output alone; places are shared fairly by projects, and by the submissions of one. How programs are run is
the runner's (`grading.running`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import cast

from msgspec.structs import replace

from dsec.errors import (
    AdmissionTimeout,
    CallerError,
    DsecError,
    InvalidRequest,
    PlatformError,
    SandboxEnded,
    Unsupported,
)
from dsec.grading.programs import Built, Programs, Surroundings, compile_job
from dsec.grading.running import Job, Ran, Runner
from dsec.grading.slots import Slots
from dsec.grading.tools import TOOLS
from dsec.plan.checkers import accepts
from dsec.plan.turns import Path
from dsec.spec.causes import Cause
from dsec.spec.judging import (
    Case,
    CaseVerdict,
    Checker,
    JudgeLimits,
    JudgeLine,
    JudgeSpec,
    JudgeVerdict,
    Language,
    Word,
)
from dsec.spec.sandbox import ExecStatus

LAST_BYTES = 4096
ACCEPT, REFUSE = 42, 43
"""Exit codes of checkers: none that a crash has."""
CHECKER_LIMITS = JudgeLimits(cpu_s=60.0, wall_s=60.0)
_ATTEMPTS = 2
"""Where the platform failed: a case may be run again, as nothing of it is left."""


class Judge:
    """The judge of one node."""

    def __init__(
        self, runner: Runner, around: Callable[[str, str], Surroundings], *, slots: Slots | None = None
    ) -> None:
        """`around`: what an environment is, by its name and the project; raises `EnvironmentNotFound`. `slots`: places
        for programs, where others share them."""
        self._runner = runner
        self._around = around
        self._slots = slots or Slots()
        self._programs = Programs()

    async def judge(self, project: str, spec: JudgeSpec, at_once: int = 0) -> AsyncIterator[JudgeLine]:
        """A line a case as it ends, the verdict last. Closing it ends what still runs. `at_once`: no more than so many
        cases run at a time (0: as many as have room). Raises `EnvironmentNotFound`,
        `InvalidRequest`, `Unsupported` (no such toolchain there)."""
        if (spec.checker is Checker.PROGRAM) != bool(spec.checker_source):
            raise InvalidRequest("`checker_source` goes with the checker `program`", field="checker_source")
        self._around(spec.environment, project)
        caller = self.caller(project)
        program, failed, compiled = await self._program(caller, project, spec)
        if failed is not None:
            yield JudgeLine(case=failed)
            total = len(spec.cases)
            yield JudgeLine(
                result=JudgeVerdict(verdict=failed.verdict, infra=failed.infra, cases=total, compiled=compiled)
            )
            return
        found: dict[int, CaseVerdict] = {}
        verdicts = cast("AsyncGenerator[CaseVerdict]", self._cases(caller, project, spec, program, at_once))
        async with aclosing(verdicts):
            async for verdict in verdicts:
                found[verdict.index] = verdict
                yield JudgeLine(case=verdict)
        bad = [found[index] for index in sorted(found) if found[index].verdict is not Word.ACCEPTED]
        first = next((each for each in bad if each.infra), bad[0]) if bad else None
        yield JudgeLine(
            result=JudgeVerdict(
                verdict=Word.ACCEPTED if first is None else first.verdict,
                infra=first is not None and first.infra,
                passed=len(found) - len(bad),
                cases=len(spec.cases),
                compiled=compiled,
            )
        )

    # --- for other judges' protocols ---

    def caller(self, project: str) -> Path:
        """A new submission of a project: what places are shared by."""
        return self._slots.caller(project)

    async def build(
        self,
        caller: Path,
        project: str,
        environment: str,
        language: Language,
        source: bytes,
        *,
        files: Mapping[bytes, bytes] | None = None,
        compile_s: float,
        deadline_s: float | None = None,
        check: bool = False,
    ) -> Built | None:
        """The program of a source, made once; None for a language that isn't compiled. `check`: where a source can be
        checked, it is its own program if it passes. Raises `Unsupported` (no toolchain), `EnvironmentNotFound`, and as
        `run`."""
        tool = TOOLS[language]
        if not tool.compile and not (check and tool.check):
            return None
        files = files or {}
        job = compile_job(project, environment, language, {**files, tool.source: source}, compile_s)
        key = self._programs.key(self._around(environment, project), language, source, files)
        built = await self._programs.get(key, lambda: self.run(caller, job, deadline_s))
        if tool.lacking(built.ran.status):
            raise missing(language, environment)
        return built

    async def run(self, caller: Path, job: Job, deadline_s: float | None = None) -> Ran:
        """Run a command in its turn; once more where the platform failed. Raises `AdmissionTimeout` where it got no
        place within `deadline_s`, and as `Runner.run`."""
        for attempt in itertools.count(1):
            try:
                async with self._slots.turn(caller, deadline_s):
                    ran = await self._runner.run(job)
            except TimeoutError:
                raise AdmissionTimeout(
                    f"no place to run within {deadline_s:g} s", remedy="Try again: other programs run now."
                ) from None
            except PlatformError:
                if attempt == _ATTEMPTS:
                    raise
            else:
                if not ran.status.infra or attempt == _ATTEMPTS:
                    return ran
        raise AssertionError

    # --- compiling ---

    async def _program(
        self, caller: Path, project: str, spec: JudgeSpec
    ) -> tuple[bytes | None, CaseVerdict | None, bool]:
        """The program (None: the source itself is run), or why there is none; whether it was made now."""
        try:
            built = await self.build(
                caller,
                project,
                spec.environment,
                spec.language,
                spec.source.encode(),
                compile_s=spec.limits.compile_s,
                check=True,
            )
        except SandboxEnded as error:
            return None, _ended(-1, error), True
        except CallerError:
            raise
        except DsecError as error:
            return None, _platform(-1, error), True
        if built is None or built.program is not None:
            return (None, None, False) if built is None else (built.program, None, built.fresh)
        status = built.ran.status
        word = Word.PLATFORM_ERROR if status.infra else Word.COMPILE_ERROR
        how = "" if status.cause is Cause.EXITED else f"compiling ended: {status.message or status.cause.value}"
        return None, _verdict(-1, word, built.ran, message=how), built.fresh

    # --- cases ---

    async def _cases(
        self, caller: Path, project: str, spec: JudgeSpec, program: bytes | None, at_once: int
    ) -> AsyncIterator[CaseVerdict]:
        """As they end; closing it ends the others."""
        waiting = list(enumerate(spec.cases))[::-1]
        tasks: set[asyncio.Task[CaseVerdict]] = set()
        width = min(self._slots.places, at_once or len(spec.cases))
        stopped = False
        try:
            while tasks or (waiting and not stopped):
                while waiting and not stopped and len(tasks) < width:
                    tasks.add(asyncio.ensure_future(self._case(caller, project, spec, program, waiting.pop())))
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for verdict in sorted((task.result() for task in done), key=lambda each: each.index):
                    stopped |= spec.stop_early and verdict.verdict is not Word.ACCEPTED
                    yield verdict
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _case(
        self, caller: Path, project: str, spec: JudgeSpec, program: bytes | None, number: tuple[int, Case]
    ) -> CaseVerdict:
        index, case = number
        job = run_job(project, spec.environment, spec.language, program or spec.source.encode(), spec.limits)
        try:
            ran = await self.run(caller, replace(job, stdin=case.stdin.encode()))
            if ran.missing and not TOOLS[spec.language].compile:
                raise missing(spec.language, spec.environment)
            word = word_of(ran.status, spec.limits)
            message = ""
            if word is None:
                word, message = await self._checked(caller, project, spec, case, ran.stdout)
        except SandboxEnded as error:
            return _ended(index, error)
        except CallerError:
            raise
        except DsecError as error:
            return _platform(index, error)
        return _verdict(index, word, ran, message=message)

    async def _checked(
        self, caller: Path, project: str, spec: JudgeSpec, case: Case, output: bytes
    ) -> tuple[Word, str]:
        if spec.checker is not Checker.PROGRAM:
            right = accepts(spec.checker, output, case.expected.encode(), spec.tolerance)
            return (Word.ACCEPTED if right else Word.WRONG_ANSWER), ""
        files = {b"/tmp/checker.py": spec.checker_source.encode(), b"/tmp/output": output}
        files |= {b"/tmp/input": case.stdin.encode(), b"/tmp/expected": case.expected.encode()}
        argv = ("python3", "-I", "/tmp/checker.py", "/tmp/input", "/tmp/output", "/tmp/expected")
        job = Job(project=project, environment=spec.environment, argv=argv, files=files, limits=CHECKER_LIMITS)
        try:
            ran = await self.run(caller, job)
        except SandboxEnded as error:
            return Word.PLATFORM_ERROR, f"the checker failed: {error.message}"
        if ran.status.cause is Cause.EXITED and ran.status.exit_code in (ACCEPT, REFUSE):
            word = Word.ACCEPTED if ran.status.exit_code == ACCEPT else Word.WRONG_ANSWER
            return word, _last(ran.stdout)
        how = f"exit code {ran.status.exit_code}" if ran.status.cause is Cause.EXITED else ran.status.message
        return Word.PLATFORM_ERROR, f"the checker failed: {how}: {_last(ran.stderr)}"


def run_job(
    project: str,
    environment: str,
    language: Language,
    program: bytes,
    limits: JudgeLimits,
) -> Job:
    """The run of a program, or of the source in a language that isn't compiled."""
    tool = TOOLS[language]
    return Job(project=project, environment=environment, argv=tool.run, files={tool.made: program}, limits=limits)


def missing(language: Language, environment: str) -> Unsupported:
    """The error for an environment that can't run a language."""
    return Unsupported(
        f"the environment {environment} has no {TOOLS[language].toolchain}",
        remedy="Use one with the toolchain.",
        field="language",
    )


def word_of(status: ExecStatus, limits: JudgeLimits) -> Word | None:
    """The verdict that status and limits give; None: the output decides."""
    if status.infra:
        return Word.PLATFORM_ERROR
    named = {
        Cause.COMMAND_TIMEOUT: Word.TIME_LIMIT,
        Cause.MEMORY_LIMIT: Word.MEMORY_LIMIT,
        Cause.OUTPUT_LIMIT: Word.OUTPUT_LIMIT,
    }
    if status.cause in named:
        return named[status.cause]
    if status.cpu_s > limits.cpu_s:
        return Word.TIME_LIMIT
    return None if status.cause is Cause.EXITED and status.exit_code == 0 else Word.RUNTIME_ERROR


def _verdict(index: int, word: Word, ran: Ran, *, message: str = "") -> CaseVerdict:
    status = ran.status
    return CaseVerdict(
        index=index,
        verdict=word,
        infra=word is Word.PLATFORM_ERROR,
        exit_code=status.exit_code,
        cause=status.cause,
        cpu_s=status.cpu_s,
        wall_s=status.wall_s,
        memory_bytes=status.max_rss_bytes,
        stdout=_last(ran.stdout) if word is not Word.ACCEPTED else "",
        stderr=_last(ran.stderr),
        message=message,
    )


def _ended(index: int, error: SandboxEnded) -> CaseVerdict:
    """Its place ended under it: by what it did to it, or by the platform."""
    if error.details.get("cause") == Cause.MEMORY_LIMIT:
        return CaseVerdict(index=index, verdict=Word.MEMORY_LIMIT, cause=Cause.MEMORY_LIMIT, exit_code=137)
    return _platform(index, error)


def _platform(index: int, error: DsecError) -> CaseVerdict:
    return CaseVerdict(index=index, verdict=Word.PLATFORM_ERROR, infra=True, message=str(error)[:LAST_BYTES])


def _last(data: bytes) -> str:
    return data[-LAST_BYTES:].decode(errors="replace")

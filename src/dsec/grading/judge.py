"""An online judge: each case of a submission in a sandbox of its own.

Invariants: nothing outlives a case, so nothing leaks to the next; what is expected never enters a sandbox in which the
submission runs; the submission is `nobody` there and has no network; a verdict comes from exit status, limits and
output alone. Programs that were compiled are remembered by content, and only by this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple, cast

from dsec.edge.client import Created, EdgeClient
from dsec.errors import CallerError, DsecError, InvalidRequest, OutcomeUnknown, SandboxEnded, Unsupported
from dsec.plan.checkers import accepts
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
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import GIB, MIB, ExecSpec, ExecStatus, SandboxSpec

LABEL = "dsec.judge"
KEPT_BYTES = 256 * MIB
"""Of compiled programs."""
LAST_BYTES = 4096
ACCEPT, REFUSE = 42, 43
"""Exit codes of checkers: none that a crash has."""
_LIMITED = 'ulimit -t "$0" && exec "$@"'
"""So that what only burns CPU doesn't do so for all its wall time."""
_PROGRAM = b"/tmp/program"
_MOST_PROGRAM = 64 * MIB
_GRACE_S = 60.0


class Tool(NamedTuple):
    """How a language is compiled and run."""

    name: str
    compile: tuple[str, ...]
    run: tuple[str, ...]


TOOLS = {
    Language.PYTHON: Tool("main.py", (), ("python3", "-I", "/tmp/main.py")),
    Language.BASH: Tool("main.sh", (), ("bash", "/tmp/main.sh")),
    Language.C: Tool("main.c", ("gcc", "-O2", "-o", "/tmp/program", "/tmp/main.c", "-lm"), ("/tmp/program",)),
    Language.CPP: Tool("main.cpp", ("g++", "-O2", "-o", "/tmp/program", "/tmp/main.cpp"), ("/tmp/program",)),
}


class Ran(NamedTuple):
    """How a command in a sandbox of its own ended."""

    status: ExecStatus
    stdout: bytes
    stderr: bytes
    taken: bytes | None
    """The file that was asked for."""


class Judge:
    """The judge of one node."""

    def __init__(self, edge: EdgeClient, layers: Callable[[str, str], Sequence[str]]) -> None:
        """`layers`: those of an environment, by its name and the project; raises `EnvironmentNotFound`."""
        self._edge = edge
        self._layers = layers
        self._room = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._programs: OrderedDict[str, bytes] = OrderedDict()

    async def judge(self, project: str, spec: JudgeSpec) -> AsyncIterator[JudgeLine]:
        """A line a case as it ends, the verdict last. Closing it ends what still runs. Raises `EnvironmentNotFound`,
        `InvalidRequest`, `Unsupported` (no such compiler there)."""
        if (spec.checker is Checker.PROGRAM) != bool(spec.checker_source):
            raise InvalidRequest("`checker_source` goes with the checker `program`", field="checker_source")
        self._layers(spec.environment, project)
        program, failed, compiled = await self._built(project, spec)
        if failed is not None:
            yield JudgeLine(case=failed)
            yield JudgeLine(result=JudgeVerdict(verdict=failed.verdict, infra=failed.infra, compiled=compiled))
            return
        found: dict[int, CaseVerdict] = {}
        waiting = list(enumerate(spec.cases))[::-1]
        tasks: set[asyncio.Task[CaseVerdict]] = set()
        stopped = False
        try:
            while tasks or (waiting and not stopped):
                while waiting and not stopped and len(tasks) < 2 * (os.cpu_count() or 1):
                    tasks.add(asyncio.ensure_future(self._case(project, spec, program, *waiting.pop())))
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda each: each.result().index):
                    verdict = found[task.result().index] = task.result()
                    stopped |= spec.stop_early and verdict.verdict is not Word.ACCEPTED
                    yield JudgeLine(case=verdict)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        bad = [found[index] for index in sorted(found) if found[index].verdict is not Word.ACCEPTED]
        infra = any(each.infra for each in bad)
        first = next((each for each in bad if each.infra), bad[0]) if bad else None
        yield JudgeLine(
            result=JudgeVerdict(
                verdict=Word.ACCEPTED if first is None else first.verdict,
                infra=infra,
                passed=len(found) - len(bad),
                cases=len(spec.cases),
                compiled=compiled,
            )
        )

    # --- compiling ---

    async def _built(self, project: str, spec: JudgeSpec) -> tuple[bytes | None, CaseVerdict | None, bool]:
        """The program (None: the source itself is run), or why there is none; whether it was made now."""
        tool = TOOLS[spec.language]
        if not tool.compile:
            return None, None, False
        key = hashlib.sha256(
            "\0".join((*self._layers(spec.environment, project), *tool.compile, spec.source)).encode()
        ).hexdigest()
        known = self._programs.get(key)
        if known is not None:
            self._programs.move_to_end(key)
            return known, None, False
        limits = JudgeLimits(memory_bytes=1 * GIB, output_bytes=1 * MIB, pids=64, wall_s=spec.limits.compile_s)
        files = {f"/tmp/{tool.name}".encode(): spec.source.encode()}
        try:
            ran = await self.run(project, spec.environment, tool.compile, files, limits, take=_PROGRAM)
        except CallerError:
            raise
        except DsecError as error:
            return None, _platform(-1, error), True
        status = ran.status
        if status.cause is Cause.START_FAILED:
            raise Unsupported(
                f"the environment {spec.environment} has no {tool.compile[0]}",
                remedy="Use one with the toolchain.",
                field="language",
            )
        if status.exit_code or ran.taken is None:
            word = Word.PLATFORM_ERROR if status.infra else Word.COMPILE_ERROR
            return None, _verdict(-1, word, ran, message=f"compiling ended: {status.cause.value}"), True
        self._programs[key] = ran.taken
        while sum(map(len, self._programs.values())) > KEPT_BYTES:
            self._programs.popitem(last=False)
        return ran.taken, None, True

    # --- cases ---

    async def _case(self, project: str, spec: JudgeSpec, program: bytes | None, index: int, case: Case) -> CaseVerdict:
        tool = TOOLS[spec.language]
        files = {_PROGRAM: program} if program is not None else {f"/tmp/{tool.name}".encode(): spec.source.encode()}
        try:
            argv = ("/bin/sh", "-c", _LIMITED, str(math.ceil(spec.limits.cpu_s) + 1), *tool.run)
            ran = await self.run(project, spec.environment, argv, files, spec.limits, stdin=case.stdin.encode())
            word = _word(ran.status, spec.limits)
            message = ""
            if word is None:
                word, message = await self._checked(project, spec, case, ran.stdout)
        except SandboxEnded as error:
            if error.details.get("cause") != Cause.MEMORY_LIMIT:
                return _platform(index, error)
            return CaseVerdict(index=index, verdict=Word.MEMORY_LIMIT, cause=Cause.MEMORY_LIMIT, exit_code=137)
        except CallerError:
            raise
        except DsecError as error:
            return _platform(index, error)
        return _verdict(index, word, ran, message=message)

    async def _checked(self, project: str, spec: JudgeSpec, case: Case, output: bytes) -> tuple[Word, str]:
        if spec.checker is not Checker.PROGRAM:
            right = accepts(spec.checker, output, case.expected.encode(), spec.tolerance)
            return (Word.ACCEPTED if right else Word.WRONG_ANSWER), ""
        files = {b"/tmp/checker.py": spec.checker_source.encode(), b"/tmp/output": output}
        files |= {b"/tmp/input": case.stdin.encode(), b"/tmp/expected": case.expected.encode()}
        argv = ("python3", "-I", "/tmp/checker.py", "/tmp/input", "/tmp/output", "/tmp/expected")
        ran = await self.run(project, spec.environment, argv, files, JudgeLimits(cpu_s=60.0, wall_s=60.0))
        if ran.status.cause is Cause.EXITED and ran.status.exit_code in (ACCEPT, REFUSE):
            word = Word.ACCEPTED if ran.status.exit_code == ACCEPT else Word.WRONG_ANSWER
            return word, _last(ran.stdout)
        return Word.PLATFORM_ERROR, f"the checker failed: exit code {ran.status.exit_code}: {_last(ran.stderr)}"

    # --- one command ---

    async def run(
        self,
        project: str,
        environment: str,
        argv: Sequence[str],
        files: Mapping[bytes, bytes],
        limits: JudgeLimits,
        *,
        stdin: bytes = b"",
        take: bytes | None = None,
    ) -> Ran:
        """Run a command as nobody in a fresh sandbox that holds `files`. `take`: a file to bring back. Raises what
        creating a sandbox and writing files raises."""
        wanted = SandboxSpec(
            environment=environment,
            memory_bytes=limits.memory_bytes,
            disk_bytes=256 * MIB,
            pids=limits.pids,
            ttl_s=limits.wall_s + _GRACE_S,
            user="root",
            no_new_privs=True,
            labels={LABEL: "1"},
        )
        async with self._room:
            creating = asyncio.ensure_future(self._edge.create(wanted, project=project))
            sandbox = ""
            try:
                sandbox = (await asyncio.shield(creating)).sandbox.id
                for path, content in files.items():
                    await self._edge.write_file(sandbox, path, _once(content), user="root", mode=0o755)
                return await self._run(sandbox, argv, limits, stdin, take)
            finally:
                await asyncio.shield(asyncio.ensure_future(self._end(creating)))

    async def _end(self, creating: asyncio.Future[Created]) -> None:
        with suppress(DsecError):
            created = await creating
            await self._edge.delete(created.sandbox.id)

    async def _run(
        self, sandbox: str, argv: Sequence[str], limits: JudgeLimits, stdin: bytes, take: bytes | None
    ) -> Ran:
        spec = ExecSpec(
            argv=list(argv),
            cwd="/tmp",
            user="nobody",
            env={"HOME": "/tmp"},
            stdin=True,
            command_timeout_s=min(limits.wall_s, 3600.0),
            output_bytes=limits.output_bytes,
            kill_leftovers=True,
        )
        execution = await self._edge.exec(sandbox, spec)

        async def feed() -> None:
            for at in range(0, len(stdin), 1 << 18):
                await execution.write_stdin(stdin[at : at + (1 << 18)])
            await execution.close_stdin()

        feeding = asyncio.ensure_future(feed())
        streams = (bytearray(), bytearray())
        try:
            events = cast("AsyncGenerator[Chunk | ExecStatus]", execution.events())
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ExecStatus):
                        taken = await self._taken(sandbox, take) if take is not None and not event.exit_code else None
                        return Ran(event, bytes(streams[0]), bytes(streams[1]), taken)
                    streams[event.stderr].extend(event.data)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        raise OutcomeUnknown("the command's end was never told")

    async def _taken(self, sandbox: str, path: bytes) -> bytes | None:
        try:
            reading = self._edge.read_file(sandbox, path, user="nobody", length=_MOST_PROGRAM + 1)
            chunks = cast("AsyncGenerator[bytes]", reading)
            async with aclosing(chunks):
                content = b"".join([data async for data in chunks])
        except CallerError:
            return None
        return content if len(content) <= _MOST_PROGRAM else None


def _word(status: ExecStatus, limits: JudgeLimits) -> Word | None:
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
        stderr=_last(ran.stderr),
        message=message,
    )


def _platform(index: int, error: DsecError) -> CaseVerdict:
    return CaseVerdict(index=index, verdict=Word.PLATFORM_ERROR, infra=True, message=str(error)[:LAST_BYTES])


def _last(data: bytes) -> str:
    return data[-LAST_BYTES:].decode(errors="replace")


async def _once(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data

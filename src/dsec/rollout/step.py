"""The step itself, as a client of the SDK: create the burst, let each sandbox change the project and run its tests,
grade each change in a fresh sandbox.

Invariants: a reward comes only from a grader's sandbox, made from pristine layers, that got nothing but allowed source
files out of the agent's; whatever the platform did wrong is `infra` and earns no reward at all, not a zero; every
sandbox that was made is ended.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from dsec import AsyncClient, AsyncSandbox, CommandResult
from dsec.errors import DsecError, FileMissing
from dsec.rollout import grading
from dsec.rollout.candidates import Burst, Candidate
from dsec.rollout.grading import Report, Scale
from dsec.rollout.project import Project
from dsec.spec.causes import Cause
from dsec.spec.sandbox import MIB, SandboxSpec

T = TypeVar("T")

ROOT = "/project"
RUNNER = "/grader/inside.py"
TESTS = ("python3", "-B", "-m", "unittest", "-q")
TEST_TIMEOUT_S = 30.0
_MARKERS = "/tmp"
_AT_ONCE = 8
"""Test runs at the same time: enough to keep a few cores busy, few enough that none waits long."""
_MAX_SOURCE = 1 * MIB


class Task(Struct, frozen=True):
    """What the step is about."""

    project: Project
    source: dict[str, str]
    """The pristine files that a candidate may change."""
    burst: Burst
    agent_environment: str
    """The project with the fault in."""
    grader_environment: str
    """The pristine project, and the runner."""


class Row(Struct, frozen=True, kw_only=True):
    """What became of one candidate."""

    index: int
    candidate: str
    expected: float | None
    """None: the platform ends its sandbox, so that there must be no reward."""
    expected_cause: Cause
    id: str
    own: str = ""
    """What its own test run in its own sandbox seemed to show."""
    passed: int = 0
    failed: int = 0
    reward: float | None = None
    cause: Cause
    infra: bool = False
    cpu_s: float = 0.0
    grader_id: str = ""
    message: str = ""

    @property
    def surprise(self) -> bool:
        """It isn't what it must be."""
        return (
            self.reward != self.expected or self.cause != self.expected_cause or self.infra != (self.expected is None)
        )


class Created(Struct, frozen=True):
    """How the creation phase went."""

    count: int
    wall_s: float
    p50_ms: float
    p99_ms: float


class Watch(Protocol):
    """Whoever shows progress."""

    def creating(self, done: int, total: int) -> None: ...
    def created(self, created: Created) -> None: ...
    def grading(self, done: int, total: int) -> None: ...


class Step(Struct, frozen=True):
    """All that came out."""

    created: Created
    graded_s: float
    ended_s: float
    rows: list[Row]
    markers: str
    """Empty, or how a marker got into another sandbox."""

    @property
    def mean(self) -> float | None:
        """Of the rewards that count."""
        rewards = [row.reward for row in self.rows if row.reward is not None]
        return statistics.fmean(rewards) if rewards else None


def base_spec(environment: str, **labels: str) -> SandboxSpec:
    """What each sandbox of the step gets."""
    return SandboxSpec(
        environment=environment,
        memory_bytes=256 * MIB,
        disk_bytes=256 * MIB,
        pids=64,
        output_bytes=4 * MIB,
        ttl_s=900.0,
        workdir=ROOT,
        labels={"job": "main", **labels},
    )


class Grader:
    """Grades source files, each set in a sandbox of its own."""

    def __init__(self, client: AsyncClient, task: Task) -> None:
        self._client = client
        self._project = task.project
        self._spec = base_spec(task.grader_environment, role="grader")
        self._markers: set[str] = set()

    async def grade(self, files: Mapping[str, str | bytes]) -> tuple[Report | None, CommandResult, str]:
        """The report of the tests on the pristine project with `files` laid over it, the command's result and the
        sandbox's id.

        Raises ValueError for a path that no candidate may change.
        """
        refused = [path for path in files if not self._project.allowed(path)]
        if refused:
            raise ValueError(f"a candidate may not change {refused}")
        nonce = secrets.token_hex(16)
        sandbox = await AsyncSandbox.create(self._spec, client=self._client)
        try:
            for path, content in files.items():
                await sandbox.files.write(f"{ROOT}/{path}", content)
            result = await sandbox.commands.run(
                ["python3", "-I", "-B", RUNNER, ROOT, f"{ROOT}/{self._project.source}"],
                stdin=nonce + "\n",
                command_timeout_s=TEST_TIMEOUT_S,
                kill_leftovers=True,
            )
            self._markers |= await markers(sandbox)
        finally:
            await sandbox.kill()
        return grading.parse_report(result.stdout_bytes, nonce), result, sandbox.id

    @property
    def markers(self) -> set[str]:
        """Agents' markers that were seen in graders' sandboxes: there must be none."""
        return self._markers


class Made(Struct, frozen=True):
    """The burst's sandboxes in the order of the candidates."""

    sandboxes: list[AsyncSandbox]
    created: Created


async def run_step(
    client: AsyncClient, task: Task, made: Made, grader: Grader, measure: Scale, *, watch: Watch
) -> Step:
    """Test and grade the burst's candidates in the sandboxes that were made for it, and end these. Faults of the
    platform are rows."""
    burst, sandboxes = task.burst, made.sandboxes
    try:
        token = secrets.token_hex(8)
        began = time.monotonic()
        slots = asyncio.Semaphore(_AT_ONCE)
        done = 0

        async def one(candidate: Candidate, sandbox: AsyncSandbox) -> Row:
            nonlocal done
            async with slots:
                agent = _Agent(task, candidate, sandbox, grader)
                await sandbox.files.write(_marker(token, candidate.index), b"")
                row = await (agent.lost() if candidate.killed else agent.run(measure))
            done += 1
            watch.grading(done, len(burst.candidates))
            return row

        rows = await gather([one(*pair) for pair in zip(burst.candidates, sandboxes, strict=True)])
        graded_s = time.monotonic() - began
        live = {each.index: sandboxes[each.index] for each in burst.candidates if not each.killed}
        seen = await gather([markers(sandbox) for sandbox in live.values()])
        strays = _strays(token, dict(zip(live, seen, strict=True)), grader.markers)
    finally:
        began = time.monotonic()
        errors = await AsyncSandbox.kill_many(sandboxes, client=client)
    for error in errors.values():
        raise error
    return Step(made.created, graded_s, time.monotonic() - began, rows, strays)


class _Agent:
    """One candidate in its sandbox."""

    def __init__(self, task: Task, candidate: Candidate, sandbox: AsyncSandbox, grader: Grader) -> None:
        self._project = task.project
        self._source = task.source
        self._candidate = candidate
        self._sandbox = sandbox
        self._grader = grader

    async def run(self, measure: Scale) -> Row:
        """Change the project, run its tests as the agent would, then have the change graded."""
        try:
            for path, text in self._candidate.files.items():
                await self._sandbox.files.write(f"{ROOT}/{path}", text)
            own = await self._sandbox.commands.run(
                TESTS,
                env={"PYTHONPATH": f"{ROOT}/{self._project.source}"},
                command_timeout_s=TEST_TIMEOUT_S,
                kill_leftovers=True,
            )
            if own.infra:
                return self._row(own.cause, infra=True, message=own.message)
            report, result, grader_id = await self._grader.grade(await self._changes())
        except DsecError as error:
            return self._failed(error)
        if result.infra:
            return self._row(result.cause, infra=True, message=result.message, grader_id=grader_id)
        whole = report if report is not None and report.ids == measure.ids else None
        return self._row(
            result.cause,
            own=_claim(own),
            passed=whole.passed if whole else 0,
            failed=measure.ran - (whole.passed if whole else 0),
            reward=grading.reward(report, measure),
            cpu_s=own.cpu_s + result.cpu_s,
            grader_id=grader_id,
        )

    async def lost(self) -> Row:
        """The platform ends the sandbox under a running command."""
        command = await self._sandbox.commands.start(["sleep", "600"])
        await self._sandbox.kill(cause=Cause.PLATFORM_KILLED)
        try:
            result = await command.wait(request_timeout_s=TEST_TIMEOUT_S)
        except DsecError as error:
            return self._failed(error)
        return self._row(result.cause, infra=result.infra, message=result.message)

    async def _changes(self) -> dict[str, bytes]:
        """The allowed source files as the agent left them, those that differ from the pristine ones."""
        changes = {}
        for path, text in self._source.items():
            try:
                content = await self._sandbox.files.read_bytes(f"{ROOT}/{path}", length=_MAX_SOURCE)
            except FileMissing:
                content = b""
            if content != text.encode():
                changes[path] = content
        return changes

    def _failed(self, error: DsecError) -> Row:
        cause = Cause(error.details["cause"]) if "cause" in error.details else Cause.OUTCOME_UNKNOWN
        return self._row(cause, infra=error.infra or cause.infra, message=str(error))

    def _row(
        self,
        cause: Cause,
        *,
        own: str = "",
        passed: int = 0,
        failed: int = 0,
        reward: float | None = None,
        infra: bool = False,
        cpu_s: float = 0.0,
        grader_id: str = "",
        message: str = "",
    ) -> Row:
        return Row(
            index=self._candidate.index,
            candidate=self._candidate.label,
            expected=self._candidate.expected_reward,
            expected_cause=self._candidate.expected_cause,
            id=self._sandbox.id,
            own=own,
            passed=passed,
            failed=failed,
            reward=reward,
            cause=cause,
            infra=infra,
            cpu_s=cpu_s,
            grader_id=grader_id,
            message=message,
        )


async def create_burst(client: AsyncClient, task: Task, watch: Watch) -> Made:
    """A sandbox for each candidate, all at once. Raises the first error, after ending those that were made."""
    count = len(task.burst.candidates)
    began = time.monotonic()
    made: dict[int, AsyncSandbox] = {}
    failed: list[DsecError] = []
    spec = base_spec(task.agent_environment, role="agent")
    async for result in AsyncSandbox.create_many(spec, count=count, client=client, deadline_s=120.0):
        if result.sandbox is None:
            failed += [result.error] if result.error else []
            continue
        made[result.index] = result.sandbox
        watch.creating(len(made), count)
    wall_s = time.monotonic() - began
    if failed:
        await AsyncSandbox.kill_many(made.values(), client=client)
        raise failed[0]
    times = sorted(sandbox.info.create_ms or 0.0 for sandbox in made.values())
    created = Created(count, wall_s, times[(count - 1) // 2], times[min(count - 1, count * 99 // 100)])
    watch.created(created)
    return Made([made[index] for index in range(count)], created)


async def markers(sandbox: AsyncSandbox) -> set[str]:
    """The names of all markers that a sandbox sees."""
    return {entry.name for entry in await sandbox.files.list(_MARKERS) if entry.name.startswith("marker-")}


def _marker(token: str, index: int) -> str:
    return f"{_MARKERS}/marker-{token}-{index}"


def _strays(token: str, seen: Mapping[int, set[str]], in_graders: set[str]) -> str:
    for index, names in seen.items():
        if names != {_marker(token, index).rpartition("/")[2]}:
            return f"sandbox {index} sees {', '.join(sorted(names)) or 'not even its own marker'}"
    return f"a grader saw {', '.join(sorted(in_graders))}" if in_graders else ""


def _claim(result: CommandResult) -> str:
    """What a reader of the agent's own output would believe."""
    last = (result.stdout + result.stderr).strip().rpartition("\n")[2]
    return "OK" if last.startswith("OK") else "failed"


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]

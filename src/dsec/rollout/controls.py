"""What must come out right whatever the candidates do: the ends of the scale, and each way of misbehaving with its
cause."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import DsecError, Internal
from dsec.rollout import grading
from dsec.rollout.candidates import Burst
from dsec.rollout.grading import Report, Scale
from dsec.rollout.step import ROOT, TESTS, Grader, Task, base_spec, gather
from dsec.spec.causes import Cause
from dsec.spec.sandbox import MIB


class Control(Struct, frozen=True, kw_only=True):
    """One control: what must be, and what was."""

    name: str
    expected: str
    found: str
    cpu_s: float = 0.0
    id: str = ""

    @property
    def surprise(self) -> bool:
        return self.expected != self.found


class _Abuse(Struct, frozen=True, kw_only=True):
    """A command that runs into a limit."""

    name: str
    argv: tuple[str, ...]
    cause: Cause
    limits: dict[str, Any] = {}
    command_timeout_s: float = 60.0
    """Generous: a busy machine must not turn another cause into this one."""


_FORK = "import os\nwhile True: os.fork()"
_HOG = "held = []\nwhile True: held.append(b'x' * (1 << 20))"
_STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"

ABUSES = (
    _Abuse(name="a fork bomb", argv=("python3", "-c", _FORK), cause=Cause.PIDS_LIMIT, limits={"pids": 32}),
    _Abuse(
        name="a memory hog", argv=("python3", "-c", _HOG), cause=Cause.MEMORY_LIMIT, limits={"memory_bytes": 64 * MIB}
    ),
    _Abuse(name="`yes`", argv=("yes",), cause=Cause.OUTPUT_LIMIT, limits={"output_bytes": 1 * MIB}),
    _Abuse(
        name="a hang, SIGTERM ignored",
        argv=("python3", "-c", _STUBBORN),
        cause=Cause.COMMAND_TIMEOUT,
        command_timeout_s=0.5,
    ),
)


async def take_scale(grader: Grader, burst: Burst) -> tuple[Scale, list[Control]]:
    """The ends of the scale, graded like any candidate: the untouched source and the fault left in.

    Raises `Internal` where they are no scale at all.
    """
    (pristine, good, good_id), (faulty, bad, bad_id) = await gather(
        [grader.grade({}), grader.grade(burst.planted)],
    )
    if pristine is None or faulty is None:
        result = good if pristine is None else bad
        said = (result.stdout + result.stderr).strip()[-400:]
        raise Internal(
            f"the grader gave no report: exit code {result.exit_code} ({result.cause}) {result.message} {said}"
        )
    try:
        measure = grading.scale(pristine, faulty)
    except ValueError as error:
        raise Internal(f"the ends of the scale are wrong: {error}") from error
    if len(measure.broken) != burst.fault.broken:
        raise Internal(f"the fault breaks {len(measure.broken)} tests instead of {burst.fault.broken}")

    def control(name: str, expected: float, report: Report, cpu_s: float, sandbox_id: str) -> Control:
        found = f"reward {grading.reward(report, measure):g}"
        return Control(name=name, expected=f"reward {expected:g}", found=found, cpu_s=cpu_s, id=sandbox_id)

    return measure, [
        control("untouched source", 1.0, pristine, good.cpu_s, good_id),
        control("the fault left in", 0.0, faulty, bad.cpu_s, bad_id),
    ]


async def run_controls(client: AsyncClient, task: Task, grader: Grader, measure: Scale) -> list[Control]:
    """The other controls, side by side, each in a sandbox of its own."""
    environment = task.agent_environment
    return await gather(
        [
            _edits_the_tests(client, task, grader, measure),
            *(_abuse(client, environment, abuse) for abuse in ABUSES),
            _platform_kill(client, environment),
        ]
    )


async def _edits_the_tests(client: AsyncClient, task: Task, grader: Grader, measure: Scale) -> Control:
    """All tests replaced by one that passes: its own run is fine, and graded it earns nothing."""
    async with await AsyncSandbox.create(base_spec(task.agent_environment, role="control"), client=client) as sandbox:
        await sandbox.files.remove(f"{ROOT}/tests", recursive=True)
        passing = "import unittest\nclass Fine(unittest.TestCase):\n    def test_fine(self): pass\n"
        await sandbox.files.write(f"{ROOT}/tests/test_fine.py", passing, parents=True)
        await sandbox.files.write(f"{ROOT}/tests/__init__.py", "")
        own = await sandbox.commands.run(TESTS, env={"PYTHONPATH": f"{ROOT}/{task.project.source}"})
        source = {path: await sandbox.files.read_bytes(f"{ROOT}/{path}") for path in task.source}
        report, result, _ = await grader.grade(source)
    return Control(
        name="edits the tests only",
        expected="own run passes, reward 0",
        found=f"own run {'passes' if own.ok else 'fails'}, reward {grading.reward(report, measure):g}",
        cpu_s=own.cpu_s + result.cpu_s,
        id=sandbox.id,
    )


async def _abuse(client: AsyncClient, environment: str, abuse: _Abuse) -> Control:
    spec = msgspec.structs.replace(base_spec(environment, role="control"), **abuse.limits)
    async with await AsyncSandbox.create(spec, client=client) as sandbox:
        result = await sandbox.commands.run(
            list(abuse.argv), command_timeout_s=abuse.command_timeout_s, kill_leftovers=True
        )
        after = await sandbox.commands.run(["true"])
    found = f"{result.cause}{', infra' if result.infra else ''}"
    if not after.ok:
        found += f", then the sandbox is unusable ({after.cause})"
    return Control(name=abuse.name, expected=str(abuse.cause), found=found, cpu_s=result.cpu_s, id=sandbox.id)


async def _platform_kill(client: AsyncClient, environment: str) -> Control:
    """A running command whose sandbox the platform ends: infra, so that nobody scores it."""
    sandbox = await AsyncSandbox.create(base_spec(environment, role="control"), client=client)
    command = await sandbox.commands.start(["sleep", "600"])
    info = await sandbox.kill(cause=Cause.PLATFORM_KILLED)
    try:
        infra = (await command.wait(request_timeout_s=20.0)).infra
    except DsecError as error:
        infra = error.infra or ("cause" in error.details and Cause(error.details["cause"]).infra)
    found = f"{info.cause}, {'infra' if infra else 'not infra'}"
    return Control(name="the platform kills it", expected="platform_killed, infra", found=found, id=sandbox.id)

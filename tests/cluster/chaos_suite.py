"""The conformance suite as cases that are run again and again while parts of the platform die, and what became of each.

A case *passed*, was *lost* or is *wrong*. Lost: an error came out of it that says that the platform is at fault
(`infra`), or one of its sandboxes ended for such a cause; it says nothing about what it tests, and is to be run again.
All else that isn't as the suite says is wrong: bytes that are missing or come twice, a second run of a command, another
error than the one promised, an answer that never comes.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import itertools
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from enum import Enum
from typing import Any, TypeVar

import pytest
from msgspec import Struct

from dsec.errors import DsecError, SandboxEnded
from dsec.spec.causes import Cause
from dsec.testing import conformance as suite
from dsec.testing.conformance.kit import Feature, Sandboxes
from dsec.testing.remote import RemoteBackend

T = TypeVar("T")
CLASSES = (
    suite.TestCommands,
    suite.TestProcesses,
    suite.TestFiles,
    suite.TestOperations,
    suite.TestLifecycle,
    suite.TestAdoption,
)
SHORT = frozenset(
    {
        "TestCommands.test_a_timeout_keeps_what_there_was",
        "TestCommands.test_output_of_any_size[2]",
        "TestCommands.test_signals_from_outside",
        "TestCommands.test_stdin_of_any_size[3]",
        "TestProcesses.test_background_processes_live_on",
        "TestFiles.test_writing_replaces_appends_or_refuses",
        "TestOperations.test_a_key_finds_a_running_command_and_its_result",
        "TestOperations.test_a_key_never_runs_twice",
        "TestOperations.test_many_readers_each_from_where_it_likes",
        "TestLifecycle.test_destroy_ends_what_runs",
        "TestAdoption.test_a_new_edge_finds_them_with_their_files_and_commands",
        "TestAdoption.test_what_is_not_on_record_is_removed",
    }
)
"""What the short form takes."""
CLEANUP_S = 100.0
STEP_S = 150.0
"""Each step of a case ends by itself within this: what bounds a client's call (the silence of a server, retries, the
deadline of a creation) is shorter. What takes longer hangs; it is told with its stacks, and is wrong."""
LET_GO_S = 10.0
"""What is told to end, ends within this, or is left alone."""


class Verdict(Enum):
    """What became of a case."""

    PASSED = "passed"
    SKIPPED = "skipped"
    LOST = "lost"
    WRONG = "wrong"


class Case(Struct, frozen=True):
    """A test of the suite with its parameters."""

    name: str
    owner: type
    method: str
    arguments: dict[str, Any]


class Outcome(Struct, frozen=True):
    """What became of one run of a case."""

    case: str
    verdict: Verdict
    began: float
    ended: float
    why: str = ""


def cases(only: frozenset[str] | None = None) -> list[Case]:
    """All, or those of these names. Raises KeyError for one that isn't there."""
    found = {
        case.name: case
        for owner in CLASSES
        for method in sorted(vars(owner))
        if method.startswith("test_")
        for case in _parametrized(owner, method)
    }
    return list(found.values()) if only is None else [found[name] for name in sorted(only)]


def _parametrized(owner: type, method: str) -> Iterator[Case]:
    marks = [mark for mark in getattr(getattr(owner, method), "pytestmark", []) if mark.name == "parametrize"]
    choices: list[list[dict[str, Any]]] = []
    for mark in marks:
        names, values = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        choices.append([dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values])
    for number, chosen in enumerate(itertools.product(*choices)):
        arguments = {name: value for each in chosen for name, value in each.items()}
        yield Case(f"{owner.__name__}.{method}" + (f"[{number}]" if marks else ""), owner, method, arguments)


class ThroughApis:
    """The suite's factory: each next edge is reached through the next apiserver."""

    features = frozenset({Feature.PROCESSES, Feature.DISK_LIMIT})
    environment = "debian"
    crowd = 6
    usual: dict[str, Any] = {"memory_bytes": 64 << 20, "disk_bytes": 64 << 20}  # noqa: RUF012

    def __init__(self, urls: list[str], key: str) -> None:
        self.urls = urls
        self.key = key

    def make(self) -> RemoteBackend:
        self.urls = [*self.urls[1:], self.urls[0]]
        return RemoteBackend(self.urls[-1], self.key)

    async def kill_guest(self, sandbox_id: str) -> None:
        raise AssertionError("its edge is killed, not it")

    def fail_next_create(self) -> None:
        raise AssertionError("nothing of a server's is in reach here")


class Hung(Exception):
    """A step that doesn't end; its text has the stacks of all that waits."""


async def bounded(work: Coroutine[Any, Any, T], what: str) -> T:
    """A step to its end. Raises `Hung`, and leaves what can't be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=STEP_S)
        if task.done():
            return task.result()
        told = stacks()
    finally:
        task.cancel()
    await asyncio.wait([task], timeout=LET_GO_S)
    raise Hung(f"{what} has no end after {STEP_S:.0f} s{'' if task.done() else ', and cannot be cancelled'}:\n{told}")


def stacks() -> str:
    """Where each task of this loop waits."""
    text = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=text)
        chain, waits = [], task.get_coro()
        while waits is not None:
            chain.append(repr(waits))
            waits = getattr(waits, "cr_await", None) or getattr(waits, "ag_await", None)
        text.write("  waits for " + "\n    ".join(chain) + "\n")
    return text.getvalue()


async def run(case: Case, factory: ThroughApis) -> Outcome:
    """A case, once."""
    began = time.time()
    verdict, why = await _run(case, factory)
    return Outcome(case.name, verdict, began, time.time(), why)


async def _run(case: Case, factory: ThroughApis) -> tuple[Verdict, str]:
    found = Sandboxes(factory)
    try:
        try:
            return await _judged(case, found)
        finally:
            await bounded(_clean_up(found), "its cleaning up")
    except Hung as hung:
        return Verdict.WRONG, str(hung)


async def _judged(case: Case, found: Sandboxes) -> tuple[Verdict, str]:
    try:
        await bounded(found.backend.open({}), "opening")
        values = {"sandboxes": found, "factory": found.factory, "backend": found.backend, **case.arguments}
        method = getattr(case.owner(), case.method)
        arguments = {name: values[name] for name in inspect.signature(method).parameters}
        result = method(**arguments)
        if inspect.iscoroutine(result):
            await bounded(result, "the case itself")
    except pytest.skip.Exception as reason:
        return Verdict.SKIPPED, str(reason)
    except Hung:
        raise
    except Exception as error:  # noqa: BLE001 (it is judged)
        if is_infra(error):
            return Verdict.LOST, _brief(error)
        lost = await bounded(_lost(found), "looking for what was lost")
        if lost:
            return Verdict.LOST, lost
        return Verdict.WRONG, "".join(traceback.format_exception(error))
    else:
        return Verdict.PASSED, ""


def is_infra(error: BaseException) -> bool:
    """Whether it says, itself, that the platform is at fault; what it was made of may say otherwise."""
    cause = error.__cause__
    if isinstance(cause, SandboxEnded):
        return Cause(cause.details["cause"]).infra
    if isinstance(error, SandboxEnded):
        return Cause(error.details["cause"]).infra
    return isinstance(error, DsecError) and error.infra


async def _lost(found: Sandboxes) -> str:
    """Which of a case's sandboxes ended by the platform's fault."""
    for name, end in found.ends.items():
        if end.cause.infra:
            return f"{name}: {end.cause.value}: {end.message}"
    for name, instance in found.instances.items():
        try:
            end = await asyncio.wait_for(asyncio.ensure_future(instance.ended()), 3)
        except TimeoutError:
            continue
        except DsecError as error:
            if is_infra(error):
                return f"{name}: {_brief(error)}"
        else:
            if end.cause.infra:
                return f"{name}: {end.cause.value}: {end.message}"
    return ""


async def _clean_up(found: Sandboxes) -> None:
    """As the suite does; what dies meanwhile comes back."""
    deadline = time.monotonic() + CLEANUP_S
    while True:
        try:
            for sandbox_id in list(found.handles):
                await found.backend.destroy(sandbox_id, found.handles[sandbox_id])
                del found.handles[sandbox_id]
            await found.backend.close(keep=False)
        except DsecError as error:
            if not is_infra(error) or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
        else:
            return


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class Runner:
    """Runs cases, one after the other, until each has passed and nobody wants more."""

    def __init__(self, factory: ThroughApis, chosen: list[Case], *, wanted: Callable[[], bool], until: float) -> None:
        """`wanted`: whether to go on once each has passed. `until`: when it gives up (monotonic)."""
        self.outcomes: list[Outcome] = []
        self.failed: BaseException | None = None
        self.at = ""
        """What it does."""
        self._factory = factory
        self._chosen = chosen
        self._wanted = wanted
        self._until = until

    def __call__(self) -> None:
        """In a thread of its own: the suite's calls may block it."""
        try:
            asyncio.run(self._all())
        except BaseException as error:  # noqa: BLE001 (the test says it)
            self.failed = error

    async def _all(self) -> None:
        left = list(self._chosen)
        while left or self._wanted():
            again = []
            for case in left or self._chosen:
                assert time.monotonic() < self._until, f"{case.name} has not passed:\n{self._told(case)}"
                self.at = f"{case.name}, since {time.strftime('%H:%M:%S')}"
                outcome = await run(case, self._factory)
                self.outcomes.append(outcome)
                if outcome.verdict is Verdict.WRONG:
                    return
                if outcome.verdict is Verdict.LOST and left:
                    again.append(case)
                if not left and not self._wanted():
                    return
            left = again

    def _told(self, case: Case) -> str:
        return "\n".join(f"{each.verdict.value}: {each.why}" for each in self.outcomes if each.case == case.name)

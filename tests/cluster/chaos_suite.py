"""The conformance suite as cases that are run again and again while parts of the platform die, and what became of each.

A case *passed*, was *lost* or is *wrong*. Lost: an error came out of it that says that the platform is at fault
(`infra`), or one of its sandboxes ended for such a cause; it says nothing about what it tests, and is to be run again.
All else that isn't as the suite says is wrong: bytes that are missing or come twice, a second run of a command, another
error than the one promised, an answer that never comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
from msgspec import Struct

from dsec.errors import DsecError, SandboxEnded
from dsec.spec.causes import Cause
from dsec.testing import conformance as suite
from dsec.testing.conformance.kit import Feature, Sandboxes
from dsec.testing.remote import RemoteBackend

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
        "test_success_and_failure",
        "test_output_of_any_size",
        "test_stdin_of_any_size",
        "test_a_timeout_keeps_what_there_was",
        "test_signals_from_outside",
        "test_background_processes_live_on",
        "test_writing_replaces_appends_or_refuses",
        "test_a_key_finds_a_running_command_and_its_result",
        "test_a_key_never_runs_twice",
        "test_many_readers_each_from_where_it_likes",
        "test_an_environment_that_is_not_there",
        "test_destroy_ends_what_runs",
        "test_a_new_edge_finds_them_with_their_files_and_commands",
        "test_a_result_waits_through_two_edges",
        "test_what_is_not_on_record_is_removed",
        "test_counters",
    }
)
"""What the short form takes."""
CLEANUP_S = 120.0
CASE_S = 90.0
"""A case that waits longer counts as lost, which is only allowed while something was dead: a node that was cut off and
then killed never says that a connection is gone, and an apiserver has no bound on its silence."""


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
    """All, or those of these names."""
    return [
        case
        for owner in CLASSES
        for method in sorted(vars(owner))
        if method.startswith("test_") and (only is None or method in only)
        for case in _parametrized(owner, method)
    ]


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


async def run(case: Case, factory: ThroughApis) -> Outcome:
    """A case, once."""
    began = time.time()
    verdict, why = await _run(case, factory)
    return Outcome(case.name, verdict, began, time.time(), why)


async def _run(case: Case, factory: ThroughApis) -> tuple[Verdict, str]:
    found, bound = Sandboxes(factory), asyncio.timeout(CASE_S)
    try:
        await found.backend.open({})
        values = {"sandboxes": found, "factory": factory, "backend": found.backend, **case.arguments}
        method = getattr(case.owner(), case.method)
        arguments = {name: values[name] for name in inspect.signature(method).parameters}
        result = method(**arguments)
        if inspect.isawaitable(result):
            async with bound:
                await result
    except pytest.skip.Exception as reason:
        return Verdict.SKIPPED, str(reason)
    except Exception as error:  # noqa: BLE001 (it is judged)
        if is_infra(error):
            return Verdict.LOST, _brief(error)
        if bound.expired():
            return Verdict.LOST, f"no end within {CASE_S:.0f} s"
        lost = await _lost(found)
        if lost:
            return Verdict.LOST, lost
        return Verdict.WRONG, "".join(traceback.format_exception(error))
    else:
        return Verdict.PASSED, ""
    finally:
        await _clean_up(found)


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

    def __init__(self, factory: ThroughApis, chosen: list[Case], wanted: Callable[[], bool]) -> None:
        """`wanted`: whether to go on once each has passed."""
        self.outcomes: list[Outcome] = []
        self.failed: BaseException | None = None
        self._factory = factory
        self._chosen = chosen
        self._wanted = wanted

    def __call__(self) -> None:
        """In a thread of its own: the suite's calls may block it."""
        with contextlib.suppress(BaseException):
            try:
                asyncio.run(self._all())
            except BaseException as error:
                self.failed = error
                raise

    async def _all(self) -> None:
        left = list(self._chosen)
        while left or self._wanted():
            again = []
            for case in left or self._chosen:
                outcome = await run(case, self._factory)
                self.outcomes.append(outcome)
                if outcome.verdict is Verdict.LOST and left:
                    again.append(case)
                if not left and not self._wanted():
                    return
            left = again

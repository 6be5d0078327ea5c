"""From what a grader left to tests and a reward. Pure; the report may be forged or damaged by whoever is graded, so
that everything that isn't plainly right is worth nothing, and says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree

import msgspec
from msgspec import Struct

from dsec.spec.grading import CaseResult, CaseStatus, Grader, ReportKind, Scoring

MAX_REPORT_BYTES = 8 << 20
MAX_TESTS = 100_000
_MESSAGE = 2000
_PLAN = re.compile(r"1\.\.(\d{1,9})(?:\s*#.*)?")
_POINT = re.compile(r"(not )?ok\b(?:\s+(\d{1,9}))?(?:\s+-)?\s*([^#]*)(?:#\s*(skip|todo)\b.*)?", re.IGNORECASE)
_WORST = (CaseStatus.PASSED, CaseStatus.SKIPPED, CaseStatus.FAILED, CaseStatus.ERROR)
_PYTEST = {2: "it was interrupted", 3: "an internal error", 4: "a usage error", 5: "no tests were collected"}


class Outcome(Struct, frozen=True, kw_only=True):
    """A run's reward and its reasons."""

    reward: float
    tests: list[CaseResult] = []
    score: Any = None
    message: str = ""

    @property
    def passed(self) -> int:
        return sum(test.status is CaseStatus.PASSED for test in self.tests)

    @property
    def failed(self) -> int:
        return sum(test.status not in (CaseStatus.PASSED, CaseStatus.SKIPPED) for test in self.tests)


def judge(grader: Grader, exit_code: int, stdout: bytes, report: bytes | None) -> Outcome:
    """What a run is worth. `report`: the file's content, None where there is none."""
    kind = grader.report
    if kind is ReportKind.EXIT:
        return Outcome(reward=float(exit_code == 0))
    if kind is ReportKind.PYTEST and exit_code in _PYTEST:
        return Outcome(reward=0.0, message=f"pytest: {_PYTEST[exit_code]}")
    try:
        if kind is ReportKind.TAP:
            return _scored(grader, exit_code, parse_tap(stdout))
        if report is None:
            raise ValueError("the grader left no report")
        if kind is ReportKind.SCORE:
            return _score(exit_code, report)
        return _scored(grader, exit_code, parse_junit(report))
    except ValueError as error:
        return Outcome(reward=0.0, message=str(error)[:_MESSAGE])


def parse_junit(data: bytes) -> list[CaseResult]:
    """The tests of a JUnit XML file, each id once (the worst of its results). Raises ValueError."""
    text = _text(data)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("the report declares entities")
    try:
        top = ElementTree.fromstring(text)  # no entities, and of bounded size
    except ElementTree.ParseError as error:
        raise ValueError(f"the report is not XML: {error}") from None
    if top.tag not in ("testsuites", "testsuite"):
        raise ValueError(f"the report is not JUnit XML: it begins with <{top.tag[:40]}>")
    return _distinct(_case(case) for case in top.iter("testcase"))


def _case(case: ElementTree.Element) -> CaseResult:
    place, name = case.get("classname", ""), case.get("name", "")
    status, message = CaseStatus.PASSED, ""
    for child in case:
        found = {"failure": CaseStatus.FAILED, "error": CaseStatus.ERROR, "skipped": CaseStatus.SKIPPED}.get(child.tag)
        if found is not None and _WORST.index(found) > _WORST.index(status):
            status = found
            message = (child.get("message") or child.text or "")[:_MESSAGE]
    try:
        seconds = float(case.get("time", "0"))
    except ValueError:
        seconds = 0.0
    seconds = seconds if math.isfinite(seconds) else 0.0
    return CaseResult(f"{place}::{name}" if place else name, status, seconds, message)


def parse_tap(data: bytes) -> list[CaseResult]:
    """The tests of a TAP stream; of several with one name the later ones have their numbers, too. Lines that aren't TAP
    are skipped; the plan has to be there once and to be kept. Raises ValueError."""
    plan: int | None = None
    found: list[CaseResult] = []
    numbers: set[int] = set()
    names: set[str] = set()
    for line in _text(data).splitlines():
        if line.lower().startswith("bail out!"):
            raise ValueError(f"the grader gave up: {line[:200]}")
        if match := _PLAN.fullmatch(line.rstrip()):
            if plan is not None:
                raise ValueError("the report has two plans")
            plan = int(match[1])
        elif match := _POINT.fullmatch(line.rstrip()):
            number = int(match[2]) if match[2] else len(found) + 1
            if number in numbers:
                raise ValueError(f"the report has test {number} twice")
            numbers.add(number)
            directive = (match[4] or "").lower()
            status = CaseStatus.FAILED if match[1] else CaseStatus.PASSED
            if directive == "skip" or (directive == "todo" and match[1]):
                status = CaseStatus.SKIPPED
            name = match[3].strip() or str(number)
            found.append(CaseResult(f"{name} ({number})" if name in names else name, status))
            names.add(name)
            if len(found) > MAX_TESTS:
                raise ValueError(f"the report has more than {MAX_TESTS} tests")
    if plan is None:
        raise ValueError("the report has no plan (`1..N`)")
    if numbers != set(range(1, plan + 1)):
        raise ValueError(f"the report has {len(numbers)} of {plan} planned tests")
    return _distinct(found)


def _distinct(tests: Iterable[CaseResult]) -> list[CaseResult]:
    found: dict[str, CaseResult] = {}
    for test in tests:
        known = found.get(test.id)
        if known is None or _WORST.index(test.status) > _WORST.index(known.status):
            found[test.id] = test
        if len(found) > MAX_TESTS:
            raise ValueError(f"the report has more than {MAX_TESTS} tests")
    return list(found.values())


def _scored(grader: Grader, exit_code: int, tests: list[CaseResult]) -> Outcome:
    known = {test.id for test in tests}
    tests = tests + [CaseResult(name, CaseStatus.MISSING) for name in dict.fromkeys(grader.tests) if name not in known]
    required = set(grader.tests)
    tests = [
        CaseResult(test.id, CaseStatus.FAILED, test.seconds, "it was skipped, and has to pass")
        if test.status is CaseStatus.SKIPPED and test.id in required
        else test
        for test in tests
    ]
    outcome = Outcome(reward=0.0, tests=tests)
    passed, failed = outcome.passed, outcome.failed
    if passed + failed < max(grader.least_tests, 1):
        return msgspec.structs.replace(outcome, message=f"{passed + failed} tests ran; at least {grader.least_tests}")
    if exit_code != 0 and not failed:
        return msgspec.structs.replace(outcome, message=f"all tests passed, and yet the exit code is {exit_code}")
    if exit_code == 0 and failed and grader.report is ReportKind.PYTEST:
        return msgspec.structs.replace(outcome, message="tests failed, and yet pytest's exit code is 0")
    if grader.scoring is Scoring.SHARE:
        return msgspec.structs.replace(outcome, reward=passed / (passed + failed))
    return msgspec.structs.replace(outcome, reward=float(failed == 0))


def _score(exit_code: int, data: bytes) -> Outcome:
    try:
        score = msgspec.json.decode(_text(data))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the score is not JSON: {error}") from None
    reward = score.get("reward") if isinstance(score, dict) else score
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise ValueError("the score is not a number from 0 to 1")
    if exit_code != 0:
        return Outcome(reward=0.0, score=score, message=f"there is a score, and yet the exit code is {exit_code}")
    return Outcome(reward=float(reward), score=score)


def _text(data: bytes) -> str:
    if len(data) > MAX_REPORT_BYTES:
        raise ValueError(f"the report is over {MAX_REPORT_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError("the report is not UTF-8") from None
    return text.removeprefix("\ufeff")


def differ(outcomes: Iterable[Outcome]) -> bool:
    """Whether the same change was judged differently."""
    seen = {(each.reward, tuple(sorted((test.id, test.status) for test in each.tests))) for each in outcomes}
    return len(seen) > 1

"""Reports of graders become rewards; whatever is damaged or forged is worth nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.errors import InvalidRequest
from dsec.plan.reports import Outcome, differ, judge, parse_junit, parse_tap
from dsec.plan.submission import Allowed, Place
from dsec.spec.grading import CaseStatus, Grader, ReportKind, Scoring, Why

JUNIT = b"""<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="4">
<testcase classname="tests.test_a" name="test_good" time="0.5" />
<testcase classname="tests.test_a" name="test_bad"><failure message="assert 1 == 2">trace</failure></testcase>
<testcase classname="tests.test_a" name="test_broken"><error message="fixture" /></testcase>
<testcase classname="tests.test_a" name="test_left"><skipped message="why" /></testcase></testsuite></testsuites>"""


def grader(kind: ReportKind, **fields: object) -> Grader:
    return Grader(argv=["x"], report=kind, **fields)  # type: ignore[arg-type]


def test_junit() -> None:
    tests = {test.id.rpartition("::")[2]: test for test in parse_junit(JUNIT)}
    assert {name: test.status.value for name, test in tests.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_broken": "error",
        "test_left": "skipped",
    }
    assert tests["test_good"].seconds == 0.5
    assert tests["test_bad"].message == "assert 1 == 2"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<a/>",
        b"<testsuite>",
        b"\xff\xfe<\0a\0",
        b'<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>',
        b"<testsuite/>" + b" " * (9 << 20),
    ],
)
def test_damaged_junit_is_worth_nothing(data: bytes) -> None:
    outcome = judge(grader(ReportKind.JUNIT), 0, b"", data)
    assert outcome.reward == 0
    assert outcome.message


def test_a_test_that_comes_twice_counts_as_the_worst() -> None:
    case = b'<testcase name="a"/>'
    bad = b'<testcase name="a"><failure/></testcase>'
    for order in (case + bad, bad + case):
        (test,) = parse_junit(b"<testsuite>" + order + b"</testsuite>")
        assert test.status is CaseStatus.FAILED


def test_tap_of_tests_with_one_name() -> None:
    """What their numbers tell apart isn't one test: a grader of two that both passed had too few."""
    both = b"1..3\nok 1 - adds\nok 2 - adds\nok 3\n"
    assert [test.id for test in parse_tap(both)] == ["adds", "adds (2)", "3"]
    asked = grader(ReportKind.TAP, least_tests=3, tests=["adds"])
    assert judge(asked, 0, both, None).reward == 1.0
    assert judge(asked, 1, both.replace(b"ok 2", b"not ok 2"), None).reward == 0.0
    assert judge(asked, 1, both.replace(b"ok 1", b"not ok 1"), None).reward == 0.0


def test_tap() -> None:
    text = (
        b"TAP version 13\nnoise\nok 1 - one\nnot ok 2 two\n  ---\nok 3 # SKIP not here\nnot ok 4 # todo later\n1..4\n"
    )
    assert [(test.id, test.status.value) for test in parse_tap(text)] == [
        ("one", "passed"),
        ("two", "failed"),
        ("3", "skipped"),
        ("4", "skipped"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ok 1\n",
        "1..2\nok 1\n",
        "1..1\n1..1\nok 1\n",
        "1..1\nok 1\nok 1\n",
        "1..1\nok 2\n",
        "1..1\nok 1\nBail out! x\n",
    ],
)
def test_a_plan_that_is_not_kept_is_worth_nothing(text: str) -> None:
    assert judge(grader(ReportKind.TAP), 0, text.encode(), None).reward == 0


def test_rewards() -> None:
    half = b"1..2\nok 1\nnot ok 2\n"
    assert judge(grader(ReportKind.TAP), 1, half, None).reward == 0
    assert judge(grader(ReportKind.TAP, scoring=Scoring.SHARE), 1, half, None).reward == 0.5
    good = b"1..2\nok 1\nok 2\n"
    assert judge(grader(ReportKind.TAP), 0, good, None).reward == 1
    assert judge(grader(ReportKind.TAP), 3, good, None).reward == 0  # it says two things
    assert judge(grader(ReportKind.TAP, least_tests=3), 0, good, None).reward == 0
    missing = judge(grader(ReportKind.TAP, tests=["1", "2", "3"], scoring=Scoring.SHARE), 0, good, None)
    assert (missing.passed, missing.failed) == (2, 1)
    skipped = b"1..2\nok 1\nok 2 # skip\n"
    assert judge(grader(ReportKind.TAP), 0, skipped, None).reward == 1
    assert judge(grader(ReportKind.TAP, tests=["2"]), 0, skipped, None).reward == 0
    assert judge(grader(ReportKind.TAP), 0, b"1..0\n", None).reward == 0
    assert judge(grader(ReportKind.JUNIT), 0, b"", None).reward == 0
    assert [judge(grader(ReportKind.EXIT), code, b"", None).reward for code in (0, 1, 137)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("0.25", 0.25),
        ('{"reward": 1, "why": ["x"]}', 1),
        ("NaN", 0),
        ("true", 0),
        ("2", 0),
        ("-1", 0),
        ('"1"', 0),
        ("[" * 5000, 0),
        ("{}", 0),
    ],
)
def test_scores(text: str, reward: float) -> None:
    assert judge(grader(ReportKind.SCORE), 0, b"", text.encode()).reward == reward
    assert judge(grader(ReportKind.SCORE), 1, b"", text.encode()).reward == 0


def test_what_pytest_really_writes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")

    def run(*which: str) -> Outcome:
        report = tmp_path / "report"
        command = [sys.executable, "-m", "pytest", "-q", *which, "-p", "no:cacheprovider", f"--junitxml={report}"]
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        code = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False).returncode
        return judge(grader(ReportKind.PYTEST), code, b"", report.read_bytes() if report.exists() else None)

    both = run("test_it.py")
    assert (both.reward, both.passed, both.failed) == (0, 1, 1)
    assert run("test_it.py::test_a").reward == 1
    none = run("test_it.py", "-k", "nothing")
    assert (none.reward, none.message) == (0, "pytest: no tests were collected")
    assert run("missing.py").message == "pytest: a usage error"


def test_runs_that_differ() -> None:
    one = judge(grader(ReportKind.TAP), 0, b"1..1\nok 1 - a\n", None)
    other = judge(grader(ReportKind.TAP), 0, b"1..1\nok 1 - b\n", None)
    assert not differ([one, one])
    assert differ([one, other])


def test_allowed_paths() -> None:
    allowed = Allowed(["/p/src/", "/p/one.cfg", "/p/src/deep/conftest.py"], hidden=["/p/src/tests/test_x.py"])
    places = {
        b"/": 0,
        b"/p": 0,
        b"/p/src": 1,
        b"/p/srcs": 2,
        b"/p/src/a": 1,
        b"/p/one.cfg": 1,
        b"/p/one.cfg2": 2,
        b"/q": 2,
    }
    order = [Place.ABOVE, Place.INSIDE, Place.OUTSIDE]
    assert {path: order.index(allowed.place(path)) for path in places if path != b"/"} == {
        path: place for path, place in places.items() if path != b"/"
    }
    refusals = {
        b"/p/src/conftest.py": Why.STEERS,
        b"/p/src/Conftest.PY": Why.STEERS,
        b"/p/src/deep/conftest.py": None,
        b"/p/src/a.pyc": Why.STEERS,
        b"/p/src/tests/test_x.abi3.so": Why.SHADOWS,
        b"/p/src/tests/test_x": Why.SHADOWS,
        b"/p/src/test_x.py": None,
        b"/p/src/.git": Why.STEERS,
    }
    assert {path: allowed.refusal(path) for path in refusals} == refusals
    for wrong in ("/", "//", "/a/../b", "/./a"):
        with pytest.raises(InvalidRequest):
            Allowed([wrong])

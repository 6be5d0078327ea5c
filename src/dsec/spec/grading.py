"""What a caller asks of a verification, and the verdict: the one set of types for SDK, wire and API schema.

Values are frozen; unknown fields are refused. docs/GRADING.md says what holds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

from dsec.spec.causes import Cause
from dsec.spec.sandbox import GIB, MIB, Seconds

AbsolutePath = Annotated[str, Meta(pattern=r"^/[^\x00]*$(?!\n)", max_length=4000)]
NAMES_AT_MOST = 10_000


class ReportKind(StrEnum):
    """How a grader says what it found."""

    EXIT = "exit"
    """Exit code 0: all is well."""
    TAP = "tap"
    """Test Anything Protocol on stdout."""
    JUNIT = "junit"
    """JUnit XML in the file that `DSEC_REPORT` names."""
    PYTEST = "pytest"
    """As `junit`; argv is a pytest command, which gets the arguments for it, and whose exit codes are understood."""
    SCORE = "score"
    """JSON in the file that `DSEC_REPORT` names: a number from 0 to 1, or an object with it as `reward`."""


class Scoring(StrEnum):
    """From tests to a reward."""

    ALL = "all"
    """1 where every test passed, else 0."""
    SHARE = "share"
    """The share of the tests that passed."""


class Grader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command that judges, and what it needs."""

    argv: Annotated[list[str], Meta(min_length=1, max_length=1000)]
    files: Annotated[dict[AbsolutePath, bytes], Meta(max_length=1000)] = {}
    """Hidden files, by path; base64 in JSON. They win over everything of the agent's."""
    layers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=50)] = []
    """Layers with hidden files, above the environment's, by a name that the caller's project may read."""
    user: Annotated[str, Meta(min_length=1, max_length=100)] = "nobody"
    """`root`: hidden files are readable by nobody else, so that the grader can run the agent's code as another user."""
    cwd: AbsolutePath | None = None
    """None: the agent's sandbox's workdir."""
    env: dict[str, str] = {}
    report: ReportKind = ReportKind.EXIT
    scoring: Scoring = Scoring.ALL
    tests: Annotated[list[str], Meta(max_length=NAMES_AT_MOST)] = []
    """Ids that have to be in the report; a missing one counts as failed."""
    least_tests: Annotated[int, Meta(ge=0, le=1_000_000)] = 1
    """Fewer than so many tests that passed or failed: no reward."""
    timeout_s: Seconds = 600.0
    output_bytes: Annotated[int, Meta(ge=0, le=64 * MIB)] = 4 * MIB
    cpus: Annotated[float, Meta(gt=0, le=4096)] = 1.0
    memory_bytes: Annotated[int, Meta(ge=16 * MIB, le=1 << 46)] = 1 * GIB
    disk_bytes: Annotated[int, Meta(ge=1 * MIB, le=1 << 46)] = 4 * GIB
    pids: Annotated[int, Meta(ge=4, le=1 << 20)] = 512


class VerifySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One verification of a sandbox."""

    grader: Grader
    paths: Annotated[list[AbsolutePath], Meta(min_length=1, max_length=1000)]
    """What of the agent's changes is taken: files, or directories with all below."""
    repeats: Annotated[int, Meta(ge=1, le=20)] = 1
    """Graders, each in a fresh sandbox: where they differ, the verdict is flaky."""


class CaseStatus(StrEnum):
    """What became of a test."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    MISSING = "missing"


class CaseResult(Struct, frozen=True, omit_defaults=True):
    """One test of a report."""

    id: str
    status: CaseStatus
    seconds: float = 0.0
    message: str = ""


class Why(StrEnum):
    """Why a change was not taken."""

    OUTSIDE = "outside"  # of the allowed paths
    STEERS = "steers"  # interpreters, test runners or git read it
    SHADOWS = "shadows"  # a hidden file
    LINK = "link"  # symbolic: it could lead anywhere
    SPECIAL = "special"  # a device, FIFO or socket


class Untaken(Struct, frozen=True, omit_defaults=True):
    """A change of the agent's that the grader never saw."""

    path: str
    kind: str
    """`file`, `directory`, `symlink`, `special` or `removed`."""
    why: Why


class GraderRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One grader's run, in a sandbox of its own."""

    sandbox: str
    reward: float | None
    """None: the platform failed."""
    exit_code: int
    cause: Cause
    infra: bool = False
    message: str = ""
    """Why the reward isn't what the report seems to say."""
    passed: int = 0
    failed: int = 0
    tests: list[CaseResult] = []
    score: Any = None
    """What a grader of the kind `score` wrote."""
    stdout: str = ""
    """Its last part."""
    stderr: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a verification found."""

    reward: float | None
    """From 0 to 1; the least of the runs'. None: the platform failed in one."""
    infra: bool = False
    flaky: bool = False
    """The runs differ."""
    message: str = ""
    runs: list[GraderRun]
    taken: list[str] = []
    """The changes that the grader got."""
    taken_total: int = 0
    untaken: list[Untaken] = []
    """The others: at most 1,000 of them."""
    untaken_total: int = 0

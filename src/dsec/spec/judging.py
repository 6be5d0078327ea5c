"""What an online judge is asked, and its verdicts: the types for wire and API.

Values are frozen; unknown fields are refused. docs/JUDGE.md says what holds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from dsec.spec.causes import Cause
from dsec.spec.sandbox import MIB, Name

CaseSeconds = Annotated[float, Meta(gt=0, le=3600)]


class Language(StrEnum):
    """Each needs its toolchain in the environment."""

    PYTHON = "python"
    BASH = "bash"
    C = "c"
    CPP = "cpp"
    RUST = "rust"
    GO = "go"
    NODE = "node"
    JAVA = "java"


SUFFIXES = {
    ".py": Language.PYTHON,
    ".sh": Language.BASH,
    ".c": Language.C,
    ".cpp": Language.CPP,
    ".cc": Language.CPP,
    ".rs": Language.RUST,
    ".go": Language.GO,
    ".js": Language.NODE,
    ".java": Language.JAVA,
}
"""Of files, by which a program's language is known."""


class Word(StrEnum):
    """A case's verdict, by the names of the field."""

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong_answer"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    RUNTIME_ERROR = "runtime_error"
    COMPILE_ERROR = "compile_error"
    PLATFORM_ERROR = "platform_error"


class Checker(StrEnum):
    """How output is compared."""

    EXACT = "exact"
    """Byte for byte."""
    TOKENS = "tokens"
    """Word for word, whatever the white space."""
    FLOATS = "floats"
    """As `tokens`; numbers may differ by `tolerance`, absolute or relative."""
    PROGRAM = "program"
    """A Python program, in a sandbox of its own, gets the files `input`, `output` and `expected` as arguments and
    accepts by the exit code 42, refuses by 43; anything else is a fault of the checker's, and `platform_error`."""


class JudgeLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one case."""

    cpu_s: CaseSeconds = 2.0
    wall_s: CaseSeconds = 10.0
    memory_bytes: Annotated[int, Meta(ge=16 * MIB, le=1 << 40)] = 256 * MIB
    output_bytes: Annotated[int, Meta(ge=0, le=64 * MIB)] = 16 * MIB
    pids: Annotated[int, Meta(ge=4, le=4096)] = 64
    compile_s: CaseSeconds = 30.0


class Case(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the submission."""

    stdin: Annotated[str, Meta(max_length=64 * MIB)] = ""
    expected: Annotated[str, Meta(max_length=64 * MIB)] = ""


class JudgeSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One submission and its cases."""

    environment: Name
    language: Language
    source: Annotated[str, Meta(max_length=4 * MIB)]
    cases: Annotated[list[Case], Meta(min_length=1, max_length=10_000)]
    checker: Checker = Checker.TOKENS
    checker_source: Annotated[str, Meta(max_length=1 * MIB)] = ""
    tolerance: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    limits: JudgeLimits = JudgeLimits()
    stop_early: bool = False
    """After the first case that isn't accepted, in their order."""


class CaseVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a case."""

    index: int
    """-1: of the compilation."""
    verdict: Word
    infra: bool = False
    exit_code: int = 0
    cause: Cause = Cause.EXITED
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int = 0
    """The most that a process of it had resident."""
    stdout: str = ""
    """Its last part, where the case isn't accepted."""
    stderr: str = ""
    """Its last part; of a failed compilation the compiler's words."""
    message: str = ""
    """The checker's words, or what went wrong."""


class JudgeVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The submission's: that of the first case, in their order, that isn't accepted."""

    verdict: Word
    infra: bool = False
    passed: int = 0
    cases: int = 0
    compiled: bool = False
    """By this call: not found in the cache, and not of an interpreted language."""


class JudgeLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the answer: a case as it ends, or the verdict, which is the last."""

    case: CaseVerdict | None = None
    result: JudgeVerdict | None = None


class Judged(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A submission's verdict with those of its cases."""

    verdict: Word
    infra: bool = False
    """The platform failed, or the checker: to be masked, it says nothing about the submission."""
    passed: int = 0
    total: int = 0
    compiled: bool = False
    cases: list[CaseVerdict] = []
    """In their order; after an early stop some are missing. Of a failed compilation one, with the index -1."""

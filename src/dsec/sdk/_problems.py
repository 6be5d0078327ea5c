"""Problems as directories: what `dsec judge` reads, and `Problem.read`.

problem.toml      title, text, checker, tolerance, [limits] (cpu_s, wall_s, memory_mib, output_kib, pids, compile_s)
cases/N.in, N.out stdin, and what is expected
checker.py        of the checker "program"
submissions/VERDICT/*   programs whose verdict is known
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dsec.errors import InvalidRequest
from dsec.spec.judging import SUFFIXES, Case, Checker, JudgeLimits, JudgeSpec, Language, Word

_UNITS = {"memory_mib": ("memory_bytes", 1 << 20), "output_kib": ("output_bytes", 1 << 10)}


class _Told(Struct, forbid_unknown_fields=True):
    """`problem.toml`."""

    title: str = ""
    text: str = ""
    checker: Checker = Checker.TOKENS
    tolerance: float = 1e-6
    limits: dict[str, float] = {}


class Submission(Struct, frozen=True):
    """A program, and the verdict that it is known to get."""

    path: Path
    expected: Word


class Problem(Struct, frozen=True, kw_only=True):
    """A problem: its cases, how they are judged, and submissions of known verdicts."""

    name: str
    title: str
    text: str
    cases: list[Case]
    checker: Checker
    checker_source: str
    tolerance: float
    limits: JudgeLimits
    submissions: list[Submission]

    @classmethod
    def read(cls, directory: str | Path) -> Problem:
        """From its directory. Raises `InvalidRequest`."""
        top = Path(directory)
        told = _told(top)
        cases = [
            Case(stdin=_text(path), expected=_text(path.with_suffix(".out")))
            for path in sorted((top / "cases").glob("*.in"), key=_number)
        ]
        if not cases:
            raise InvalidRequest(f"{top} has no cases", remedy="Each is two files: cases/1.in and cases/1.out.")
        return cls(
            name=top.resolve().name,
            title=told.title,
            text=told.text.strip(),
            cases=cases,
            checker=told.checker,
            checker_source=_text(top / "checker.py") if told.checker is Checker.PROGRAM else "",
            tolerance=told.tolerance,
            limits=_limits(top, told.limits),
            submissions=_submissions(top),
        )

    def spec(
        self,
        source: str | Path,
        language: Language | str | None = None,
        *,
        environment: str = "debian",
        stop_early: bool = False,
    ) -> JudgeSpec:
        """What to ask of a judge for a submission: a file, whose suffix says the language, or its text. Raises
        `InvalidRequest`."""
        if isinstance(source, Path):
            language = language or language_of(source)
            source = _text(source)
        elif language is None:
            raise InvalidRequest("a source without a file's name needs `language`", field="language")
        return JudgeSpec(
            environment=environment,
            language=_language(language),
            source=source,
            cases=self.cases,
            checker=self.checker,
            checker_source=self.checker_source,
            tolerance=self.tolerance,
            limits=self.limits,
            stop_early=stop_early,
        )


def language_of(path: Path) -> Language:
    """By a file's suffix. Raises `InvalidRequest`."""
    found = SUFFIXES.get(path.suffix)
    if found is None:
        known = ", ".join(SUFFIXES)
        raise InvalidRequest(f"the language of {path.name} isn't known", remedy=f"Name it, or use one of {known}.")
    return found


def _language(name: str) -> Language:
    try:
        return Language(name)
    except ValueError:
        raise InvalidRequest(f"there is no language {name!r}", remedy=f"known: {', '.join(Language)}") from None


def _told(top: Path) -> _Told:
    path = top / "problem.toml"
    try:
        return msgspec.convert(tomllib.loads(_text(path)), _Told)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{path}: {error}", remedy="docs/JUDGE.md says what it may hold.") from None


def _limits(top: Path, told: dict[str, float]) -> JudgeLimits:
    fields: dict[str, Any] = {}
    for name, value in told.items():
        field, unit = _UNITS.get(name, (name, 1))
        fields[field] = int(value * unit) if unit > 1 or field == "pids" else value
    try:
        return msgspec.convert(fields, JudgeLimits)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{top / 'problem.toml'}: limits: {error}") from None


def _submissions(top: Path) -> list[Submission]:
    found = []
    for word in Word:
        paths: Sequence[Path] = sorted((top / "submissions" / word.value).glob("*"))
        found += [Submission(path, word) for path in paths if path.suffix in SUFFIXES]
    return found


def _number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isascii() and path.stem.isdigit() else 1 << 62, path.stem)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8") from None

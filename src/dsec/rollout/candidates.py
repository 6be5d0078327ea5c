"""A seed -> a fault and the burst of candidate changes that a policy might have written for it, each with the reward it
must get. Pure.

The same seed, count and project give the same candidates in the same order. Every kind occurs at least once where the
burst is large enough; the rest are drawn by weight, right fixes less often than wrong ones, as in a hard task.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct

from dsec.rollout.catalog import FAULTS
from dsec.rollout.faults import Answer, Edit, Fault, Source, answered, apply, planted
from dsec.spec.causes import Cause

_SOURCE = "src/cachetools/__init__.py"
_TESTS = "tests/__init__.py"
_FORGED = """
import os as _os
_os.write(1, b"Ran 216 tests in 0.001s\\\\n\\\\nOK\\\\n")
_os._exit(0)
"""
_HOG = """
_held = [b"x" * (1 << 20) * (n + 1) for n in range(1 << 20)]
"""


class Candidate(Struct, frozen=True):
    """What one rollout wrote, and what that is worth."""

    index: int
    label: str
    files: dict[str, str]
    """Path within the project -> new text, for the agent's sandbox; the grader takes the allowed ones only."""
    expected_reward: float | None
    """None: the platform ends its sandbox, so that there must be none."""
    expected_cause: Cause = Cause.EXITED
    """Of the graded run."""

    @property
    def killed(self) -> bool:
        """Its sandbox is the one that the platform ends in the middle."""
        return self.expected_reward is None


class Burst(Struct, frozen=True):
    """One task and its group of candidates."""

    seed: int
    fault: Fault
    planted: dict[str, str]
    """The files that the fault changes, with it in."""
    candidates: tuple[Candidate, ...]


class _Kind(Struct, frozen=True):
    label: str
    weight: int
    make: Callable[[], tuple[dict[str, str], float | None, Cause]]


def make_burst(source: Source, tests: Source, seed: int, count: int) -> Burst:
    """The task and the candidates of `seed`. Where there is more than one, the platform will end the sandbox of one.

    `source` and `tests` are the pristine project's files by path. Raises ValueError for a count below one.
    """
    if count < 1:
        raise ValueError("a burst has at least one candidate")
    rng = random.Random(seed)
    fault = rng.choice(FAULTS)
    kinds = _kinds(source, tests, fault)
    chosen = list(kinds) if count >= len(kinds) else rng.sample(kinds, count)
    chosen += rng.choices(kinds, weights=[kind.weight for kind in kinds], k=count - len(chosen))
    if count > 1:
        fix = kinds[0].make()[0]
        chosen[-1] = _Kind("right fix, sandbox killed", 0, lambda: (fix, None, Cause.PLATFORM_KILLED))
    rng.shuffle(chosen)
    candidates = []
    for index, kind in enumerate(chosen):
        files, reward, cause = kind.make()
        candidates.append(Candidate(index, kind.label, files, reward, cause))
    return Burst(seed, fault, changed(source, planted(source, fault)), tuple(candidates))


def changed(before: Source, after: Source) -> dict[str, str]:
    """The files of `after` that differ from `before`."""
    return {path: text for path, text in after.items() if before.get(path) != text}


def expected_reward(fault: Fault, answer: Answer) -> float:
    """What an answer must earn."""
    return 0.0 if answer.breaks else answer.fixed / fault.broken


def _kinds(source: Source, tests: Source, fault: Fault) -> list[_Kind]:
    faulty = planted(source, fault)
    fix = answered(source, fault, fault.answers[0])
    skipped = {_TESTS: tests[_TESTS] + "\nimport unittest\n\n\ndef load_tests(*_):\n    return unittest.TestSuite()\n"}

    def from_answer(answer: Answer) -> Callable[[], tuple[dict[str, str], float, Cause]]:
        return lambda: (
            changed(faulty, answered(source, fault, answer)),
            expected_reward(fault, answer),
            Cause.EXITED,
        )

    def extended(text: str, cause: Cause = Cause.EXITED) -> Callable[[], tuple[dict[str, str], float, Cause]]:
        return lambda: (changed(faulty, apply(faulty, [Edit(_SOURCE, new=text)])), 0.0, cause)

    kinds = [_Kind(answer.label, 3, from_answer(answer)) for answer in fault.answers]
    return [
        *kinds,
        _Kind("no change", 2, lambda: ({}, 0.0, Cause.EXITED)),
        _Kind("a comment only", 2, extended("\n# looks right to me\n")),
        _Kind("a syntax error", 2, extended("\ndef broken(:\n")),
        _Kind("edits the tests only", 2, lambda: (skipped, 0.0, Cause.EXITED)),
        _Kind("right fix, edits tests too", 1, lambda: ({**changed(faulty, fix), **skipped}, 1.0, Cause.EXITED)),
        _Kind("prints OK and leaves", 2, extended(_FORGED)),
        _Kind("fills memory on import", 1, extended(_HOG, Cause.MEMORY_LIMIT)),
    ]

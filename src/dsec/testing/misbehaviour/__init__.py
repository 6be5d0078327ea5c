"""The catalogue of misbehaviour that training agents have shown, and more, as a suite for every backend.

`CASES` is the catalogue, `run_cases` tries it in real sandboxes of a server, `dsec audit --self-test` does that from
the command line. docs/THREATS.md says what is claimed; tests/security attacks each claim in more ways.
"""

from __future__ import annotations

from dsec.testing.misbehaviour.arena import Arena, run_cases
from dsec.testing.misbehaviour.attempts import ATTEMPTS
from dsec.testing.misbehaviour.case import Case, Check, Outcome, Skipped, Verdict
from dsec.testing.misbehaviour.outside import CHECKS

CASES: tuple[Case, ...] = (*ATTEMPTS, *CHECKS)

__all__ = ["CASES", "Arena", "Case", "Check", "Outcome", "Skipped", "Verdict", "run_cases"]

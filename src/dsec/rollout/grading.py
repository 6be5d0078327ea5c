"""From a grader's report to a reward. Pure.

The reward is the share of the tests broken by the fault that pass again; 0 as soon as any other test fails, a test is
missing, or there is no report. So the untouched source earns 1, the fault left in earns 0, half a fix earns its half,
and breaking something else to mend something earns nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

INSIDE = Path(__file__).with_name("inside.py")
"""The runner that the grader's sandbox gets; the agent's never holds it."""


class Report(Struct, frozen=True):
    """What the tests did."""

    ran: int
    failed: tuple[str, ...]
    ids: str
    """Digest of the ids of all tests that were found."""

    @property
    def passed(self) -> int:
        return self.ran - len(self.failed)


class Scale(Struct, frozen=True):
    """What a report is measured against: taken by the run's own controls, never from a candidate's sandbox."""

    ran: int
    ids: str
    broken: frozenset[str]
    """Tests that fail with the fault left in."""


def parse_report(output: bytes, nonce: str) -> Report | None:
    """The report on the last line that starts with `nonce`, or None where there is none."""
    prefix = nonce.encode() + b" "
    for line in reversed(output.splitlines()):
        if line.startswith(prefix):
            try:
                return msgspec.json.decode(line[len(prefix) :], type=Report)
            except msgspec.MsgspecError:
                return None
    return None


def scale(pristine: Report, faulty: Report) -> Scale:
    """What candidates are measured against. Raises ValueError where the controls themselves are wrong."""
    if pristine.failed or not pristine.ran:
        raise ValueError(f"the untouched source fails {len(pristine.failed)} of {pristine.ran} tests")
    if faulty.ids != pristine.ids or not faulty.failed:
        raise ValueError("the fault breaks no test, or breaks the suite itself")
    return Scale(pristine.ran, pristine.ids, frozenset(faulty.failed))


def reward(report: Report | None, measure: Scale) -> float:
    """Between 0 and 1."""
    if report is None or report.ids != measure.ids or report.ran != measure.ran:
        return 0.0
    failed = frozenset(report.failed)
    if failed - measure.broken:
        return 0.0
    return len(measure.broken - failed) / len(measure.broken)

"""The published catalogue of misbehaviour, against a real server; and the harness, which must be able to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from dsec.rollout.server import LocalServer
from dsec.testing.misbehaviour import CASES, Arena, Case, Check, Skipped, Verdict, run_cases

pytestmark = pytest.mark.root


@pytest.fixture
async def arena(debian_state: Path) -> AsyncIterator[Arena]:
    server = await LocalServer.start(debian_state)
    try:
        yield Arena(server.client)
    finally:
        await server.stop()


def test_the_catalogue_is_well_formed() -> None:
    names = [case.id for case in CASES]
    assert len(set(names)) == len(names)
    assert all(case.tries and case.expected for case in CASES)
    assert all(isinstance(case, Check) or case.attempt for case in CASES)


async def test_every_case_is_as_expected(arena: Arena) -> None:
    outcomes = await run_cases(arena, CASES)
    assert [outcome for outcome in outcomes if not outcome.ok] == []
    assert len(outcomes) == len(CASES)
    assert {outcome.case for outcome in outcomes if outcome.skipped} <= {"newer-release"}


async def test_a_broken_expectation_is_reported(arena: Arena) -> None:
    """Wrong expectations, an attempt that says nothing, one that ends its process, a check that is never decided, a
    sandbox that came to harm."""

    async def harmed(arena: Arena) -> Verdict:
        async with arena.sandbox() as box:
            await box.kill()
            return Verdict(not (harm := await arena.unharmed(box)), "", harm)

    async def skipped(_: Arena) -> Verdict:
        raise Skipped("not here")

    bpf = next(case for case in CASES if case.id == "bpf")
    cases = [
        replace(bpf, expected="allowed"),
        bpf_right := replace(bpf, id="right"),
        Case(id="crash", group="g", tries="t", expected="fine", attempt="os.kill(os.getpid(), 11)"),
        Case(id="raises", group="g", tries="t", expected="fine", attempt="seen = 1 / 0"),
        Case(id="silent", group="g", tries="t", expected="fine", attempt="pass"),
        Check(id="harmed", group="g", tries="t", expected="e", check=harmed),
        Check(id="skipped", group="g", tries="t", expected="e", check=skipped),
    ]
    outcomes = {outcome.case: outcome for outcome in await run_cases(arena, cases)}
    assert {name for name, outcome in outcomes.items() if outcome.ok} == {bpf_right.id, "skipped"}
    assert "doesn't match" in outcomes["bpf"].why
    assert outcomes["crash"].observed == "signal 11"
    assert outcomes["raises"].observed.startswith("ZeroDivisionError")
    assert "ended" in outcomes["harmed"].why
    assert outcomes["skipped"].skipped


def test_the_command(debian_state: Path) -> None:
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", "audit", "--self-test", "--json", "--group", "clock"],
        env={**os.environ, "PYTHONPATH": str(source), "DSEC_STATE": str(debian_state)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["failed"] == []
    assert {"case", "expected", "observed", "ok"} <= report["cases"][0].keys()
    assert {case["group"] for case in report["cases"]} == {"clock"}

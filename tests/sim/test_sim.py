"""A cluster in virtual time: many seeds with many faults, each of which must end without a broken invariant; that a
seed replays to the last event; and that the judge does see what it is there for, when a rule is taken out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsec.cli.output import EXIT_PLATFORM
from dsec.cli.sim import sim
from dsec.plan.quota import Holder, Ledger
from dsec.testing.sim import SimConfig, simulate
from dsec.testing.sim.control import Api
from dsec.testing.sim.node import Node

SOURCES = Path(__file__).parents[2] / "src"
SMALL = {"nodes": 8, "hours": 0.15, "faults": 25.0}


@pytest.mark.parametrize("seed", range(10))
def test_nothing_breaks_whatever_fails(seed: int) -> None:
    outcome = simulate(SimConfig(seed=seed, **SMALL))
    assert not outcome.violations, f"dsec sim --seed {seed} --nodes 8 --hours 0.15 --faults 25: {outcome.violations}"
    assert outcome.created > 500
    assert sum(outcome.faults.values()) > 50


def test_without_faults_everybody_gets_what_they_asked_for() -> None:
    outcome = simulate(SimConfig(seed=1, nodes=16, hours=0.2, faults=0))
    assert not outcome.violations
    assert set(outcome.failures) <= {"quota_exceeded"}
    assert outcome.wait_p99_s < 1.0
    by_chance = simulate(SimConfig(seed=1, nodes=16, hours=0.2, faults=0, random=True))
    assert not by_chance.violations
    assert outcome.locality_from_empty > 1.3 * by_chance.locality_from_empty
    assert outcome.layer_hits > by_chance.layer_hits
    assert outcome.layer_fetches < 0.8 * by_chance.layer_fetches
    assert outcome.imbalance < by_chance.imbalance


def test_a_seed_replays_to_the_last_event() -> None:
    """In another process too, where sets and dictionaries of strings have another order."""
    code = (
        "from dsec.testing.sim import SimConfig, simulate\n"
        "o = simulate(SimConfig(seed=5, nodes=8, hours=0.1, faults=20.0))\n"
        "print(o.digest, o.events, o.created)"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert simulate(SimConfig(seed=6, nodes=8, hours=0.1, faults=20.0)).digest not in said[0]


def test_what_was_broken_says_how_it_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "renewed", lambda self, runs: None)

    def run(options: str) -> tuple[dict[str, Any], str]:
        result = CliRunner().invoke(sim, shlex.split(options), standalone_mode=False)
        assert result.return_value == EXIT_PLATFORM
        return {**json.loads(result.stdout), "wall_s": 0.0}, result.stderr.partition("again: dsec sim ")[2]

    first, command = run("--seed 1 --nodes 8 --hours 0.12 --faults 5 --json")
    assert any(" lease:" in text for text in first["violations"])
    assert run(command)[0] == first


@pytest.mark.parametrize("options", ["--hours nan", "--faults inf", "--load 0", "--nodes 0", "--nodes x", "--seeds 0"])
def test_options_that_mean_nothing_are_refused(options: str) -> None:
    result = CliRunner().invoke(sim, shlex.split(options))
    assert result.exit_code == 2
    assert f"Invalid value for '{options.partition(' ')[0]}'" in result.stderr


def broken(kind: str, seeds: range = range(20)) -> bool:
    """Whether any of some seeds shows this kind of violation."""
    for seed in seeds:
        outcome = simulate(SimConfig(seed=seed, **SMALL))
        if any(f" {kind}:" in text for text in outcome.violations):
            return True
    return False


def test_the_judge_sees_what_is_owned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An apiserver that places again what it has no answer for, instead of waiting for it."""
    send = Api._send

    def impatient(self: Api, instance: str, job: object, order: object, tries: int) -> None:
        send(self, instance, job, order, tries)  # type: ignore[arg-type]
        if self.up and instance == self.instance:
            self._answered(job, order, 0)  # type: ignore[arg-type]

    monkeypatch.setattr(Api, "_send", impatient)
    outcome = simulate(SimConfig(seed=1, nodes=8, hours=0.03, faults=0))
    assert any(" twice:" in text for text in outcome.violations)


def test_the_judge_sees_a_node_that_readopts_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fenced node that comes back and goes on."""
    monkeypatch.setattr(Node, "_end_all", lambda self: None)
    assert broken("fence")


def test_the_judge_sees_a_quota_that_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders that forget what is on its way."""
    monkeypatch.setattr(Holder, "spend", lambda self, project, edge, count, now: None)
    assert broken("quota")


def test_the_judge_sees_shares_that_are_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsec.testing.sim import control

    def generous(ledger: Ledger, holder: str, need: int, size: int) -> tuple[Ledger, int]:
        shares = {**ledger.shares, holder: ledger.shares.get(holder, 0) + need}
        return Ledger(limit=ledger.limit, shares=shares), need

    monkeypatch.setattr(control, "take", generous)
    assert broken("ledger")


def test_the_judge_sees_leases_that_nobody_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "renewed", lambda self, runs: None)
    outcome = simulate(SimConfig(seed=1, nodes=8, hours=0.2, faults=0))
    assert any(" lease:" in text for text in outcome.violations)


def test_the_judge_sees_leases_that_never_lapse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "_expire", lambda self, generation: None)
    outcome = simulate(SimConfig(seed=1, nodes=6, hours=0.4, faults=0))
    assert any(" lease:" in text for text in outcome.violations)


def test_the_judge_sees_sandboxes_that_never_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that says that it took more than it did."""
    monkeypatch.setattr(Node, "_take", lambda self, order: order.part.count)
    assert broken("lost")

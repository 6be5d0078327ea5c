"""The main job as a person runs it: from the command line, with a server that it starts and stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsec.kernel import census
from dsec.rollout import candidates, main

pytestmark = pytest.mark.root


def quickstart(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsec.rollout.main", *arguments]
    environment = {**os.environ, "DSEC_STATE": str(state)}
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def as_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_everything_comes_out_as_it_must_and_nothing_is_left(debian_state: Path) -> None:
    first = as_json(quickstart(debian_state, "--json", "--sandboxes", "15", "--seed", "3"))
    assert census.take(debian_state) == census.Census()
    assert first["surprises"] == []
    assert len(first["rows"]) == first["created"]["count"] == 15
    assert {0.0, 1.0} < set(first["rewards"]), "zeros, ones, and parts in between"
    masked = [row for row in first["rows"] if row["infra"]]
    assert [(row["cause"], row["reward"]) for row in masked] == [("platform_killed", None)]
    counted = [reward for reward in first["rewards"] if reward is not None]
    assert first["mean_reward"] == pytest.approx(sum(counted) / len(counted))
    assert all(each["on"] for each in first["isolation"]), first["isolation"]
    assert len({row["id"] for row in first["rows"]} | {row["grader_id"] for row in first["rows"]} - {""}) == 15 + 14

    again = as_json(quickstart(debian_state, "--json", "--sandboxes", "15", "--seed", "3"))
    assert again["rewards"] == first["rewards"]
    other = as_json(quickstart(debian_state, "--json", "--sandboxes", "15", "--seed", "4"))
    assert [row["candidate"] for row in other["rows"]] != [row["candidate"] for row in first["rows"]]


def test_piped_it_is_plain_and_says_what_it_does(debian_state: Path) -> None:
    done = quickstart(debian_state, "--sandboxes", "2", "--seed", "1", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    for line in (
        "cachetools 5.5.2",
        "sha256",
        "seed",
        "2 created in",
        "p99",
        "a fork bomb",
        "host undo",
        "all as it must be",
    ):
        assert line in done.stdout, line
    assert max(map(len, done.stdout.splitlines())) <= 200


def test_a_surprise_is_a_failure(
    debian_state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(candidates, "expected_reward", lambda fault, answer: 0.123)
    options = main.Options(sandboxes=3, seed=1, keep=False, every=False, as_json=True)
    assert asyncio.run(main.run(options, debian_state)) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["surprises"]
    assert set(result["surprises"]) <= {row["id"] for row in result["rows"] if row["expected"] == 0.123}


def test_a_kept_server_serves_the_next_run_and_is_ended_by_a_signal(debian_state: Path) -> None:
    kept = quickstart(debian_state, "--sandboxes", "1", "--keep")
    try:
        assert kept.returncode == 0, kept.stdout + kept.stderr
        assert "is left up at" in kept.stdout
        second = quickstart(debian_state, "--sandboxes", "1", "--seed", "2")
        assert second.returncode == 0, second.stdout + second.stderr
        assert "uses the server that runs" in second.stdout
    finally:
        os.kill(int((debian_state / "lock").read_text()), signal.SIGTERM)
        deadline = time.monotonic() + 60
        while census.take(debian_state) != census.Census() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert census.take(debian_state) == census.Census()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_it_in_the_middle_leaves_nothing(debian_state: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dsec.rollout.main", "--sandboxes", "200"]
    environment = {**os.environ, "DSEC_STATE": str(debian_state), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            said.append(line)
            if "200 created in" in line:
                running.send_signal(number)
                break
        said.append(running.stdout.read())
    assert running.returncode == (130 if number is signal.SIGINT else 143), "".join(said)
    assert census.take(debian_state) == census.Census()


def test_bad_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "state", "--sandboxes", "0")
    assert done.returncode == 2
    assert "--sandboxes" in done.stderr
    assert not (tmp_path / "state").exists()

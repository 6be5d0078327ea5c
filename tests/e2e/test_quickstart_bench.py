"""The benchmarks, small: they run to the end, say what they must, and leave nothing. Figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsec.bench import bare, peers
from dsec.kernel import census

pytestmark = pytest.mark.root


def bench(state: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "dsec.cli.main", "bench", *arguments, "--json"]
    environment = {**os.environ, "DSEC_STATE": str(state)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("\n") == 1, "one object, nothing else"
    result: dict[str, Any] = json.loads(done.stdout)
    assert census.take(state) == census.Census()
    return result


def left_cgroups() -> list[Path]:
    names = (bare.CGROUP, peers.CGROUP_PARENT)
    return [path for name in names for path in Path("/sys/fs/cgroup").glob(f"**/{name}")]


def test_create_compares_with_every_peer_and_the_bare_zygote(debian_state: Path) -> None:
    result = bench(
        debian_state, "create", "--rounds", "1", "--group", "4", "--alone", "3", "--live", "8", "--idle-s", "0.2"
    )
    assert result["failures"] == 0
    assert result["peers_missing"] == [], "bin/setup.sh peers installs them"
    for key in ("vs_crun", "vs_runc", "vs_bwrap", "vs_zygote", "create_p50_ms"):
        assert result[key] > 0, key
    assert isinstance(result["kib_per_sandbox"], float)  # of eight sandboxes on a busy machine: any number
    assert set(result["per_s"]) == {"dsec", "zygote", "crun", "runc", "bwrap"}
    assert all(peer["failures"] == 0 and peer["command"] and peer["version"] for peer in result["peers"].values())
    assert left_cgroups() == []


def test_exec_measures_latency_rate_and_transfers(debian_state: Path) -> None:
    small = (
        "--alone",
        "5",
        "--parallel",
        "40",
        "--sandboxes",
        "2",
        "--at-once",
        "4",
        "--output-mb",
        "3",
        "--upload-mb",
        "5",
        "--streams",
        "12",
        "--idle-s",
        "0.2",
    )
    result = bench(debian_state, "exec", *small)
    assert result["failures"] == 0
    for key in ("exec_p50_ms", "exec_per_s", "output_mb_per_s", "upload_mb_per_s", "download_mb_per_s"):
        assert result[key] > 0, key
    assert result["idle_streams_cpu_percent"] >= 0
    assert result["streams"] == 12
    assert set(result["peak_mib"]) == {"server", "client", "zygote", "guest"}


def test_judge_compares_with_the_cases_own_cpu_time(debian_state: Path) -> None:
    result = bench(debian_state, "judge", "--submissions", "4", "--cases", "3", "--case-ms", "30")
    assert result["failures"] == 0
    assert result["verdicts"] == {"accepted": 12}
    assert result["vs_cpu"] > 0
    assert result["cpu_vs_cases"] > 0
    assert set(result["cost_ms_per_case"]) == {"server", "zygote", "sandboxes", "client"}


def test_soak_leaves_nothing_behind(debian_state: Path) -> None:
    result = bench(debian_state, "soak", "--minutes", "0.1", "--per-s", "10")
    assert result["created"] > 0
    assert result["failures"] == 0
    assert result["left"] == {}
    assert sum(result["lives"].values()) == result["created"]

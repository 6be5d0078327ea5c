"""The benchmark of the control plane, small: it runs to its end, says what it must, and leaves nothing. Figures aren't
judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_kit import SOURCES

SMALL = (
    "--edges 20 --servers 1 --apiservers 2 --seconds 1"
    " --trainers 3 --singles 30 --burst 400 --live 3000 --turns 2 --idle-s 1"
)


def test_it_counts_what_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    command = [sys.executable, "-m", "dsec.cli.main", "bench", "cluster", *SMALL.split(), "--json"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["failures"] == 0
    assert result["live"] >= 3000
    beats = ("heartbeat_core", "heartbeat_floor")
    for key in ("creates_per_s", "burst32k_s", "mib_for_400k", "single_per_api_core", *beats):
        assert result[key] > 0, key
    assert 0 <= result["imbalance"] < 1
    for key in ("overhead_p50_ms", "locality", "locality_from_empty"):  # so few may meet no layers
        assert isinstance(result[key], float), key
    assert list(tmp_path.iterdir()) == [], "nothing is left"

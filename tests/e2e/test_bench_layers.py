"""The benchmarks of layers on demand, small: they run to the end, say what they must, and leave nothing. Their figures
are not judged here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from test_quickstart_bench import bench

pytestmark = pytest.mark.root

LAZY = {
    "lazy_vs_local",
    "lazy_far_vs_local",
    "whole_vs_lazy",
    "traced_vs_local",
    "traced_near_vs_local",
    "bytes_fetched_share",
    "filled_read_ratio",
    "filled_read_warm_ratio",
}
BURST = {"whole_vs_lazy", "tar_vs_lazy", "written_share", "written_share_of_tar", "lazy_s", "whole_s", "tar_s"}


def numbers(result: dict[str, Any], keys: set[str]) -> list[float]:
    assert keys <= result.keys()
    return [result[key] for key in keys]


def test_lazy(debian_state: Path) -> None:
    result = bench(debian_state, "lazy", "--rounds", "1", "--command", "python", "--large-mb", "4")
    assert all(math.isfinite(value) and value > 0 for value in numbers(result, LAZY))
    assert set(result["ms"]) == {"local", "lazy", "lazy_far", "traced", "traced_far", "whole_far"}
    assert result["bytes_fetched_share"] < 0.5
    assert result["second_reader_mb"] == 0
    assert result["rounds"] == 1
    assert not [key for key in result if key.startswith("tests_")]
    assert not list(debian_state.glob("dsec-bench-*"))


def test_burst(debian_state: Path) -> None:
    small = (
        "--sandboxes",
        "4",
        "--environments",
        "2",
        "--workspace-mb",
        "8",
        "--toolkit-mb",
        "1",
        "--tar-sandboxes",
        "1",
    )
    result = bench(debian_state, "burst", *small)
    assert all(math.isfinite(value) and value > 0 for value in numbers(result, BURST))
    assert (result["sandboxes"], result["environments"], result["tar_sandboxes"]) == (4, 2, 1)
    assert not list(debian_state.glob("dsec-bench-*"))

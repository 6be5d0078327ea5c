"""The benchmark of microVMs, small: it runs to the end, says what it must, and leaves nothing. Its figures are not
judged here."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from test_quickstart_bench import bench

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]

POSITIVE = (
    "clone_p50_ms",
    "boot_ms",
    "clone_vs_boot",
    "clones_per_s",
    "pool_claim_ms",
    "mib_per_idle_clone",
    "channel_out_mb_per_s",
    "channel_in_mb_per_s",
    "transfer_vs_bare",
    "fork_pause_ms",
    "fork_4_ms",
)


def test_vm(debian_state: Path, vm_templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vm_templates.parent.joinpath("store", "kernels").is_dir()
    monkeypatch.setenv("DSEC_VM_ACCEL", "tcg")
    result = bench(debian_state, "vm", "--clones", "3", "--at-once", "4", "--memory-mib", "160", "--no-full")
    assert result["accel"] == "tcg"
    assert all(math.isfinite(result[key]) and result[key] > 0 for key in POSITIVE)
    assert result["paged_out_mib"] < result["mib_per_idle_clone"]
    assert math.isfinite(result["wake_ms"])
    assert not list(debian_state.glob("dsec-bench-*"))

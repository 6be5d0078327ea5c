"""The probes of `dsec doctor`: they try the real thing, and leave nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.kernel import host, loop, mounts
from dsec.kernel.probes import PROBES


@pytest.mark.root
def test_every_probe_answers_and_leaves_nothing(tmp_path: Path) -> None:
    before = {entry.target for entry in mounts.mounted()}
    findings = host.probe_host(tmp_path / "not" / "there" / "yet")
    assert len({finding.name for finding in findings}) == len(findings) == len(PROBES)
    for finding in findings:
        assert finding.detail, finding.name
        assert finding.ok == (finding.remedy == ""), finding.name
    assert [finding.detail for finding in findings if finding.needed and not finding.ok] == []
    assert list(tmp_path.iterdir()) == []
    assert [entry.target for entry in mounts.mounted(tmp_path)] == []
    assert {entry.target for entry in mounts.mounted() if "dsec-doctor" in str(entry.target)} <= before
    assert not list(Path("/sys/fs/cgroup").glob(f"*/dsec-doctor-{os.getpid()}*"))
    assert not [path for path in Path("/dev").glob("loop[0-9]*") if "dsec-doctor" in str(loop.backing_file(path))]


@pytest.mark.root
def test_the_json_has_the_published_fields(tmp_path: Path) -> None:
    for item in host.as_json(host.probe_host(tmp_path)):
        assert {"name", "ok", "remedy"} <= item.keys()


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dsec.kernel.probes.shutil.which", lambda *_, **__: None)
    findings = {finding.name: finding for finding in host.probe_host(tmp_path)}
    assert not findings["mmdebstrap"].ok
    assert findings["mmdebstrap"].remedy == "apt-get install mmdebstrap"
    assert not findings["C compiler"].ok


def test_the_kernel_version_is_read() -> None:
    assert host.kernel_version() >= (3, 0)

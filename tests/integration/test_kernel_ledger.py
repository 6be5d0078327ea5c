"""The ledger: changes go on record before they are made, and are taken back in reverse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel import mounts, sysctl
from dsec.kernel.ledger import Ledger, prepare_host
from dsec.kernel.syscalls import KernelError

SETTING = "fs.inotify.max_user_watches"


@pytest.fixture
def setting() -> Iterator[int]:
    """A kernel setting of this host that a test may change."""
    old = sysctl.read(SETTING)
    assert old is not None
    yield int(old)
    sysctl.write(SETTING, old)


def test_changes_survive_and_are_undone_in_reverse(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "host.json")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "file").write_bytes(b"")
    ledger.record("directory", str(tmp_path / "dir"))
    ledger.record("file", str(tmp_path / "dir" / "file"))
    ledger.record("file", str(tmp_path / "dir" / "file"))
    ledger.record("packages", "some-package")
    again = Ledger(tmp_path / "host.json")
    assert [change.kind for change in again.changes] == ["directory", "file", "packages"]
    said = list(again.undo())
    assert [line.split(":")[0] for line in said] == ["kept", "removed", "removed"]
    assert not (tmp_path / "dir").exists()
    assert [change.kind for change in Ledger(tmp_path / "host.json").changes] == ["packages"]


def test_undo_of_what_never_happened_is_harmless(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "host.json")
    for kind in ("directory", "file", "mount", "cgroups", "quota"):
        ledger.record(kind, str(tmp_path / "absent"))
    assert len(list(ledger.undo())) == 5
    assert ledger.changes == ()
    assert not (tmp_path / "host.json").exists()


def test_only_what_can_be_undone_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="undo"):
        Ledger(tmp_path / "host.json").record("magic", "x")


@pytest.mark.root
def test_a_directory_with_a_mount_in_it_stays_on_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "host.json")
    (tmp_path / "dir" / "at").mkdir(parents=True)
    mounts.TmpfsMount(tmp_path / "dir" / "at").mount()
    ledger.record("directory", str(tmp_path / "dir"))
    assert "FAILED" in next(iter(ledger.undo()))
    assert len(ledger.changes) == 1
    ledger.record("mount", str(tmp_path / "dir"))
    assert [line.split(":")[0] for line in ledger.undo()] == ["unmounted", "removed"]
    assert mounts.mounted(tmp_path) == []


@pytest.mark.root
def test_a_setting_goes_back_to_what_it_was_before_the_first_change(tmp_path: Path, setting: int) -> None:
    ledger = Ledger(tmp_path / "host.json")
    ledger.set_sysctl(SETTING, str(setting + 1))
    ledger.set_sysctl(SETTING, str(setting + 2))
    ledger.set_sysctl(SETTING, str(setting + 2))
    assert sysctl.read(SETTING) == str(setting + 2)
    assert [(change.old, change.new) for change in ledger.changes] == [(str(setting), str(setting + 2))]
    assert f"= {setting} " in next(iter(ledger.undo()))
    assert sysctl.read(SETTING) == str(setting)


@pytest.mark.root
def test_a_setting_that_somebody_else_changed_is_left(tmp_path: Path, setting: int) -> None:
    ledger = Ledger(tmp_path / "host.json")
    ledger.set_sysctl(SETTING, str(setting + 1))
    sysctl.write(SETTING, str(setting + 5))
    assert "left" in next(iter(ledger.undo()))
    assert sysctl.read(SETTING) == str(setting + 5)
    assert ledger.changes == ()


@pytest.mark.root
def test_the_host_is_prepared_once_and_put_back(tmp_path: Path) -> None:
    before = {setting.name: sysctl.read(setting.name) for setting in sysctl.WANTED}
    ledger = Ledger(tmp_path / "host.json")
    try:
        said = prepare_host(ledger)
        for setting in sysctl.WANTED:
            if f"raised {setting.name} " in " ".join(said):
                assert sysctl.too_low(setting) is None
                assert int(sysctl.read(setting.name) or 0) >= int(before[setting.name] or 0)
        assert not [line for line in prepare_host(ledger) if line.startswith("raised")]
    finally:
        list(ledger.undo())
    assert {setting.name: sysctl.read(setting.name) for setting in sysctl.WANTED} == before


def test_settings_are_valued_with_their_exceptions() -> None:
    never = sysctl.Setting("kernel.no_such_setting", 1, "")
    assert sysctl.too_low(never) is None
    assert sysctl.too_low(sysctl.Setting("kernel.pid_max", 1, "")) is None
    value = sysctl.read("kernel.pid_max")
    assert value is not None
    assert sysctl.too_low(sysctl.Setting("kernel.pid_max", 1 << 40, "")) == value
    assert sysctl.too_low(sysctl.Setting("kernel.pid_max", 1 << 40, "", unlimited=int(value))) is None
    with pytest.raises(KernelError, match="no_such_setting"):
        sysctl.write("kernel.no_such_setting", "1")

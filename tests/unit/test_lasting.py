"""Where programs that outlive the server are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.kernel import lasting

ARGV = ["/var/lib/dsec/native/zygote", "--socket", "s"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without systemd; `own` and `pod` in it are what would say otherwise."""
    monkeypatch.setattr(lasting, "_SYSTEMD", tmp_path / "own")
    monkeypatch.setattr(lasting, "_FROM_POD", tmp_path / "pod")
    return tmp_path


def test_without_systemd_it_is_started_as_it_is(host: Path) -> None:
    assert lasting.outliving(ARGV, unit="u") == ARGV


def test_a_service_starts_a_scope_of_a_name_of_its_own(host: Path) -> None:
    (host / "own").mkdir()
    first, second = (lasting.outliving(ARGV, unit="u", static=False) for _ in range(2))
    assert first[0] == "systemd-run"
    assert first[-3:] == ARGV
    assert first[-4] == "--"
    assert "--scope" in first
    assert "--property=Delegate=yes" in first
    assert first != second  # the one before may still be ending


def test_a_pod_starts_what_is_static_on_the_host(host: Path) -> None:
    (host / "pod").mkdir()
    command = lasting.outliving(ARGV, unit="u")
    assert command[:6] == ["nsenter", "--target", "1", "--mount", "--", "systemd-run"]
    assert command[-3:] == ARGV
    assert lasting.outliving(ARGV, unit="u", static=False) == ARGV


def test_a_privileged_shell_of_the_host_is_no_pod(host: Path) -> None:
    (host / "own").mkdir()
    (host / "pod").mkdir()
    assert lasting.outliving(ARGV, unit="u")[0] == "systemd-run"


async def test_what_it_says_is_told(host: Path) -> None:
    assert await lasting.start(["sh", "-c", "echo no room >&2; exit 3"], unit="u") == "no room"
    assert await lasting.start(["sh", "-c", "exit 3"], unit="u") == "exit code 3"
    assert await lasting.start(["true"], unit="u") == ""

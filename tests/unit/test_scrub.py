"""What scrubbing removes, and what it never follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.store.scrub import RULES, scrub


def make(top: Path, *names: str) -> None:
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("x")


def left(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*") if not path.is_dir()}


def test_the_standard_rules(tmp_path: Path) -> None:
    residue = (
        "root/.bash_history",
        "home/a/.python_history",
        "home/a/.cache/b/c",
        "tmp/x/y",
        "var/log/z",
        "w/.cache/q",
    )
    stays = ("w/f", "root/.bashrc", "home/a/tmp/k", "w/history", "var/lib/x")
    make(tmp_path, *residue, *stays)
    report = scrub(tmp_path, RULES)
    assert left(tmp_path) == set(stays)
    assert set(report.removed_paths) == {f"/{name}" for name in residue}
    assert (report.removed, report.removed_bytes, report.kept) == (len(residue), len(residue), len(stays))
    assert not (tmp_path / "home/a/.cache").exists()
    assert (tmp_path / "tmp").is_dir()


@pytest.mark.parametrize(
    ("glob", "gone"),
    [
        ("a", {"a/b/c", "a/d"}),
        ("/a/*", {"a/b/c", "a/d"}),
        ("*/d", {"a/d", "e/d"}),
        ("**/d", {"a/d", "e/d", "e/f/d"}),
        ("a?", set()),
        ("a.*", set()),
        ("", set()),
        ("../x", set()),
    ],
)
def test_globs(tmp_path: Path, glob: str, gone: set[str]) -> None:
    files = {"a/b/c", "a/d", "e/d", "e/f/d"}
    make(tmp_path, *files)
    scrub(tmp_path, [glob])
    assert left(tmp_path) == files - gone


def test_no_link_is_followed(tmp_path: Path) -> None:
    make(tmp_path, "outside/secret", "top/f")
    (tmp_path / "top/tmp").symlink_to(tmp_path / "outside")
    (tmp_path / "top/link").symlink_to(tmp_path / "outside/secret")
    scrub(tmp_path / "top", ["tmp/**", "link"])
    assert (tmp_path / "outside/secret").read_text() == "x"
    assert (tmp_path / "top/tmp").is_symlink()
    assert not (tmp_path / "top/link").is_symlink()


def test_what_is_kept_wins(tmp_path: Path) -> None:
    make(tmp_path, "w/a", "w/b/c")
    scrub(tmp_path, ["w"], ["w/b"])
    assert left(tmp_path) == {"w/b/c"}

"""The pinned project, really fetched, and the numbers in the catalog against its own tests. No sandbox is needed for
that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsec.errors import DsecError, Unavailable
from dsec.rollout import candidates, catalog, grading, project
from dsec.rollout.faults import Fault, answered, planted
from dsec.rollout.project import CACHETOOLS, Project


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("sdist")
    sdist = project.fetch(CACHETOOLS, directory)
    assert project.fetch(CACHETOOLS, directory) == sdist
    assert [path.name for path in directory.iterdir()] == [sdist.name]
    return project.read_files(CACHETOOLS, sdist)


def graded(files: Mapping[str, bytes], source: Mapping[str, str], directory: Path) -> grading.Report | None:
    """What the runner says, run on this machine's Python."""
    for path, raw in {**files, **{path: text.encode() for path, text in source.items()}}.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(raw)
    command = [sys.executable, "-I", "-B", str(grading.INSIDE), str(directory), str(directory / "src")]
    done = subprocess.run(command, input=b"abc\n", capture_output=True, timeout=60, check=False)
    return grading.parse_report(done.stdout, "abc")


@pytest.mark.parametrize("fault", catalog.FAULTS, ids=lambda fault: fault.name)
def test_the_catalog_says_what_the_tests_say(fault: Fault, files: dict[str, bytes], tmp_path: Path) -> None:
    source, _ = project.text_files(CACHETOOLS, files)
    pristine, faulty = graded(files, {}, tmp_path / "p"), graded(files, planted(source, fault), tmp_path / "f")
    assert pristine is not None
    assert faulty is not None
    measure = grading.scale(pristine, faulty)
    assert len(measure.broken) == fault.broken
    for index, answer in enumerate(fault.answers):
        report = graded(files, answered(source, fault, answer), tmp_path / str(index))
        assert report is not None
        failed = frozenset(report.failed)
        assert len(measure.broken - failed) == answer.fixed, answer.label
        assert bool(failed - measure.broken) == answer.breaks, answer.label
        assert grading.reward(report, measure) == candidates.expected_reward(fault, answer)


def test_the_same_seed_gives_the_same_burst(files: dict[str, bytes]) -> None:
    source, tests = project.text_files(CACHETOOLS, files)
    bursts = {
        json.dumps([(c.label, c.files) for c in candidates.make_burst(source, tests, 5, 40).candidates]) for _ in "ab"
    }
    assert len(bursts) == 1
    assert candidates.make_burst(source, tests, 5, 40) != candidates.make_burst(source, tests, 6, 40)
    faults = {candidates.make_burst(source, tests, seed, 1).fault.name for seed in range(50)}
    assert faults == {fault.name for fault in catalog.FAULTS}
    with pytest.raises(ValueError, match="at least one"):
        candidates.make_burst(source, tests, 5, 0)


def test_every_kind_is_in_a_burst_that_is_large_enough(files: dict[str, bytes]) -> None:
    source, tests = project.text_files(CACHETOOLS, files)
    labels = {candidate.label for candidate in candidates.make_burst(source, tests, 1, 16).candidates}
    assert {"no change", "a syntax error", "edits the tests only", "prints OK and leaves"} <= labels
    for candidate in candidates.make_burst(source, tests, 1, 16).candidates:
        if candidate.label.startswith("edits the tests only"):
            assert not any(CACHETOOLS.allowed(path) for path in candidate.files)


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    other = Project(CACHETOOLS.name, CACHETOOLS.version, "0" * 64, "src", "cachetools")
    with pytest.raises(DsecError, match="not the pinned file"):
        project.fetch(other, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_version_that_nobody_has_is_unavailable(tmp_path: Path) -> None:
    other = Project(CACHETOOLS.name, "0.0.0.0.1", "0" * 64, "src", "cachetools")
    with pytest.raises(Unavailable, match="could not fetch"):
        project.fetch(other, tmp_path)


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    path = tmp_path / f"{CACHETOOLS.stem}.tar.gz"
    path.write_bytes(b"cut short")
    assert project.fetch(CACHETOOLS, tmp_path) == path
    assert project.read_files(CACHETOOLS, path)["src/cachetools/__init__.py"]

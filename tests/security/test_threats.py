"""docs/THREATS.md claims nothing without a test, and names every test of an attack."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "THREATS.md").read_text()


ANYWHERE = {
    path.name: path
    for part in ("unit", "integration", "e2e", "security", "cluster", "conformance")
    for path in (HERE.parent / part).glob("test_*.py")
}
"""Test files that the document may name."""


def functions(name: str) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", ANYWHERE[name].read_text(), re.MULTILINE))


def test_every_test_that_is_named_exists() -> None:
    files = {name for name in ANYWHERE if name in TEXT}
    named = set(re.findall(r"\btest_\w+(?!\.py)\b", TEXT)) - {name.removesuffix(".py") for name in files}
    existing = set().union(*map(functions, files))
    assert named
    assert named <= existing


def test_every_attack_is_in_the_document() -> None:
    for name in (
        "test_namespaces.py",
        "test_proc.py",
        "test_pid1.py",
        "test_syscalls.py",
        "test_files.py",
        "test_terminals.py",
        "test_network.py",
        "test_state.py",
        "test_gateways.py",
        "test_judging.py",
        "test_functions.py",
    ):
        missing = {test for test in functions(name) if test not in TEXT}
        assert not missing, name


def test_every_row_of_a_table_of_attacks_names_its_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and line.count("|") == 4]
    for row in rows:
        attack, _, test = row.strip("| ").split(" | ")
        assert test == "test" or "test_" in test, attack

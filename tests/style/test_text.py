"""What every tracked file keeps to: size, no traces of one machine, no debris; and documents that say what the code
says."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from dsec import errors
from dsec.spec.sandbox import SandboxSpec

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
LONGER: dict[str, int] = {}
"""Files that may be longer, each with its own limit, which only ever goes down."""

TEXT = {".py", ".c", ".h", ".md", ".toml", ".sh", ".json", ".yml", ".txt", ""}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


FILES = tracked()
CODE = [path for path in FILES if path.suffix in {".py", ".c", ".h", ".sh", ""} and path.name != "LICENSE"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CODE, ids=name)
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGER.get(name(path), MAX_LINES)


def test_the_list_of_longer_files_only_shrinks() -> None:
    for path, limit in LONGER.items():
        lines = len((ROOT / path).read_text().splitlines())
        assert MAX_LINES < lines <= limit, f"{path} has {lines} lines: take it off the list, or lower its limit"
        assert limit - lines < 20, f"{path} has {lines} lines: lower its limit of {limit}"


# Written in pieces, so that this file doesn't hold what it looks for.
_TRACES = [
    re.compile(r"/(?:home|Users)/[a-z]+/"),
    re.compile(r"/ro" r"ot/\.(?!bash_history)"),  # a sandbox's own, in tests
    re.compile(r"(?<![\w.])/wo" r"rk/(?:main|team|shared|\.library)"),
    re.compile(
        r"(?:py" r"pi|pythonhosted)\.(?:org|io)|registry\.n" r"pmjs|(?:deb|security|ftp)\.deb" r"ian\.org",
        re.IGNORECASE,
    ),
    re.compile(
        r"https?://(?!127\.|[a-z0-9.-]*\bexample\b|[a-z]+\.dsec\b|www\.apache\.org|github\.com)[a-z0-9-]+\.[a-z0-9.-]+",
        re.IGNORECASE,
    ),
]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_trace_of_a_machine_or_registry(path: Path) -> None:
    if path.name == "LICENSE":
        return
    text = path.read_text()
    for pattern in _TRACES:
        found = pattern.search(text)
        assert found is None, f"{name(path)} holds {found.group()!r}"


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".py"], ids=name)
def test_no_debris(path: Path) -> None:
    tree = ast.parse(path.read_text())
    marks = re.findall(r"#.*\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b", path.read_text())
    assert not marks
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            broad = isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            goes_on = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
            assert not (broad and goes_on), f"line {node.lineno}: swallows every exception"


@pytest.mark.parametrize("path", [path for path in FILES if name(path).startswith("src/")], ids=name)
def test_modules_say_what_they_own_and_do_not_print(path: Path) -> None:
    if path.suffix != ".py":
        return
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, "a module's docstring says what it owns"
    if name(path).startswith("src/dsec/cli/"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}: a library doesn't print"


def test_every_error_code_has_its_page() -> None:
    pages = (ROOT / "docs" / "errors.md").read_text()
    missing = [code for code in errors.BY_CODE if not re.search(rf"^#+ .*`{code}`", pages, re.MULTILINE)]
    assert not missing


def test_the_table_of_defaults_is_true() -> None:
    text = (ROOT / "docs" / "SPECIFICATION.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    real = {}
    for field in msgspec.structs.fields(SandboxSpec):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
        if not field.required:
            real[field.name] = msgspec.json.encode(default() if callable(default) else default).decode()
    assert table == real


def test_the_test_command_names_every_kind_of_test() -> None:
    """But Harbor's, which need a newer Python than the oldest that the project runs on."""
    kinds = {name(path.parent) for path in FILES if path.name.startswith("test_") and path.suffix == ".py"} - {
        "tests/harbor"
    }
    named = set((ROOT / "bin/test").read_text().split())
    assert {kind for kind in kinds if kind.startswith("tests/")} <= named


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest takes two of one name for the same module."""
    names = Counter(path.name for path in FILES if path.name.startswith("test_") and path.suffix == ".py")
    assert [found for found, times in names.items() if times > 1] == []


@pytest.mark.parametrize("path", [path for path in FILES if name(path).startswith("src/")], ids=name)
def test_patterns_of_types_end_at_the_end(path: Path) -> None:
    """`$` matches before a line feed, too: what isn't matched whole elsewhere would be let in with one at its end."""
    loose = re.findall(r'(?:pattern=|PATTERN = |LAYER_NAME = )r?"[^"]*\$"', path.read_text())
    assert not loose

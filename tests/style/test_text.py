"""What every tracked file keeps to: size, no traces of one machine, no debris; and documents that say what the code
says. Each rule is one test that names all places that break it."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import msgspec

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
PYTHON = [path for path in FILES if path.suffix == ".py"]
CODE = [path for path in FILES if path.suffix in {".py", ".c", ".h", ".sh", ""} and path.name != "LICENSE"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


SOURCES = [path for path in FILES if name(path).startswith("src/")]
MODULES = [path for path in PYTHON if name(path).startswith("src/")]


@cache
def text(path: Path) -> str:
    return path.read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def lines(path: Path) -> int:
    return len(text(path).splitlines())


def test_a_file_is_read_in_one_sitting() -> None:
    long = {name(path): lines(path) for path in CODE if lines(path) > LONGER.get(name(path), MAX_LINES)}
    assert not long


def test_the_list_of_longer_files_only_shrinks() -> None:
    for path, limit in LONGER.items():
        has = lines(ROOT / path)
        assert MAX_LINES < has <= limit, f"{path} has {has} lines: take it off the list, or lower its limit"
        assert limit - has < 20, f"{path} has {has} lines: lower its limit of {limit}"


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


def test_no_trace_of_a_machine_or_registry() -> None:
    found = [
        f"{name(path)} holds {match.group()!r}"
        for path in FILES
        if path.name != "LICENSE"
        for pattern in _TRACES
        if (match := pattern.search(text(path)))
    ]
    assert not found


def test_no_debris() -> None:
    marks = re.compile(r"#.*\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
    found = []
    for path in PYTHON:
        found += [f"{name(path)}: {mark}" for mark in marks.findall(text(path))]
        for node in ast.walk(tree(path)) if "except" in text(path) else ():
            if isinstance(node, ast.ExceptHandler):
                broad = isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
                goes_on = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
                if node.type is None:
                    found.append(f"{name(path)}:{node.lineno}: a bare except")
                if broad and goes_on:
                    found.append(f"{name(path)}:{node.lineno}: swallows every exception")
    assert not found


def test_modules_say_what_they_own() -> None:
    silent = [name(path) for path in MODULES if tree(path).body and not ast.get_docstring(tree(path))]
    assert not silent, "a module's docstring says what it owns"


def test_a_library_does_not_print() -> None:
    prints = [
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        if not name(path).startswith("src/dsec/cli/") and "print" in text(path)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints


def test_every_error_code_has_its_page() -> None:
    pages = text(ROOT / "docs" / "errors.md")
    missing = [code for code in errors.BY_CODE if not re.search(rf"^#+ .*`{code}`", pages, re.MULTILINE)]
    assert not missing


def test_the_table_of_defaults_is_true() -> None:
    specification = text(ROOT / "docs" / "SPECIFICATION.md")
    table = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", specification, re.MULTILINE))
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
    named = set(text(ROOT / "bin/test").split())
    assert {kind for kind in kinds if kind.startswith("tests/")} <= named


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest takes two of one name for the same module."""
    names = Counter(path.name for path in FILES if path.name.startswith("test_") and path.suffix == ".py")
    assert [found for found, times in names.items() if times > 1] == []


def test_patterns_of_types_end_at_the_end() -> None:
    """`$` matches before a line feed, too: what isn't matched whole elsewhere would be let in with one at its end."""
    pattern = re.compile(r'(?:pattern=|PATTERN = |LAYER_NAME = )r?"[^"]*\$"')
    loose = [f"{name(path)}: {each}" for path in SOURCES for each in pattern.findall(text(path))]
    assert not loose

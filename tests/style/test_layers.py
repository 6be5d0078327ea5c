"""Imports point only down, as docs/ARCHITECTURE.md draws it. Each rule is one test that names all that breaks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "dsec"
MODULES = sorted(SOURCE.rglob("*.py"))

LEVELS = {
    "spec": 0, "errors": 0, "news": 0, "sockets": 0, "tasks": 0,
    "lifecycle": 1, "ports": 1, "screen_ports": 1, "wire": 1, "plan": 1, "recipe": 1,
    "kernel": 2, "store": 2, "journal": 2, "channel": 2, "egress": 2, "vmm": 2,
    "backends": 3, "builder": 3, "edge": 3, "api": 3, "sdk": 3, "testing": 3, "rollout": 3, "grading": 3, "cluster": 3,
    "bench": 4, "cli": 4, "app": 4, "app_cluster": 4, "app_filler": 4, "app_shield": 4, "app_shield_edge": 4,
    "app_volume": 4,
    "configuration": 4, "configuration_faces": 4,
    "": 4,  # dsec/__init__.py: the names of the SDK
}  # fmt: skip

LAZY = {"cli", "app", "app_cluster", "app_shield", "app_shield_edge", ""}
"""May import modules of ours inside functions: so that `dsec --help` is quick, and `import dsec` works without a
server."""

CLIENT = {"sdk", "cli", ""}
"""What `pip install dsec` alone must be able to import: these import levels 0 and 1 and each other."""


def place(module: str) -> str:
    """`dsec.kernel.mounts` -> `kernel`."""
    return module.split(".")[1] if "." in module else ""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST, *, inside: bool = False, typing: bool = False) -> Iterator[tuple[str, int, bool, bool]]:
    """Every module of ours that is imported: its name, line, whether inside a function, whether for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] == "dsec":
                    yield alias.name, child.lineno, inside, typing
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            module = child.module or ""
            if module.split(".")[0] == "dsec":
                for alias in child.names:
                    full = f"{module}.{alias.name}"
                    is_module = (SOURCE.parent / Path(*full.split("."))).with_suffix(".py").exists()
                    is_package = (SOURCE.parent / Path(*full.split(".")) / "__init__.py").exists()
                    yield full if is_module or is_package else module, child.lineno, inside, typing
        else:
            deeper = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            only_types = typing or (
                isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
            )
            yield from _imports(child, inside=deeper, typing=only_types)


@cache
def imports(path: Path) -> list[tuple[str, int, bool, bool]]:
    return list(_imports(ast.parse(path.read_text())))


def test_imports_point_down() -> None:
    found = [
        f"{module_name(path)}:{line} imports {target}, which is above it"
        for path in MODULES
        for target, line, _, _ in imports(path)
        if target != "dsec"  # its version and its place on disk
        and LEVELS[place(target)] > LEVELS[place(module_name(path))]
    ]
    assert not found


def test_the_client_needs_no_server() -> None:
    """`pip install dsec` alone hasn't got the rest."""
    found = [
        f"{module_name(path)}:{line} imports {target} when it is loaded"
        for path in MODULES
        if place(module_name(path)) in CLIENT
        for target, line, inside, typing in imports(path)
        if not (inside or typing or LEVELS[place(target)] <= 1 or place(target) in CLIENT)
    ]
    assert not found


def test_backends_do_not_know_each_other() -> None:
    found = [
        f"{module_name(path)}:{line} imports {target}, another backend"
        for path in MODULES
        if place(module_name(path)) == "backends"
        for target, line, _, _ in imports(path)
        if place(target) == "backends" and target.split(".")[2:3] != module_name(path).split(".")[2:3]
    ]
    assert not found


def test_only_the_composition_names_backends() -> None:
    named = [
        f"{module_name(path)}:{line} imports {target}"
        for path in MODULES
        if place(module_name(path))
        not in {"backends", "app", "app_shield", "app_shield_edge", "app_volume", "bench", "testing"}
        for target, line, _, _ in imports(path)
        if place(target) == "backends"
    ]
    assert not named


def test_no_import_in_a_function_hides_a_circle() -> None:
    hidden = [
        f"{module_name(path)}:{line} imports {target}"
        for path in MODULES
        if place(module_name(path)) not in LAZY
        for target, line, inside, _ in imports(path)
        if inside
    ]
    assert not hidden


def test_no_circles() -> None:
    graph = {
        module_name(path): {target for target, _, inside, typing in imports(path) if not (inside or typing)}
        for path in MODULES
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"imports go in a circle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            if target != name:
                visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_every_place_has_a_level() -> None:
    assert {place(module_name(path)) for path in MODULES} <= set(LEVELS)

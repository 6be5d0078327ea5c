"""Edits of Python source text, and the faults and answers that are made of them. Pure.

An edit names the function it changes (`Class.method`) and the few tokens to replace: it finds its place in the
project's own text, which is not repeated here. An edit that doesn't fit raises; it is never half applied.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping

from msgspec import Struct

Source = Mapping[str, str]
"""Relative path -> text."""


class Edit(Struct, frozen=True):
    """Replace `old`, which occurs exactly once in the function `scope` of `path`, by `new`.

    Without `old` the whole function is replaced by `new`; without `scope` as well, `new` is appended to the file.
    """

    path: str
    scope: str = ""
    old: str = ""
    new: str = ""


class Answer(Struct, frozen=True):
    """One way to answer a fault: revert some of its parts, then edit on."""

    label: str
    fixed: int
    """How many of the tests that the fault breaks pass again. Graded, not believed: the job compares."""
    breaks: bool = False
    """It breaks a test that passed under the fault."""
    reverts: tuple[int, ...] = ()
    edits: tuple[Edit, ...] = ()


class Fault(Struct, frozen=True):
    """A deliberate fault: its parts are independent edits."""

    name: str
    what: str
    parts: tuple[Edit, ...]
    broken: int
    """Tests that fail with all parts in."""
    answers: tuple[Answer, ...]


def apply(source: Source, edits: Iterable[Edit]) -> dict[str, str]:
    """The source after `edits`, in order. Raises LookupError where one doesn't fit."""
    result = dict(source)
    for edit in edits:
        result[edit.path] = _edited(result[edit.path], edit)
    return result


def planted(source: Source, fault: Fault) -> dict[str, str]:
    """The source with the whole fault in."""
    return apply(source, fault.parts)


def answered(source: Source, fault: Fault, answer: Answer) -> dict[str, str]:
    """The source with the fault and then the answer."""
    left = (part for index, part in enumerate(fault.parts) if index not in answer.reverts)
    return apply(apply(source, left), answer.edits)


def _edited(text: str, edit: Edit) -> str:
    if not edit.scope:
        return text + edit.new
    lines = text.splitlines(keepends=True)
    node = _find(ast.parse(text), edit.scope.split("."))
    if node is None or node.end_lineno is None:
        raise LookupError(f"{edit.path} has no {edit.scope}")
    first, last = node.lineno - 1, node.end_lineno
    body = "".join(lines[first:last])
    if edit.old:
        if body.count(edit.old) != 1:
            raise LookupError(f"{edit.path}: {edit.scope} has {edit.old!r} {body.count(edit.old)} times")
        body = body.replace(edit.old, edit.new)
    else:
        body = textwrap.indent(textwrap.dedent(edit.new).strip("\n") + "\n", " " * node.col_offset)
    return "".join(lines[:first]) + body + "".join(lines[last:])


def _find(node: ast.AST, names: list[str]) -> ast.stmt | None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == names[0]:
            return child if len(names) == 1 else _find(child, names[1:])
    return None

"""Versions as npm and Go order them, and entries of `allow` and `deny` that name them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

_SEMVER = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?")
_RULE = re.compile(r"(@?[^@\s]+)(?:@(>=|<=|>|<|=)?\s*(\S+))?")

_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "=": lambda a, b: a == b,
}


def order(version: str) -> tuple[Any, ...] | None:
    """By which versions sort, as semantic versioning says; None where it isn't one."""
    found = _SEMVER.fullmatch(version.removeprefix("v"))
    if found is None:
        return None
    parts = found[4].split(".") if found[4] else []
    before = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)
    return int(found[1]), int(found[2]), int(found[3]), not parts, before


class Rule(Struct, frozen=True):
    """An entry of `allow` or `deny`: `left-pad`, `@scope/*`, `lodash@4.17.21`, `example.com/module@>=v1.2.3`."""

    name: str
    operator: str = ""
    bound: str = ""

    @classmethod
    def read(cls, text: str) -> Rule:
        """Raises `ValueError`."""
        found = _RULE.fullmatch(text.strip())
        if found is None or (found[3] and order(found[3]) is None):
            raise ValueError(f"{text!r} is neither a package nor versions of one (name@>=1.2.3)")
        return cls(found[1], (found[2] or "=") if found[3] else "", found[3] or "")

    @property
    def whole(self) -> bool:
        """Whether all versions are meant."""
        return not self.operator

    def names(self, name: str) -> bool:
        """Whether a package is meant."""
        return name.startswith(self.name[:-1]) if self.name.endswith("/*") else name == self.name

    def matches(self, version: str, *, otherwise: bool) -> bool:
        """Whether a version is meant; `otherwise` where it isn't one of semantic versioning."""
        if self.whole:
            return True
        own, bound = order(version), order(self.bound)
        return otherwise if own is None else _OPERATORS[self.operator](own, bound)

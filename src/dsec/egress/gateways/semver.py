"""Versions as npm and Go order them, and rules about packages that name them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
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

    def names(self, name: str) -> bool:
        """Whether a package is meant."""
        return name.startswith(self.name[:-1]) if self.name.endswith("/*") else name == self.name

    def matches(self, version: str, *, otherwise: bool) -> bool:
        """Whether a version is meant; `otherwise` where it isn't one of semantic versioning."""
        if not self.operator:
            return True
        own, bound = order(version), order(self.bound)
        return otherwise if own is None else _OPERATORS[self.operator](own, bound)


class Rules(Struct, frozen=True):
    """What of a registry one permission shows."""

    before: datetime | None = None
    allow: Sequence[Rule] | None = None
    deny: Sequence[Rule] = ()
    within: Sequence[Rule] | None = None
    """A second `allow`: both have to hold."""
    below: str = ""
    """Only this one and those whose names begin with it and a slash."""

    def package(self, name: str) -> bool:
        """Whether anything of a package can be shown."""
        if self.below and not f"{name}/".startswith(f"{self.below}/"):
            return False
        if any(rule.names(name) and not rule.operator for rule in self.deny):
            return False
        return all(each is None or any(rule.names(name) for rule in each) for each in (self.allow, self.within))

    def hidden(self, name: str, version: str, published: datetime | None) -> str | None:
        """Why a version isn't shown; None where it is."""
        if any(rule.names(name) and rule.matches(version, otherwise=True) for rule in self.deny):
            return "denied"
        for allowed in (self.allow, self.within):
            if allowed is not None and not any(
                rule.names(name) and rule.matches(version, otherwise=False) for rule in allowed
            ):
                return "not allowed"
        if self.before is not None:
            if published is None:
                return "its date isn't known"
            if published >= self.before:
                return f"published on {published.date()}, not before {self.before.isoformat()}"
        return None


class Either(Struct, frozen=True):
    """What several permissions show together."""

    rules: Sequence[Rules]

    @property
    def dated(self) -> bool:
        """Whether dates matter."""
        return any(each.before is not None for each in self.rules)

    def package(self, name: str) -> bool:
        """As `Rules.package`."""
        return any(each.package(name) for each in self.rules)

    def hidden(self, name: str, version: str, published: datetime | None) -> str | None:
        """As `Rules.hidden`: the first one's reason."""
        reasons = [each.hidden(name, version, published) for each in self.rules if each.package(name)]
        return None if None in reasons else next(iter(reasons), "denied")

"""What of a registry a permission shows: the time machine, `allow`, `deny`. One logic for all registries; how an entry
names packages and versions is the registry's (`simple.Rule`, `semver.Rule`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from dsec.egress.gateways.base import instant

V = TypeVar("V")
V_contra = TypeVar("V_contra", contravariant=True)


class Rule(Protocol[V_contra]):
    """An entry of `allow` or `deny`."""

    @property
    def name(self) -> str:
        """Of the package, as it was written."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all versions are meant."""
        ...

    def names(self, name: str) -> bool:
        """Whether a package is meant."""
        ...

    def matches(self, version: V_contra, *, otherwise: bool) -> bool:
        """Whether a version is meant; `otherwise` where that can't be known."""
        ...


class Rules(Struct, Generic[V], frozen=True):
    """What one permission shows."""

    before: datetime | None = None
    allow: Sequence[Rule[V]] | None = None
    deny: Sequence[Rule[V]] = ()
    within: Sequence[Rule[V]] | None = None
    """A second `allow`: both have to hold."""
    below: str = ""
    """Only this package and those whose names begin with it and a slash."""

    def package(self, name: str) -> bool:
        """Whether anything of a package can be shown."""
        if self.below and not f"{name}/".startswith(f"{self.below}/"):
            return False
        if any(rule.names(name) and rule.whole for rule in self.deny):
            return False
        return all(each is None or any(rule.names(name) for rule in each) for each in (self.allow, self.within))

    def hidden(self, name: str, version: V, published: datetime | None) -> str | None:
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
                return "the registry doesn't say when it was published"
            if published >= self.before:
                return f"published on {published.date()}, not before {self.before.isoformat()}"
        return None


class ReleaseOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a permission for a registry of packages may say; how an entry is written is the registry's."""

    before: str | None = None
    """Only what was published before it."""
    allow: list[str] | None = None
    """Only these packages or versions; absent: all."""
    deny: list[str] = []
    """Not these."""
    within: list[str] | None = None
    """Only these too: the definition's `allow`, where the policy has one of its own."""

    def read(self, read: Callable[[str], Rule[V]], below: str = "") -> Rules[V]:
        """What they mean; `read` makes a rule of an entry. Raises `ValueError`."""
        return Rules(
            below=below,
            before=None if self.before is None else instant(self.before),
            allow=None if self.allow is None else [read(each) for each in self.allow],
            deny=[read(each) for each in self.deny],
            within=None if self.within is None else [read(each) for each in self.within],
        )


class Either(Struct, Generic[V], frozen=True):
    """What several permissions show together."""

    rules: Sequence[Rules[V]]

    @property
    def dated(self) -> bool:
        """Whether dates matter."""
        return any(each.before is not None for each in self.rules)

    def package(self, name: str) -> bool:
        """As `Rules.package`."""
        return any(each.package(name) for each in self.rules)

    def hidden(self, name: str, version: V, published: datetime | None) -> str | None:
        """As `Rules.hidden`: the first one's reason."""
        reasons = [each.hidden(name, version, published) for each in self.rules if each.package(name)]
        return None if None in reasons else next(iter(reasons), "denied")

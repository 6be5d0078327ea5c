"""Who may do what in a cluster, as values: projects, bindings, keys.

A project is a path of names (`lab/team/agent-7`); a binding gives a principal a role, or single permissions, on a
project and all below it. Every binding but the operator's first one says by which other it was given, so that nobody
has what the giver has lost.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from dsec.spec.cluster import Natural

PROJECT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@:+-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._@:+-]{0,63}){0,15}$(?!\n)"
ProjectPath = Annotated[str, Meta(pattern=PROJECT_PATTERN, max_length=200)]
PrincipalName = Annotated[str, Meta(pattern=r"^(person|agent|service):[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}$(?!\n)")]


class Verb(StrEnum):
    """What can be allowed."""

    READ = "sandboxes.read"
    CREATE = "sandboxes.create"
    USE = "sandboxes.use"
    DELETE = "sandboxes.delete"
    LAYERS_READ = "layers.read"
    LAYERS_WRITE = "layers.write"
    GRADE = "grader.use"
    LOGS = "logs.read"
    KEYS = "keys.manage"
    PROJECTS = "projects.create"
    GRANT = "grants.manage"
    AUDIT = "audit.read"
    OPERATE = "cluster.operate"


class Quota(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of a project and all below it together; None: only the parents'."""

    sandboxes: Natural | None = None
    backends: dict[str, Natural] = {}
    """Sandboxes of each backend."""
    cpus: Annotated[float, Meta(ge=0)] | None = None
    memory_bytes: Natural | None = None
    creates_per_s: Annotated[float, Meta(gt=0)] | None = None

    def limits(self) -> dict[str, float]:
        """Those that bound what there is at a time (all but the pace), by name."""
        found: dict[str, float] = {f"backends.{name}": limit for name, limit in self.backends.items()}
        for name in ("sandboxes", "cpus", "memory_bytes"):
            limit = getattr(self, name)
            if limit is not None:
                found[name] = limit
        return found


class Project(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A project on record."""

    path: ProjectPath
    quota: Quota = Quota()
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Its part among its siblings under scarcity."""
    created_by: str = ""
    deleted: bool = False


class Binding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A principal's right on a project and all below it."""

    id: str
    principal: PrincipalName
    project: ProjectPath
    verbs: frozenset[Verb]
    given_by: str = ""
    """The binding by which its giver had the right; empty: an operator's, from outside."""
    expires_at: float | None = None


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An API key on record; only its hash is kept."""

    hash: str
    principal: PrincipalName
    project: ProjectPath
    """It speaks for this one and those below."""
    scopes: frozenset[Verb] | None = None
    """At most these; None: all that its principal has."""
    through: tuple[PrincipalName, ...] = ()
    """Who made it for another principal, last: it may only do what these hold too, when it is used."""
    expires_at: float | None = None
    revoked_at: float | None = None
    label: str = ""


class Usage(Struct, frozen=True, kw_only=True):
    """What a project itself, without those below, has now."""

    sandboxes: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    backends: dict[str, int] = {}


ROLES: dict[str, frozenset[Verb]] = {
    "viewer": frozenset({Verb.READ, Verb.LAYERS_READ, Verb.LOGS}),
    "solver": frozenset({Verb.READ, Verb.CREATE, Verb.USE, Verb.DELETE, Verb.LAYERS_READ}),
    "builder": frozenset(
        {Verb.READ, Verb.CREATE, Verb.USE, Verb.DELETE, Verb.LAYERS_READ, Verb.LAYERS_WRITE, Verb.LOGS}
    ),
    "grader": frozenset({Verb.READ, Verb.CREATE, Verb.USE, Verb.DELETE, Verb.LAYERS_READ, Verb.GRADE, Verb.LOGS}),
    "agent": frozenset(
        {Verb.READ, Verb.CREATE, Verb.USE, Verb.DELETE, Verb.LAYERS_READ, Verb.PROJECTS, Verb.GRANT, Verb.KEYS}
    ),
    "admin": frozenset(set(Verb) - {Verb.OPERATE}),
    "operator": frozenset(Verb),
}

"""Decisions of identity and access: who may do what, who may give what, and whether a quota has room.

Pure: an `Iam` is built of records and asked. Invariants: nobody gives what they don't hold, and every right is followed
back to its first giver when it is used, so that what was taken from a giver is gone for all below at the same moment; a
deleted project, or one below it, allows nothing; a sub-project's quota is never more than its parents'; a chain of
givers that is longer than `MAX_CHAIN`, or a circle, allows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from dsec.errors import Conflict, InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from dsec.spec.iam import Binding, Key, Project, Quota, Usage, Verb

MAX_CHAIN = 16


def lineage(path: str) -> Iterator[str]:
    """The project and those above it, itself first."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def below(path: str, top: str) -> bool:
    """Whether `path` is `top` or below it."""
    return path == top or path.startswith(top + "/")


class Iam:
    """The records of a cluster, and what follows from them."""

    def __init__(
        self, projects: Iterable[Project] = (), bindings: Iterable[Binding] = (), keys: Iterable[Key] = ()
    ) -> None:
        self._projects = {each.path: each for each in projects}
        self._bindings = {each.id: each for each in bindings}
        self._keys = {each.hash: each for each in keys}
        self._of: dict[str, dict[str, Binding]] = {}
        for each in self._bindings.values():
            self._of.setdefault(each.principal, {})[each.id] = each

    # --- records ----------------------------------------------------------------------------------------------------

    def put_project(self, project: Project) -> None:
        self._projects[project.path] = project

    def put_binding(self, binding: Binding) -> None:
        self.drop_binding(binding.id)
        self._bindings[binding.id] = binding
        self._of.setdefault(binding.principal, {})[binding.id] = binding

    def drop_binding(self, binding_id: str) -> None:
        """Take a right away, and all that was given by it. Idempotent."""
        gone = self._bindings.pop(binding_id, None)
        if gone is not None:
            del self._of[gone.principal][binding_id]

    def put_key(self, key: Key) -> None:
        self._keys[key.hash] = key

    def drop_key(self, hashed: str) -> None:
        """Idempotent."""
        self._keys.pop(hashed, None)

    def project(self, path: str) -> Project:
        """Raises `NotFound`, also where it, or one above it, was deleted: the two look the same."""
        if not self._exists(path):
            raise NotFound(f"there is no project {path[:200]!r}", remedy="A project is made within its parent.")
        return self._projects[path]

    def deleted(self, path: str) -> bool:
        """Whether it, or one above it, was deleted."""
        return any(each in self._projects and self._projects[each].deleted for each in lineage(path))

    def known(self, path: str) -> Project | None:
        """What is on record of a project, if anything is; deleted ones too."""
        return self._projects.get(path)

    def projects(self, top: str) -> list[Project]:
        """Those on record at or below a project that aren't deleted, by path; `top` empty: all."""
        found = [each for path, each in self._projects.items() if not top or below(path, top)]
        return sorted((each for each in found if not self.deleted(each.path)), key=lambda each: each.path)

    def ever(self, top: str) -> list[str]:
        """Paths at or below a project that are or were on record."""
        return [path for path in self._projects if below(path, top)]

    def binding(self, binding_id: str) -> Binding | None:
        return self._bindings.get(binding_id)

    def bindings(self, project: str) -> list[Binding]:
        """Those on a project and below it."""
        return [each for each in self._bindings.values() if below(each.project, project)]

    def weight(self, path: str) -> float:
        """Among its siblings."""
        found = self._projects.get(path)
        return found.weight if found is not None else 1.0

    # --- may they? --------------------------------------------------------------------------------------------------

    def authenticate(self, hashed: str, now: float) -> Key:
        """The key of a hash. Raises `Unauthenticated` where it isn't good: unknown, revoked, expired, of a project that
        is gone."""
        key = self._keys.get(hashed)
        if (
            key is None
            or (key.revoked_at is not None and key.revoked_at <= now)
            or (key.expires_at is not None and key.expires_at <= now)
            or not self._exists(key.project)
        ):
            raise Unauthenticated(
                "the API key is not valid", remedy="Make another, or ask who administers the project."
            )
        return key

    def allowed(self, key: Key, verb: Verb, project: str, now: float) -> bool:
        """Whether this key may do that there, now."""
        if key.scopes is not None and verb not in key.scopes:
            return False
        return (
            below(project, key.project)
            and self._exists(project)
            and all(self._holds_there(each, verb, project, now) for each in (key.principal, *key.through))
        )

    def demand(self, key: Key, verb: Verb, project: str, now: float) -> None:
        """Raises `PermissionDenied`, or `NotFound` where the caller may not even know that there is such a project."""
        if self.allowed(key, verb, project, now):
            return
        if verb is Verb.READ or not self.allowed(key, Verb.READ, project, now):
            raise NotFound(f"there is no project {project[:200]!r}")
        raise PermissionDenied(f"this key lacks {verb.value!r} on {project!r}")

    # --- may they give? ---------------------------------------------------------------------------------------------

    def delegate(self, by: Key, binding: Binding, now: float) -> Binding:
        """The binding as it may be put on record, with its giver filled in. Raises `PermissionDenied` where it is more
        than the giver has (rights, project, time), or the giver may give nothing there."""
        self.demand(by, Verb.GRANT, binding.project, now)
        beyond = sorted(verb for verb in binding.verbs if not self.allowed(by, verb, binding.project, now))
        if beyond:
            raise PermissionDenied(f"nobody gives what they don't hold: {', '.join(beyond)}", beyond=beyond)
        for giver in self._bindings_of(by.principal, binding.project, now):
            if binding.verbs | {Verb.GRANT} <= giver.verbs and self._depth(giver) < MAX_CHAIN - 1:
                return Binding(
                    id=binding.id,
                    principal=binding.principal,
                    project=binding.project,
                    verbs=binding.verbs,
                    given_by=giver.id,
                    expires_at=_sooner(_sooner(binding.expires_at, giver.expires_at), by.expires_at),
                )
        raise PermissionDenied(
            "no single right of yours covers all of that, or it was handed on too often",
            remedy="Give the parts one by one.",
        )

    def new_key(self, by: Key, key: Key, now: float) -> Key:
        """A key as it may be put on record. Raises `PermissionDenied`: a key can't make one that may do more than
        itself, and only for its own principal unless it may grant. One for another principal does what both hold, so
        that nobody takes rights from whoever has more."""
        self.demand(by, Verb.KEYS, key.project, now)
        through = by.through
        if key.principal != by.principal:
            self.demand(by, Verb.GRANT, key.project, now)
            beyond = sorted(verb for verb in key.scopes or () if not self.allowed(by, verb, key.project, now))
            if beyond:
                raise PermissionDenied(f"nobody gives what they don't hold: {', '.join(beyond)}", beyond=beyond)
            through = (*through, by.principal)
            if len(through) >= MAX_CHAIN:
                raise PermissionDenied("this right was handed on too often")
        scopes = key.scopes if by.scopes is None else by.scopes & (key.scopes if key.scopes is not None else by.scopes)
        if key.scopes is not None and scopes != key.scopes:
            raise PermissionDenied("a key can't make one with more scopes than its own")
        return Key(
            hash=key.hash,
            principal=key.principal,
            project=key.project,
            scopes=scopes,
            through=through,
            expires_at=_sooner(key.expires_at, by.expires_at),
            label=key.label,
        )

    def new_project(self, by: Key, project: Project, now: float) -> Project:
        """A sub-project as it may be put on record. Raises `PermissionDenied`, `NotFound` (no parent), `Conflict`
        (exists), `InvalidRequest` (a quota above its parents')."""
        parent = project.path.rpartition("/")[0]
        if not parent:
            raise PermissionDenied("only an operator makes a project at the top")
        self.demand(by, Verb.PROJECTS, parent, now)
        if project.path in self._projects:
            raise Conflict(f"the project {project.path!r} exists, or did", remedy="Names are used once.")
        self.check_quota(project)
        return Project(path=project.path, quota=project.quota, weight=project.weight, created_by=by.principal)

    def check_quota(self, project: Project) -> None:
        """Raises `InvalidRequest` where a project's quota is above that of one above it."""
        for path in list(lineage(project.path))[1:]:
            above = self._projects.get(path)
            if above is None:
                continue
            for field, limit in _limits(project.quota).items():
                outer = _limits(above.quota).get(field, math.inf)
                if limit > outer:
                    raise InvalidRequest(
                        f"quota: {field} is {limit:g}, the project {path!r} has {outer:g}", field=f"quota.{field}"
                    )

    # --- is there room? ---------------------------------------------------------------------------------------------

    def limits(self, path: str, backend: str) -> list[tuple[str, str, float]]:
        """What bounds a creation in a project: (project, field, limit) of itself and all above it."""
        found = []
        for each in lineage(path):
            project = self._projects.get(each)
            if project is not None:
                for field, limit in _limits(project.quota).items():
                    if not field.startswith("backends.") or field == f"backends.{backend}":
                        found.append((each, field, limit))
        return found

    def room(self, path: str, ask: Usage, usage: Mapping[str, Usage]) -> tuple[str, str] | None:
        """The first limit (project, field) that `ask` more in a project would pass, or None. `usage`: of every project
        itself."""
        asked = _used(ask)
        for each in lineage(path):
            project = self._projects.get(each)
            if project is None or project.quota == Quota():
                continue
            limits = _limits(project.quota)
            totals: dict[str, float] = {}
            for other, used in usage.items():
                if below(other, each):
                    for field, amount in _used(used).items():
                        totals[field] = totals.get(field, 0.0) + amount
            for field, limit in limits.items():
                if asked.get(field, 0.0) > 0 and totals.get(field, 0.0) + asked[field] > limit:
                    return each, field
        return None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _exists(self, path: str) -> bool:
        if path not in self._projects:
            return False
        return all(not self._projects[each].deleted for each in lineage(path) if each in self._projects)

    def _bindings_of(self, principal: str, project: str, now: float) -> Iterator[Binding]:
        for each in self._of.get(principal, {}).values():
            if below(project, each.project) and self._holds(each, now):
                yield each

    def _holds_there(self, principal: str, verb: Verb, project: str, now: float) -> bool:
        return any(verb in each.verbs for each in self._bindings_of(principal, project, now))

    def _holds(self, binding: Binding, now: float) -> bool:
        """Whether a right is good, back to its first giver."""
        each = binding
        for _ in range(MAX_CHAIN):
            if (each.expires_at is not None and each.expires_at <= now) or not self._exists(each.project):
                return False
            if not each.given_by:
                return True
            giver = self._bindings.get(each.given_by)
            if giver is None or not each.verbs | {Verb.GRANT} <= giver.verbs or not below(each.project, giver.project):
                return False
            each = giver
        return False

    def _depth(self, binding: Binding) -> int:
        depth, each = 0, binding
        while each.given_by and depth <= MAX_CHAIN:
            depth += 1
            each = self._bindings[each.given_by]
        return depth


def _limits(quota: Quota) -> dict[str, float]:
    found = quota.limits()
    if quota.creates_per_s is not None:
        found["creates_per_s"] = quota.creates_per_s
    return found


def _used(usage: Usage) -> dict[str, float]:
    return {
        "sandboxes": usage.sandboxes,
        "cpus": usage.cpus,
        "memory_bytes": usage.memory_bytes,
        **{f"backends.{name}": count for name, count in usage.backends.items()},
    }


def _sooner(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)

"""HTTP of rights: `/v1/projects`, `/v1/roles`, `/v1/keys`, `/v1/audit`.

Invariant: a change is in the audit stream before it is answered; one that can't be noted there is answered as
`unavailable`, though it holds.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from dsec.api.exchange import Exchange
from dsec.cluster.audit import Audit, AuditEntry
from dsec.cluster.iam import OPERATOR, Authority, Caller, checked_path
from dsec.cluster.keys import ClusterKey, Keys, Wish
from dsec.errors import InvalidRequest, NotFound
from dsec.spec.iam import ROLES, Binding, PrincipalName, Project, ProjectPath, Quota, Verb
from dsec.spec.network import KeyPolicy

Weight = Annotated[float, Meta(gt=0, le=1e6)]


class ProjectRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/projects`."""

    path: ProjectPath
    quota: Quota = Quota()
    weight: Weight = 1.0


class ProjectChange(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PATCH /v1/projects/{path}`: what isn't given stays."""

    quota: Quota | None = None
    weight: Weight | None = None


class ProjectInfo(Struct, frozen=True, kw_only=True):
    """A project, and what it has now, those below it included."""

    path: str
    quota: Quota
    weight: float
    created_by: str
    live: int


class RoleRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/roles`: a role by its name, or single permissions."""

    principal: PrincipalName
    project: ProjectPath | None = None
    """Null: the caller's."""
    role: str | None = None
    verbs: list[Verb] | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=3.2e8)] | None = None


class ClusterKeyRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/keys`."""

    label: str = ""
    policy: KeyPolicy | None = None
    project: ProjectPath | None = None
    """Null: the caller's."""
    principal: PrincipalName | None = None
    """Whose roles it uses; null: the caller's own, which for a root key is none."""
    scopes: list[Verb] | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=3.2e8)] | None = None


class Rotation(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/keys/{id}/rotate`."""

    overlap_s: Annotated[float, Meta(ge=0, le=604800)] = 300.0
    """The old key is good for so long."""


class MadeKey(Struct, frozen=True):
    """The only time that the key is seen."""

    project: str
    key: str
    id: str


class KeyList(Struct, frozen=True):
    keys: list[ClusterKey]


class AuditPage(Struct, frozen=True):
    """Oldest first; `after` of the next page is `next`."""

    entries: list[AuditEntry]
    next: int


class IamCalls:
    """Handlers; `ended` ends all sandboxes of a project, `live` counts them."""

    def __init__(
        self,
        authority: Authority,
        keys: Keys,
        audit: Audit,
        *,
        ended: Callable[[str, list[str]], Awaitable[None]],
        live: Callable[[str], int],
    ) -> None:
        self.authority = authority
        self._keys = keys
        self._audit = audit
        self._ended = ended
        self._live = live

    # --- projects ---------------------------------------------------------------------------------------------------

    async def projects(self, x: Exchange, rest: str, caller: Caller) -> None:
        """`/v1/projects`, `/v1/projects/{path}`"""
        method = x.scope["method"]
        path = unquote(rest)
        if not path:
            x.only("GET", "POST")
            if method == "POST":
                asked = x.decode(msgspec.json.Decoder(ProjectRequest), await x.body())
                wanted = Project(path=asked.path, quota=asked.quota, weight=asked.weight)
                project = await self.authority.make_project(caller, wanted)
                await self._note(caller, "project.create", project.path, project.path, quota=asked.quota)
                await x.answer(201, self._info(project))
            else:
                top = "" if caller.is_root and caller.project == OPERATOR else caller.project
                self.authority.demand(caller, Verb.READ, caller.project)
                found = self.authority.iam.projects(top)
                await x.answer(200, {"projects": [self._info(each) for each in found]})
            return
        checked_path(path)
        x.only("GET", "PATCH", "DELETE")
        if method == "GET":
            self.authority.demand(caller, Verb.READ, path)
            await x.answer(200, self._info(self.authority.iam.project(path)))
        elif method == "PATCH":
            change = x.decode(msgspec.json.Decoder(ProjectChange), await x.body())
            project = await self.authority.change_project(caller, path, lambda known: _changed(known, change))
            await self._note(caller, "project.change", path, path, quota=project.quota, weight=project.weight)
            await x.answer(200, self._info(project))
        else:
            await self.authority.change_project(caller, path, lambda known: replace(known, deleted=True))
            await self._note(caller, "project.delete", path, path)
            await self._ended(path, self.authority.iam.ever(path))
            await x.empty()

    def _info(self, project: Project) -> ProjectInfo:
        return ProjectInfo(
            path=project.path,
            quota=project.quota,
            weight=project.weight,
            created_by=project.created_by,
            live=self._live(project.path),
        )

    # --- roles ------------------------------------------------------------------------------------------------------

    async def roles(self, x: Exchange, rest: str, caller: Caller) -> None:
        """`/v1/roles`, `/v1/roles/{id}`"""
        if rest:
            x.only("DELETE")
            taken = await self.authority.take(caller, unquote(rest))
            await self._note(caller, "role.revoke", taken.project, taken.id, principal=taken.principal)
            await x.empty()
        elif x.scope["method"] == "POST":
            asked = x.decode(msgspec.json.Decoder(RoleRequest), await x.body())
            given = await self.authority.give(caller, _wanted(asked, caller.project))
            details = {"principal": given.principal, "verbs": sorted(given.verbs)}
            await self._note(caller, "role.grant", given.project, given.id, **details)
            await x.answer(201, given)
        else:
            x.only("GET", "POST")
            x.check_query("project")
            project = x.text("project") or caller.project
            self.authority.demand(caller, Verb.READ, project)
            await x.answer(200, {"roles": self.authority.iam.bindings(project)})

    # --- keys -------------------------------------------------------------------------------------------------------

    async def keys(self, x: Exchange, rest: str, caller: Caller) -> None:
        """`/v1/keys`, `/v1/keys/{id}`, `/v1/keys/{id}/rotate`"""
        key_id, _, verb = unquote(rest).partition("/")
        if key_id and verb == "rotate":
            x.only("POST")
            asked = x.decode(msgspec.json.Decoder(Rotation), await x.body() or b"{}")
            secret, new_id = await self._keys.rotate(key_id, caller, asked.overlap_s)
            await self._note(caller, "key.rotate", caller.project, new_id, old=key_id)
            await x.answer(201, MadeKey(caller.project, secret, new_id))
        elif key_id:
            x.only("DELETE")
            await self._keys.revoke(key_id, caller)
            await self._note(caller, "key.revoke", caller.project, key_id)
            await x.empty()
        elif x.scope["method"] == "POST":
            wanted = x.decode(msgspec.json.Decoder(ClusterKeyRequest), await x.body())
            wish = Wish(
                project=wanted.project or caller.project,
                label=wanted.label,
                policy=wanted.policy,
                principal=wanted.principal or "",
                scopes=None if wanted.scopes is None else frozenset(wanted.scopes),
                ttl_s=wanted.ttl_s,
            )
            secret, new_id = await self._keys.create(wish, by=caller)
            await self._note(caller, "key.create", wish.project, new_id, principal=wish.principal)
            await x.answer(201, MadeKey(wish.project, secret, new_id))
        else:
            x.only("GET", "POST")
            x.check_query("project")
            project = x.text("project") or caller.project
            self.authority.demand(caller, Verb.KEYS, project)
            await x.answer(200, KeyList(self._keys.list(project)))

    # --- audit ------------------------------------------------------------------------------------------------------

    async def audit(self, x: Exchange, rest: str, caller: Caller) -> None:
        """`/v1/audit`: what was changed and refused in the caller's project and below."""
        if rest:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")
        x.only("GET")
        x.check_query("after", "limit")
        after, limit = x.value("after", int, 0), x.value("limit", int, 100)
        if after < 0 or not 1 <= limit <= 1000:
            raise InvalidRequest("after is 0 or more, limit is 1 to 1000")
        everything = caller.is_root and caller.project == OPERATOR
        entries, following = await self._audit.read(None if everything else caller.project, after, limit)
        await x.answer(200, AuditPage(entries, following))

    async def _note(self, caller: Caller, what: str, project: str, about: str, **details: Any) -> None:
        plain = msgspec.to_builtins(details)
        await self._audit.note(what, by=caller.name, project=project, about=about, **plain)


def _changed(project: Project, change: ProjectChange) -> Project:
    return replace(
        project,
        quota=project.quota if change.quota is None else change.quota,
        weight=project.weight if change.weight is None else change.weight,
    )


def _wanted(asked: RoleRequest, project: str) -> Binding:
    """Raises `InvalidRequest`."""
    if (asked.role is None) == (asked.verbs is None):
        raise InvalidRequest("name either a `role` or `verbs`")
    if asked.role is not None and asked.role not in ROLES:
        raise InvalidRequest(f"there is no role {asked.role[:64]!r}", remedy=f"Roles: {', '.join(sorted(ROLES))}.")
    return Binding(
        id="",
        principal=asked.principal,
        project=asked.project or project,
        verbs=ROLES[asked.role] if asked.role is not None else frozenset(asked.verbs or ()),
        expires_at=None if asked.ttl_s is None else time.time() + asked.ttl_s,
    )

"""Who may do what in a running cluster: projects and roles on record, and the decisions of `plan/iam.py` over them.

Owns the bucket `dsec_iam`, which every apiserver follows, so that what is given, taken or deleted holds everywhere
within moments. A key without a principal is its project's *root key*, as one machine's keys are: it may do everything
in its project and below, whether or not there is a record of the project; those of the project `default` are the
operator's, and reach all projects. Invariants: only a root key (or the operator at a shell) gives what wasn't given to
it; a name of a deleted project is never used again.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from dsec.cluster.bus import Bucket
from dsec.edge.client import Principal
from dsec.errors import Conflict, InvalidRequest, NotFound, PermissionDenied, Unavailable
from dsec.plan.iam import Iam, below
from dsec.spec.iam import Binding, Key, Project, Verb
from dsec.spec.sandbox import NAME_PATTERN
from dsec.tasks import ended

OPERATOR = "default"
"""The project whose root keys reach all others, look at nodes and cordon them."""


class IamRecord(Struct, frozen=True, omit_defaults=True):
    """One record: a project, or a role that was given."""

    project: Project | None = None
    binding: Binding | None = None


class Caller(Principal, frozen=True):
    """Whose request it is, by which key."""

    key_id: str = ""
    key: Key | None = None
    """With `principal` empty for a root key."""

    @property
    def rights(self) -> Key:
        assert self.key is not None
        return self.key

    @property
    def is_root(self) -> bool:
        return not self.rights.principal

    @property
    def name(self) -> str:
        """For the audit stream."""
        return self.rights.principal or f"key:{self.key_id}"


class Authority:
    """For the event loop."""

    def __init__(self, bucket: Bucket[IamRecord], iam: Iam) -> None:
        self.iam = iam
        self.ready = asyncio.Event()
        self.changed: Callable[[], None] = lambda: None
        """Called when a project's record is another."""
        self._bucket = bucket
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._bucket.follow(self._heard, self.ready.set), name="iam")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    # --- may they? --------------------------------------------------------------------------------------------------

    def allowed(self, caller: Caller, verb: Verb, project: str) -> bool:
        key = caller.rights
        if not caller.is_root:
            return self.iam.allowed(key, verb, project, time.time())
        if (key.scopes is not None and verb not in key.scopes) or self.iam.deleted(project):
            return False
        operates = key.project == OPERATOR
        return operates or (verb is not Verb.OPERATE and below(project, key.project))

    def demand(self, caller: Caller, verb: Verb, project: str) -> None:
        """Raises `PermissionDenied`, or `NotFound` where the caller may not even know that there is such a project."""
        if self.allowed(caller, verb, project):
            return
        if project == caller.project or self.allowed(caller, Verb.READ, project):
            raise PermissionDenied(
                f"this key lacks {verb.value!r} on {project!r}", remedy="Ask who administers the project for the role."
            )
        raise NotFound(f"there is no project {project[:200]!r}")

    # --- projects ---------------------------------------------------------------------------------------------------

    async def make_project(self, caller: Caller, asked: Project) -> Project:
        """A sub-project; at the top an operator's alone. Raises `PermissionDenied`, `NotFound`, `Conflict`,
        `InvalidRequest`, `Unavailable`."""
        self._known()
        if self.iam.known(asked.path) is not None:
            raise Conflict(f"the project {asked.path!r} exists, or did", remedy="Names are used once.")
        if caller.is_root:
            parent = asked.path.rpartition("/")[0]
            self._demand_parent(caller, parent)
            self.iam.check_quota(asked)
            project = replace(asked, created_by=caller.name, deleted=False)
        else:
            project = self.iam.new_project(caller.rights, asked, time.time())
        if await self._bucket.put_if(_project_key(project.path), 0, IamRecord(project=project)) is None:
            raise Conflict(f"the project {asked.path!r} exists, or did", remedy="Names are used once.")
        self._put(IamRecord(project=project))
        return project

    async def change_project(self, caller: Caller, path: str, change: Callable[[Project], Project]) -> Project:
        """Another quota, weight, or its end: the parent's business, so that nobody lifts a limit of their own. A
        project that only keys speak of gets its record here. Raises as `make_project`."""
        self._known()
        parent = path.rpartition("/")[0]
        self._demand_parent(caller, parent)
        while True:
            revision, record = await self._bucket.get(_project_key(path))
            known = record.project if record is not None else None
            if known is not None and known.deleted:
                if change(known).deleted:
                    return known
                raise NotFound(f"there is no project {path[:200]!r}")
            if known is None and (parent or not caller.is_root):
                raise NotFound(f"there is no project {path[:200]!r}", remedy="POST /v1/projects makes it.")
            new = change(known or Project(path=path, created_by=caller.name))
            if not new.deleted:
                self.iam.check_quota(new)
            if await self._bucket.put_if(_project_key(path), revision, IamRecord(project=new)) is not None:
                self._put(IamRecord(project=new))
                return new

    # --- roles ------------------------------------------------------------------------------------------------------

    async def give(self, caller: Caller, asked: Binding) -> Binding:
        """A role, at most what the caller holds. Raises `PermissionDenied`, `NotFound`, `Unavailable`."""
        self._known()
        asked = replace(asked, id=secrets.token_hex(8))
        if caller.is_root:
            for verb in (Verb.GRANT, *asked.verbs):
                self.demand(caller, verb, asked.project)
            self.iam.project(asked.project)  # a role is on a project that is on record
            given = replace(asked, given_by="")
        else:
            given = self.iam.delegate(caller.rights, asked, time.time())
        await self._bucket.put(f"b.{given.id}", IamRecord(binding=given))
        self._put(IamRecord(binding=given))
        return given

    async def take(self, caller: Caller, binding_id: str) -> Binding:
        """Take a role away, and all that was given by it. Raises `NotFound`, `PermissionDenied`, `Unavailable`."""
        self._known()
        found = self.iam.binding(binding_id)
        if found is None:
            raise NotFound(f"there is no role {binding_id[:64]!r}", remedy="GET /v1/roles lists them.")
        self.demand(caller, Verb.GRANT, found.project)
        if not found.given_by and not caller.is_root:
            raise PermissionDenied("a root key gave this role, and only one takes it")
        await self._bucket.delete(f"b.{binding_id}")
        self.iam.drop_binding(binding_id)
        return found

    def _demand_parent(self, caller: Caller, parent: str) -> None:
        if parent:
            self.demand(caller, Verb.PROJECTS, parent)
        elif not self.allowed(caller, Verb.OPERATE, OPERATOR):
            raise PermissionDenied("projects at the top are the operator's business")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _known(self) -> None:
        if not self.ready.is_set():
            raise Unavailable("this server has just begun to learn about the cluster", remedy="Try again.")

    def _put(self, record: IamRecord) -> None:
        if record.project is not None:
            self.iam.put_project(record.project)
            self.changed()
        if record.binding is not None:
            self.iam.put_binding(record.binding)

    def _heard(self, key: str, record: IamRecord | None, _: int) -> None:
        if record is not None:
            self._put(record)
        elif key.startswith("b."):
            self.iam.drop_binding(key[2:])


def checked_path(path: str) -> str:
    """A project's path as a URL names it. Raises `InvalidRequest`."""
    if len(path) > 200 or not re.fullmatch(NAME_PATTERN, path):
        raise InvalidRequest("a project is letters, digits and ._/@:+- (at most 200)")
    return path


def _project_key(path: str) -> str:
    """Paths may hold what keys of a bucket may not."""
    return "p." + hashlib.sha256(path.encode()).hexdigest()[:40]

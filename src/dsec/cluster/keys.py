"""API keys of a cluster: one bucket, followed by every apiserver, so that a key that is revoked is refused everywhere
within moments.

Only hashes are kept. A key may have an end, scopes and a principal whose roles it uses (`iam.py`); what it may do and
grant is at most what its maker may. Invariant: a key of a deleted project, or of one below it, is good for nothing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time

from msgspec import Struct
from msgspec.structs import replace

from dsec.cluster.bus import Bucket
from dsec.cluster.fresh import Freshness
from dsec.cluster.iam import Authority, Caller
from dsec.edge.access import digest
from dsec.edge.client import ApiKey
from dsec.errors import Conflict, InvalidRequest, NotFound, PermissionDenied, Unauthenticated, Unavailable
from dsec.plan.permissions import within
from dsec.spec.iam import Key, Verb
from dsec.spec.network import KeyPolicy
from dsec.spec.sandbox import NAME_PATTERN
from dsec.tasks import ended

_ID_CHARACTERS = 16
_MAX_LOOKERS = 256
MAX_TTL_S = 10 * 366 * 86400.0
_FORM = re.compile(r"dsk_[A-Za-z0-9_-]{43}")


class KeyRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key on record, under its hash."""

    project: str
    label: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None
    expires_at: float | None = None
    policy: KeyPolicy | None = None
    principal: str = ""
    """Empty: a root key of its project."""
    scopes: frozenset[Verb] | None = None
    """At most these; None: all that its principal may."""
    through: tuple[str, ...] = ()
    """As `Key.through`."""


class ClusterKey(ApiKey, frozen=True, kw_only=True, omit_defaults=True):
    """A key on record, as it is listed."""

    principal: str = ""
    scopes: list[Verb] | None = None
    expires_at: float | None = None


class Wish(Struct, frozen=True, kw_only=True):
    """What a new key is to be."""

    project: str
    label: str = ""
    policy: KeyPolicy | None = None
    principal: str = ""
    scopes: frozenset[Verb] | None = None
    ttl_s: float | None = None


class Keys:
    """For the event loop."""

    def __init__(self, bucket: Bucket[KeyRecord], authority: Authority, fresh: Freshness | None = None) -> None:
        """`fresh`: what says whether what is known is; None: for somebody who asks nothing by it."""
        self._authority = authority
        self._fresh = fresh
        self.ready = asyncio.Event()
        self._bucket = bucket
        self._looking = asyncio.Lock()
        self._lookers = 0
        self._known: dict[str, KeyRecord] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._bucket.follow(self._changed, self.ready.set), name="keys")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    async def authenticate(self, bearer: str) -> Caller:
        """Whose key this is. Raises `Unauthenticated`, `Unavailable` before keys and projects are known, and when they
        aren't known any more."""
        if not (self.ready.is_set() and self._authority.ready.is_set()):
            raise Unavailable("this server has just begun to learn about the cluster", remedy="Try again.")
        if self._fresh is not None:
            self._fresh.check()
        hashed = digest(bearer)
        found = self._known.get(hashed)
        if found is None and _FORM.fullmatch(bearer):
            found = await self._look_up(hashed)
        if found is None or not _good(found) or self._authority.iam.deleted(found.project):
            raise Unauthenticated("the API key is not valid", remedy="Check DSEC_API_KEY, or make another key.")
        return Caller(
            project=found.project,
            label=found.label,
            policy=found.policy,
            key_id=hashed[:_ID_CHARACTERS],
            key=Key(
                hash=hashed,
                principal=found.principal,
                project=found.project,
                scopes=found.scopes,
                through=found.through,
                expires_at=found.expires_at,
            ),
        )

    async def _look_up(self, hashed: str) -> KeyRecord | None:
        """A key that was made elsewhere a moment ago. One look-up at a time, so that guesses can't flood the store."""
        if self._lookers >= _MAX_LOOKERS:
            raise Unavailable("too many unknown API keys are being looked up", remedy="Try again in a moment.")
        self._lookers += 1
        try:
            async with self._looking:
                found = self._known.get(hashed)
                if found is None:
                    _, found = await self._bucket.get(hashed)
                if found is not None:
                    self._known.setdefault(hashed, found)
                return found
        finally:
            self._lookers -= 1

    async def create(self, wish: Wish, *, by: Caller | None = None) -> tuple[str, str]:
        """A new key and its id; this is the only time that the key is seen. `by`: who makes it; None: an operator at a
        shell. Raises `InvalidRequest`, `PermissionDenied` (more than `by` may), `NotFound` (no such project for `by`),
        `Unavailable`."""
        if not re.fullmatch(NAME_PATTERN, wish.project) or len(wish.label) > 200:
            raise InvalidRequest("a project is letters, digits and ._/@:+- (at most 200), a label at most 200")
        if wish.ttl_s is not None and not 0 < wish.ttl_s <= MAX_TTL_S:
            raise InvalidRequest("ttl_s is above 0 and at most ten years", field="ttl_s")
        now = time.time()
        record = KeyRecord(
            project=wish.project,
            label=wish.label,
            created_at=now,
            expires_at=None if wish.ttl_s is None else now + wish.ttl_s,
            policy=wish.policy,
            principal=wish.principal,
            scopes=wish.scopes,
        )
        return await self._put_new(record if by is None else self._bounded(record, by))

    def _bounded(self, record: KeyRecord, by: Caller) -> KeyRecord:
        """What `by` may make of it. Raises as `create`."""
        if record.policy is None:
            record = replace(record, policy=by.policy)
        elif by.policy is not None and not within(record.policy, by.policy):
            raise PermissionDenied("a key can't make one that may grant more than itself")
        rights = by.rights
        if by.is_root:
            self._authority.demand(by, Verb.KEYS, record.project)
            if record.scopes is None:
                record = replace(record, scopes=rights.scopes)
            elif rights.scopes is not None and not record.scopes <= rights.scopes:
                raise PermissionDenied("a key can't make one with more scopes than its own")
            if rights.expires_at is not None:
                record = replace(record, expires_at=min(rights.expires_at, record.expires_at or rights.expires_at))
            return record
        wanted = Key(
            hash="",
            principal=record.principal or rights.principal,
            project=record.project,
            scopes=record.scopes,
            expires_at=record.expires_at,
        )
        made = self._authority.iam.new_key(rights, wanted, time.time())
        return replace(
            record, principal=made.principal, scopes=made.scopes, through=made.through, expires_at=made.expires_at
        )

    async def _put_new(self, record: KeyRecord) -> tuple[str, str]:
        secret = f"dsk_{secrets.token_urlsafe(32)}"
        hashed = digest(secret)
        await self._bucket.put(hashed, record)
        self._known[hashed] = record
        return secret, hashed[:_ID_CHARACTERS]

    async def rotate(self, key_id: str, by: Caller, overlap_s: float) -> tuple[str, str]:
        """A new key with the same rights, and its id; the old one is good for `overlap_s` more. Raises `NotFound`,
        `PermissionDenied`, `Conflict` where it isn't good any more, `Unavailable`."""
        hashed, old = self._may_change(key_id, by)
        if not _good(old):
            raise Conflict(f"the key {key_id} isn't good any more", remedy="Make another one.")
        now = time.time()
        new = self._bounded(replace(old, created_at=now), by)
        if replace(new, expires_at=old.expires_at, created_at=old.created_at) != old:  # who rotates it sees the new one
            raise PermissionDenied(
                "this key may do what the asking one may not", remedy="Its own principal, or a root key, rotates it."
            )
        made = await self._put_new(new)
        end = now + overlap_s
        ended = replace(old, expires_at=end if old.expires_at is None else min(old.expires_at, end))
        self._known[hashed] = ended
        await self._bucket.put(hashed, ended)
        return made

    async def revoke(self, key_id: str, by: Caller) -> None:
        """Idempotent. Raises `NotFound`, `PermissionDenied`, `Unavailable`."""
        hashed, key = self._may_change(key_id, by)
        revoked = replace(key, revoked_at=time.time() if key.revoked_at is None else key.revoked_at)
        self._known[hashed] = revoked  # here at once; elsewhere when the record says so
        await self._bucket.put(hashed, revoked)  # again, too: that it is so here doesn't say that it was written

    def _may_change(self, key_id: str, by: Caller) -> tuple[str, KeyRecord]:
        for hashed, key in self._known.items():
            if hashed[:_ID_CHARACTERS] == key_id and self._authority.allowed(by, Verb.READ, key.project):
                self._authority.demand(by, Verb.KEYS, key.project)
                if not key.principal and not by.is_root:
                    raise PermissionDenied("a project's root key is changed by root keys alone")
                return hashed, key
        raise NotFound(f"there is no API key {key_id[:64]!r}", remedy="GET /v1/keys lists them")

    def list(self, project: str) -> list[ClusterKey]:
        """A project's, in a steady order."""
        return [
            ClusterKey(
                id=hashed[:_ID_CHARACTERS],
                project=key.project,
                label=key.label,
                created_at=key.created_at,
                revoked_at=key.revoked_at,
                policy=key.policy,
                principal=key.principal,
                scopes=None if key.scopes is None else sorted(key.scopes),
                expires_at=key.expires_at,
            )
            for hashed, key in sorted(self._known.items())
            if key.project == project
        ]

    def _changed(self, hashed: str, record: KeyRecord | None, _: int) -> None:
        if record is None:
            self._known.pop(hashed, None)
        else:
            self._known[hashed] = record


def _good(key: KeyRecord) -> bool:
    """What is revoked is, whatever this machine's clock says."""
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > time.time())

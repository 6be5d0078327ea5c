"""API keys of a cluster: one bucket, followed by every apiserver, so that a key that is revoked is refused everywhere
within moments.

Only hashes are kept. A key may have an end, and what it may grant is at most what its maker may.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time

from msgspec import Struct
from msgspec.structs import replace

from dsec.cluster.bus import Bucket
from dsec.edge.access import digest
from dsec.edge.client import ApiKey, Principal
from dsec.errors import InvalidRequest, NotFound, PermissionDenied, Unauthenticated, Unavailable
from dsec.plan.permissions import within
from dsec.spec.network import KeyPolicy
from dsec.spec.sandbox import NAME_PATTERN

_ID_CHARACTERS = 16
_MAX_LOOKERS = 256
_FORM = re.compile(r"dsk_[A-Za-z0-9_-]{43}")


class KeyRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key on record, under its hash."""

    project: str
    label: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None
    expires_at: float | None = None
    policy: KeyPolicy | None = None


class Keys:
    """For the event loop."""

    def __init__(self, bucket: Bucket[KeyRecord]) -> None:
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
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def authenticate(self, bearer: str) -> Principal:
        """Whose key this is. Raises `Unauthenticated`, `Unavailable` before the keys are known."""
        if not self.ready.is_set():
            raise Unavailable("this server has just begun to learn about the cluster", remedy="Try again.")
        hashed = digest(bearer)
        found = self._known.get(hashed)
        if found is None and _FORM.fullmatch(bearer):
            found = await self._look_up(hashed)
        if found is None or not _good(found):
            raise Unauthenticated("the API key is not valid", remedy="Check DSEC_API_KEY, or make another key.")
        return Principal(found.project, None, found.label, found.policy)

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

    async def create(
        self,
        project: str,
        label: str = "",
        policy: KeyPolicy | None = None,
        *,
        by: Principal | None = None,
        ttl_s: float | None = None,
    ) -> str:
        """A new key; this is the only time that it is seen. Raises `InvalidRequest`, `PermissionDenied` (more than `by`
        may), `Unavailable`."""
        if not re.fullmatch(NAME_PATTERN, project) or len(label) > 200:
            raise InvalidRequest("a project is letters, digits and ._/@:+- (at most 200), a label at most 200")
        own = by.policy if by is not None else None
        if policy is not None and own is not None and not within(policy, own):
            raise PermissionDenied("a key can't make one that may grant more than itself")
        secret = f"dsk_{secrets.token_urlsafe(32)}"
        now = time.time()
        record = KeyRecord(
            project=project,
            label=label,
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            policy=policy if policy is not None else own,
        )
        await self._bucket.put(digest(secret), record)
        self._known[digest(secret)] = record
        return secret

    async def revoke(self, key_id: str) -> None:
        """Idempotent. Raises `NotFound`, `Unavailable`."""
        found = [(hashed, key) for hashed, key in self._known.items() if hashed[:_ID_CHARACTERS] == key_id]
        if not found:
            raise NotFound(f"there is no API key {key_id}")
        for hashed, key in found:
            if key.revoked_at is None:
                revoked = replace(key, revoked_at=time.time())
                self._known[hashed] = revoked  # here at once; elsewhere when the record says so
                await self._bucket.put(hashed, revoked)

    def list(self, project: str | None) -> list[ApiKey]:
        return [
            ApiKey(
                id=hashed[:_ID_CHARACTERS],
                project=key.project,
                label=key.label,
                created_at=key.created_at,
                revoked_at=key.revoked_at,
                policy=key.policy,
            )
            for hashed, key in sorted(self._known.items())
            if project is None or key.project == project
        ]

    def _changed(self, hashed: str, record: KeyRecord | None, _: int) -> None:
        if record is None:
            self._known.pop(hashed, None)
        else:
            self._known[hashed] = record


def _good(key: KeyRecord) -> bool:
    now = time.time()
    return (key.revoked_at is None or key.revoked_at > now) and (key.expires_at is None or key.expires_at > now)

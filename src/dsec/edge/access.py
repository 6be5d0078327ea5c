"""Who may do what: API keys of projects, tokens of single sandboxes.

Owns their form: `dsk_<secret>` and `dst_<sandbox id>_<secret>`, each secret 32 random bytes. Only SHA-256 of the whole
is kept; with that much randomness a slow hash gains nothing. Comparison takes constant time.

Beside the token that its creator got, each sandbox has an access token, `dst_<sandbox id>_~<tag>`, which can be told
again (to who holds an API key of the project): the tag is an HMAC under the node's key, so nothing of it is kept. Its
traffic token, `dtt_<sandbox id>_<tag>`, is made likewise and admits to its ports alone.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable

from msgspec.structs import replace

from dsec.edge.client import ApiKey, Principal
from dsec.errors import InvalidRequest, NotFound, PermissionDenied, SandboxNotFound, Unauthenticated
from dsec.journal.records import Journal, KeyRecord, Record
from dsec.plan.permissions import Registry, within
from dsec.ports import Clock
from dsec.spec.network import KeyPolicy, Network
from dsec.spec.sandbox import NAME_PATTERN
from dsec.spec.short_hash import sha256

_ID_CHARACTERS = 16


def digest(secret: str) -> str:
    """What is kept of a key or token."""
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def new_token(sandbox_id: str) -> str:
    return f"dst_{sandbox_id}_{secrets.token_urlsafe(32)}"


class Access:
    """Checks bearers against records."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        find: Callable[[str], Record | None],
        key: bytes,
        *,
        registry: Registry,
        policy: KeyPolicy,
    ) -> None:
        """`find`: the record of a sandbox, live or ended. `key`: the node's. `policy`: of keys that have none of their
        own."""
        self._registry = registry
        self._policy = policy
        self._key = key
        self._journal = journal
        self._clock = clock
        self._find = find
        self._keys = {key.hash: key for key in journal.api_keys()}
        self.asserted: Callable[[str], Principal] | None = None
        """In a cluster: whom an apiserver speaks for. API keys aren't this node's business then."""

    def authenticate(self, bearer: str) -> Principal:
        """Whose this is. Raises `Unauthenticated`."""
        hashed = digest(bearer)
        if bearer.startswith("dst_"):
            record = self._find(bearer[4:].partition("_")[0])
            if record is not None and (
                hmac.compare_digest(record.token, hashed)
                or hmac.compare_digest(digest(self.access_token(record.id)), hashed)
            ):
                return Principal(record.project, record.id)
        elif self.asserted is not None:
            return self.asserted(bearer)
        else:
            key = self._keys.get(hashed)  # by hash: how far it matches says nothing about the key
            if key is not None and key.revoked_at is None:
                return Principal(key.project, None, key.label, key.policy or self._policy)
        raise Unauthenticated(
            "the API key or token is not valid", remedy="Check DSEC_API_KEY, or make a key on the server."
        )

    def access_token(self, sandbox_id: str) -> str:
        """The token of a sandbox that can be told again."""
        tag = hmac.digest(self._key, b"access token\0" + sandbox_id.encode("ascii", "replace"), "sha256")
        return f"dst_{sandbox_id}_~{tag.hex()}"

    def traffic_token(self, sandbox_id: str) -> str:
        """The token of a sandbox's ports, which no call of the API takes."""
        tag = hmac.digest(self._key, b"traffic token\0" + sandbox_id.encode("ascii", "replace"), "sha256")
        return f"dtt_{sandbox_id}_{tag.hex()}"

    def authorize(self, principal: Principal, sandbox_id: str) -> None:
        """Raises `SandboxNotFound` or `PermissionDenied`."""
        if principal.sandbox_id is not None:
            if principal.sandbox_id != sandbox_id:
                raise PermissionDenied(
                    "this token is for another sandbox", remedy="Use that sandbox's token, or an API key."
                )
            return
        record = self._find(sandbox_id)
        if record is None or record.project != principal.project:
            raise no_sandbox(sandbox_id)

    def check_grants(self, principal: Principal, network: Network | None) -> None:
        """See `EdgeClient.check_grants`."""
        if not network:
            return
        if principal.sandbox_id is not None:
            raise PermissionDenied("a sandbox token can't change what its sandbox reaches", remedy="Use an API key.")
        self._registry.check(network)
        why = self._registry.check_key(network, principal.policy or self._policy)
        if why is not None:
            raise PermissionDenied(
                f"this API key can't give a sandbox that network: {why}",
                remedy="Use a key whose policy allows it; `dsec key create --help` says how one is made.",
            )

    async def create_key(
        self, project: str, label: str, policy: KeyPolicy | None = None, by: Principal | None = None
    ) -> str:
        """A new key; of one that a principal makes (`by`) the policy is at most its own. Raises `InvalidRequest`,
        `PermissionDenied`."""
        own = by.policy if by is not None else None
        if policy is not None:
            self._registry.check(policy.default)
            why = self._registry.check_key(policy.default, policy)
            if why is not None:
                raise InvalidRequest(f"the key's default network is beyond its policy: {why}", field="policy")
            if own is not None and not within(policy, own):
                raise PermissionDenied("a key can't make one that may grant more than itself")
        elif own is not None and own != self._policy:
            policy = own
        if not re.fullmatch(NAME_PATTERN, project) or len(label) > 200:
            raise InvalidRequest(
                "a project is letters, digits and ._/@:+- (at most 200), a label at most 200 characters"
            )
        secret = f"dsk_{secrets.token_urlsafe(32)}"
        key = KeyRecord(hash=digest(secret), project=project, label=label, created_at=self._clock.now(), policy=policy)
        await self._journal.put_key(key)
        self._keys[key.hash] = key
        return secret

    async def revoke_key(self, key_id: str) -> None:
        """Idempotent. Raises `NotFound`."""
        found = [key for key in self._keys.values() if key.hash[:_ID_CHARACTERS] == key_id]
        if not found:
            raise NotFound(f"there is no API key {key_id}")
        for key in found:
            if key.revoked_at is None:
                revoked = replace(key, revoked_at=self._clock.now())
                self._keys[key.hash] = revoked  # at once, even if the record takes its time
                await self._journal.put_key(revoked)

    def list_keys(self, project: str | None) -> list[ApiKey]:
        return [
            ApiKey(
                id=key.hash[:_ID_CHARACTERS],
                project=key.project,
                label=key.label,
                created_at=key.created_at,
                revoked_at=key.revoked_at,
                policy=key.policy,
            )
            for key in self._keys.values()
            if project is None or key.project == project
        ]


def no_sandbox(sandbox_id: str) -> SandboxNotFound:
    """For an id that was never given out, is another project's, or whose record is gone: all look the same."""
    return SandboxNotFound(
        f"there is no sandbox {sandbox_id[:64]}", remedy="Records of ended sandboxes are kept for a day."
    )

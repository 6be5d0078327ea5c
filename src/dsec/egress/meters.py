"""How much: rates, volumes and numbers of connections, per sandbox and permission; and the node's counters.

Owns the counts. Invariant: a limit is a policy's, so it holds for all connections of a permission together, and what
was counted stays counted when the policy changes.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from msgspec import Struct

from dsec.egress.http1 import Refused
from dsec.plan.egress import Rule
from dsec.spec.network import Reason

BURST_S = 0.25
"""So much of a rate may come at once."""


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one node allows. An operator's file may say otherwise."""

    sandbox_connections: int = 1024
    node_connections: int = 16_384
    head_s: float = 10.0
    """For a whole ClientHello or request head."""
    connect_s: float = 10.0
    idle_s: float = 3600.0
    half_closed_s: float = 300.0
    """Idle, when one direction has ended."""


class Totals:
    """Of one node since it began, for metrics."""

    def __init__(self) -> None:
        self.reasons: Counter[Reason] = Counter()
        self.open = 0
        self.out = 0
        self.back = 0
        self.queries = 0
        self.queries_refused = 0
        self.gateway_requests = 0


class Bucket:
    """A rate, kept by waiting afterwards: never more than `BURST_S` ahead."""

    __slots__ = ("_at", "_owed", "_rate")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._owed = 0.0
        self._at = asyncio.get_running_loop().time()

    def take(self, size: float) -> float:
        """Seconds to wait before the next."""
        now = asyncio.get_running_loop().time()
        self._owed = max(0.0, self._owed - (now - self._at) * self._rate) + size
        self._at = now
        return max(0.0, self._owed / self._rate - BURST_S)


class Use:
    """What a sandbox has used of one permission: a `Meter` for all its connections."""

    __slots__ = ("_bucket", "bytes", "connections", "rule")

    def __init__(self, rule: Rule) -> None:
        self.bytes = 0
        self.connections = 0
        self.rule = rule
        self._bucket: Bucket | None = None
        self.changed(rule)

    def changed(self, rule: Rule) -> None:
        """The policy's limits are others now."""
        if rule.bytes_per_s != self.rule.bytes_per_s or self._bucket is None:
            self._bucket = None if rule.bytes_per_s is None else Bucket(rule.bytes_per_s)
        self.rule = rule

    @property
    def refusal(self) -> Reason | None:
        """Why there may be no further connection."""
        if self.rule.connections is not None and self.connections >= self.rule.connections:
            return Reason.CONNECTIONS_LIMIT
        if self.rule.bytes is not None and self.bytes >= self.rule.bytes:
            return Reason.BYTES_LIMIT
        return None

    def take(self, size: int) -> float:
        """See `splice.Meter`."""
        self.bytes += size
        if self.rule.bytes is not None and self.bytes > self.rule.bytes:
            raise Refused(Reason.BYTES_LIMIT)
        return 0.0 if self._bucket is None else self._bucket.take(size)

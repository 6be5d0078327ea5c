"""What apiservers and edges say to each other: values, subjects, and the bearers by which an edge knows a caller.

A bearer `dsx_<payload>.<tag>` says on whose behalf an apiserver asks; the tag is an HMAC under a secret that the edge's
process made when it joined and that only apiservers learn. It names the incarnation and a time (of the edge's own
clock) after which it isn't taken: a request that was under way for too long, or is meant for another life of the node,
does nothing.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dsec.edge.client import Principal
from dsec.errors import Unauthenticated
from dsec.plan.fencing import Claim, Free
from dsec.plan.scheduler import Part
from dsec.spec.cluster import Natural, NodeFacts, NodeReport
from dsec.spec.network import KeyPolicy
from dsec.spec.runs import RunInfo

BEARER = "dsx_"
HEARD = "dsec.heard"
REFUSED = "x-dsec-refused"
"""In an edge's answer: it took nothing of this order, and never will."""
RUN = "x-dsec-run-info"
"""In a request to an edge: the run that a new sandbox belongs to, as the cluster has it on record."""
ORDER_S = 30.0
"""An order is taken for so long after it was written."""


class Join(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edge wants to serve: to `dsec.join.<edge>`, answered by one apiserver with a `Joined`."""

    facts: NodeFacts
    instance: str
    host: str
    """The machine and its boot."""
    had: int | None
    """The incarnation on its disk."""
    url: Annotated[str, Meta(pattern=r"^https?://[^/\s]+$(?!\n)", max_length=300)]
    """Where apiservers reach it."""
    secret: Annotated[str, Meta(min_length=32, max_length=128)]
    free: Free = ""
    """Only if the number is."""
    certificate: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$(?!\n)")] = ""
    """SHA-256 of the one that it shows there, for https; apiservers take no other."""
    v: int = 1
    """Of this wire. A later version adds fields, which an earlier one passes over; it may be one ahead or behind."""


class Joined(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer: the claim, or why not."""

    claim: Claim | None = None
    end_all: bool = False
    error: str = ""
    fatal: bool = False
    """Trying again is in vain."""
    shards: Natural = 0
    """Streams that take logs (`logs.py`); 0: an apiserver that knows of none."""
    brief: bool = False
    """Heartbeats may be brief: one that doesn't know this would take details that were left out for none."""
    hears: bool = False
    """Who hears a heartbeat that asks for it says so."""


class Member(Struct, frozen=True, kw_only=True):
    """The record of a node, in the bucket of members."""

    claim: Claim
    facts: NodeFacts
    url: str
    secret: str
    certificate: str = ""
    cordoned: bool = False


class Ping(Struct, frozen=True):
    """To `dsec.edge.<edge>.ping`: who serves there? And the answer."""

    instance: str = ""
    host: str = ""


class Heard(Struct, frozen=True):
    """To `HEARD`, which all edges hear, every few seconds from an apiserver that has a majority of the servers behind
    it: whose heartbeats come to it."""

    edges: bytes
    """A bit a number, the lowest first."""

    @staticmethod
    def of(edges: Iterable[int]) -> Heard:
        bits = 0
        for edge in edges:
            bits |= 1 << edge
        return Heard(bits.to_bytes(-(-bits.bit_length() // 8), "little"))

    def has(self, edge: int) -> bool:
        return edge >> 3 < len(self.edges) and bool(self.edges[edge >> 3] >> (edge & 7) & 1)


class RunNews(Struct, frozen=True):
    """To `dsec.edge.<edge>.runs`: a run was opened or renewed."""

    project: str
    run: RunInfo


class Made(Struct, frozen=True, kw_only=True):
    """The record of a request with a key: what it was, who decides about it, where its parts went."""

    digest: str
    owner: str
    parts: tuple[Part, ...] = ()


class _Payload(Struct, frozen=True, omit_defaults=True):
    project: str
    incarnation: Natural
    until: float
    holder: str
    label: str = ""
    policy: KeyPolicy | None = None
    at_once: Natural = 0


class Asserted(Struct, frozen=True):
    """What a good bearer says."""

    principal: Principal
    holder: str
    """The apiserver's process."""


class Heartbeat(Struct, frozen=True):
    """To `dsec.beat.<edge>`."""

    report: NodeReport
    now: float
    """The edge's wall clock."""
    details: int = 0
    """Number of the details (projects, runs, layers, what is charged to whom) of this process: while they are as they
    were, beats leave them out. Whoever doesn't have those of this number asks at `dsec.edge.<edge>.tell`."""
    brief: bool = False
    """They were left out."""
    unshipped: Natural = 0
    """Logs that aren't in the cluster to their end."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Payload).decode


def sign(principal: Principal, *, secret: str, incarnation: int, until: float, holder: str) -> str:
    """A bearer for an edge."""
    payload = _Payload(
        principal.project, incarnation, until, holder, principal.label, principal.policy, principal.at_once
    )
    text = base64.urlsafe_b64encode(_encode(payload)).decode().rstrip("=")
    return f"{BEARER}{text}.{_tag(text, secret)}"


def verify(bearer: str, *, secret: str, incarnation: int, now: float) -> Asserted:
    """What it says. Raises `Unauthenticated`."""
    text, _, tag = bearer.removeprefix(BEARER).partition(".")
    if bearer.startswith(BEARER) and hmac.compare_digest(tag.encode(), _tag(text, secret).encode()):
        try:
            payload = _decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except (msgspec.MsgspecError, binascii.Error):
            payload = None
        if payload is not None and payload.incarnation == incarnation and now <= payload.until:
            principal = Principal(payload.project, None, payload.label, payload.policy, payload.at_once)
            return Asserted(principal, payload.holder)
    raise Unauthenticated("this isn't an apiserver's word, or no longer", remedy="Ask an apiserver.")


def _tag(text: str, secret: str) -> str:
    return hmac.digest(secret.encode(), text.encode("ascii", "replace"), "sha256").hex()

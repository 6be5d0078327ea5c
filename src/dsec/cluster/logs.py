"""Trajectories in the cluster: their streams, what a message of one holds, where bodies lie, and how a log is read.

An edge publishes each sandbox's entries, the lines of its own log, to `dsec.log.SHARD.EDGE.SANDBOX.GENERATION`; only
apiservers read them. `SHARD` is a digest of the id, one stream each. `GENERATION` is how often the sandbox was made
anew elsewhere: each has a chain of its own, from `create` on. Invariants: what is acknowledged is in a majority of the
servers; messages may come twice or out of order, so a reader goes by the numbers of the entries and takes what follows
without a gap; who writes is in the subject, which the servers check, so that no edge writes another's log. What an
entry names by digest is in the shared store, encrypted under a key that is in the stream alone: an edge can't read
what was kept of another's sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import zlib
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Struct

from dsec.errors import NotFound
from dsec.ports import BlobStore
from dsec.spec.cluster import Natural
from dsec.spec.trajectory import Broken, Entry, EntryType, check, parse, root_of

SHARDS = 8
KEEP_S = 7 * 86400
"""How long streams and bodies are kept, from when they were written."""
MESSAGE_BYTES = 256 << 10
"""Lines go into a message up to this; a single one may be longer."""
VERSION = 1
_NONCE = 12
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAMES = frozenset({"blob", "argv_blob", "command_blob", "env"})


class Shipment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of a message; entries follow it, a line each. What a later version adds is passed over."""

    v: int = VERSION
    incarnation: Natural = 0
    """Of the edge that sends it."""
    key: str = ""
    """Under which bodies are encrypted, hexadecimal."""


class Chain(Struct, frozen=True, kw_only=True):
    """What the streams have of one generation: a chain from its first entry on, without a gap."""

    edge: int
    generation: int
    lines: list[bytes]
    entries: list[Entry]
    key: str = ""

    @property
    def whole(self) -> bool:
        """Whether it was made whole: a later generation is when everything that came before was done again."""
        return bool(self.entries) and (
            self.generation == 0 or any(entry.type == EntryType.REBUILT for entry in self.entries)
        )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Shipment).decode


def stream_of(shard: int) -> str:
    """A stream's name."""
    return f"dsec_log_{shard}"


def subjects_of(shard: int) -> str:
    """What it takes."""
    return f"dsec.log.{shard}.>"


def shard_of(sandbox_id: str, shards: int) -> int:
    return zlib.crc32(sandbox_id.encode()) % shards


def subject_of(sandbox_id: str, edge: int, generation: int, shards: int) -> str:
    """Where an edge publishes entries of a sandbox."""
    return f"dsec.log.{shard_of(sandbox_id, shards)}.{edge}.{sandbox_id}.{generation}"


def all_of(sandbox_id: str, shards: int) -> str:
    """Whatever any edge published of a sandbox."""
    return f"dsec.log.{shard_of(sandbox_id, shards)}.*.{sandbox_id}.*"


def pack(shipment: Shipment, lines: list[bytes]) -> bytes:
    """A message."""
    return b"".join([_encode(shipment), b"\n", *lines])


def unpack(message: bytes) -> tuple[Shipment, list[bytes]]:
    """Its parts. Raises `Broken`."""
    head, _, rest = message.partition(b"\n")
    try:
        return _decode(head), rest.splitlines(keepends=True)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Broken(0, f"not a shipment: {error}") from None


def assemble(messages: list[bytes], sandbox_id: str, edge: int, generation: int) -> Chain:
    """The chain that messages hold, as far as it goes without a gap or a forged entry."""
    found: dict[int, tuple[bytes, Entry]] = {}
    key = ""
    for message in messages:
        try:
            shipment, lines = unpack(message)
            for line in lines:
                entry = parse(line)
                found.setdefault(entry.seq, (line, entry))
        except Broken:
            continue
        key = shipment.key or key
    lines, entries, prev = [], [], root_of(sandbox_id)
    for seq in range(1, len(found) + 1):
        if seq not in found:
            break
        line, entry = found[seq]
        try:
            check(entry, seq, prev)
        except Broken:
            break
        lines.append(line)
        entries.append(entry)
        prev = entry.hash
    return Chain(edge=edge, generation=generation, lines=lines, entries=entries, key=key)


# --- bodies ---------------------------------------------------------------------------------------------------------


def digests_in(data: Any) -> set[str]:
    """What an entry's data names by digest."""
    found: set[str] = set()
    if isinstance(data, dict):
        for name, value in data.items():
            if name in _NAMES and isinstance(value, str):
                if _DIGEST.fullmatch(value):
                    found.add(value)
            else:
                found |= digests_in(value)
    return found


def key_of(node_key: bytes, sandbox_id: str) -> bytes:
    """Under which this node encrypts a sandbox's bodies; its own secret until it is in the stream."""
    return hmac.digest(node_key, b"trajectory\0" + sandbox_id.encode(), "sha256")


def body_key(entry_time: float, sandbox_id: str, digest: str, key: bytes = b"") -> str:
    """Where a body lies in the shared store: by day, so that old ones are found. `key`: of one that was written where a
    sandbox was made anew, apart from what its nodes before wrote, so that a rebuild which fails takes nothing away."""
    apart = f".{hashlib.sha256(key).hexdigest()[:16]}" if key else ""
    return f"trajectories/{int(entry_time // 86400)}/{sandbox_id}/{digest}{apart}"


def encrypt(data: bytes, key: bytes, digest: str) -> bytes:
    """A body as it lies there."""
    nonce = secrets.token_bytes(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, data, digest.encode())


def decrypt(data: bytes, key: bytes, digest: str) -> bytes | None:
    """The body; None where it isn't that."""
    try:
        plain = AESGCM(key).decrypt(data[:_NONCE], data[_NONCE:], digest.encode())
    except (InvalidTag, ValueError):
        return None
    return plain if hashlib.sha256(plain).hexdigest() == digest else None


async def kept_body(store: BlobStore, at: float, sandbox_id: str, digest: str, key: bytes) -> bytes | None:
    """A body of the log whose bodies are under this key; None where there is none. Raises `Unavailable`."""
    for place in (body_key(at, sandbox_id, digest), body_key(at, sandbox_id, digest, key)):
        with contextlib.suppress(NotFound):
            data = await asyncio.to_thread(decrypt, await store.get(place), key, digest)
            if data is not None:
                return data
    return None

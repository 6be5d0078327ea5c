"""DNS as programs inside see it: answers made here, out of the policy alone. Pure.

Invariants: nothing of a query ever leaves the node; whatever bytes come in, the answer is at most a header, the
question and one address; a question with a compressed name, or with more than one question, is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ipaddress import IPv4Address

TTL_S = 60
MAX_MESSAGE = 4096

_HEADER = struct.Struct("!HHHHHH")
_QUESTION = struct.Struct("!HH")
_A, _PTR, _ANY, _IN = 1, 12, 255, 1
_NOERROR, _FORMERR, _NXDOMAIN, _NOTIMP, _REFUSED = 0, 1, 3, 4, 5
_ALLOWED = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")


def answer(
    query: bytes, resolve: Callable[[str], IPv4Address | None], reverse: Callable[[IPv4Address], str | None]
) -> bytes | None:
    """The answer to one query, or None for silence.

    `resolve`: the stand-in address of a name (lower case, no trailing dot), None where it isn't granted: then the
    answer is NXDOMAIN for every type, which makes programs give up at once. `reverse`: the name that an address
    stands for.
    """
    if not _HEADER.size <= len(query) <= MAX_MESSAGE:
        return None
    number, flags, questions, _, _, _ = _HEADER.unpack_from(query)
    if flags & 0x8000:
        return None  # an answer
    if flags >> 11 & 0xF:
        return _reply(number, flags, _NOTIMP)
    parsed = _question(query) if questions == 1 else None
    if parsed is None:
        return _reply(number, flags, _FORMERR)
    name, kind, family, end = parsed
    question = query[_HEADER.size : end]
    if family not in (_IN, _ANY):
        return _reply(number, flags, _REFUSED, question)
    if name is None:
        return _reply(number, flags, _NXDOMAIN, question)
    if kind == _PTR and name.endswith(".in-addr.arpa"):
        found = _reversed(name, reverse)
        if found is None:
            return _reply(number, flags, _NXDOMAIN, question)
        return _reply(number, flags, _NOERROR, question, (_PTR, found))
    address = resolve(name)
    if address is None:
        return _reply(number, flags, _NXDOMAIN, question)
    if kind in (_A, _ANY):
        return _reply(number, flags, _NOERROR, question, (_A, address.packed))
    return _reply(number, flags, _NOERROR, question)


def _question(query: bytes) -> tuple[str | None, int, int, int] | None:
    """Name (None: one that no host has), type, class, and where the question ends; None: malformed."""
    at, labels, plain = _HEADER.size, [], True
    while True:
        if at >= len(query):
            return None
        size = query[at]
        at += 1
        if size == 0:
            break
        if size > 63 or at + size > len(query) or at + size - _HEADER.size > 254:
            return None
        label = query[at : at + size].lower()
        plain = plain and _ALLOWED.issuperset(label)
        labels.append(label)
        at += size
    if at + _QUESTION.size > len(query):
        return None
    kind, family = _QUESTION.unpack_from(query, at)
    name = b".".join(labels).decode("ascii") if plain and labels else None
    return name, kind, family, at + _QUESTION.size


def _reversed(name: str, reverse: Callable[[IPv4Address], str | None]) -> bytes | None:
    parts = name.removesuffix(".in-addr.arpa").split(".")
    try:
        found = reverse(IPv4Address(".".join(reversed(parts))))
    except ValueError:
        return None
    if found is None:
        return None
    return b"".join(bytes((len(label),)) + label.encode("ascii") for label in found.split(".")) + b"\0"


def _reply(number: int, flags: int, code: int, question: bytes = b"", record: tuple[int, bytes] | None = None) -> bytes:
    """Recursion is available; authoritative. `record`: type and data of the one answer."""
    head = 0x8480 | (flags & 0x7900) | code
    found = b"" if record is None else struct.pack("!HHHIH", 0xC00C, record[0], _IN, TTL_S, len(record[1])) + record[1]
    return _HEADER.pack(number, head, 1 if question else 0, 1 if record else 0, 0, 0) + question + found

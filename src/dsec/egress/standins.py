"""Addresses that stand for names inside one sandbox.

Owns the table. Invariants: an address stands for one name, and for the same one for as long as the table remembers it,
across edges too (`saved` is told of every new pair; the table is filled again from that); what a name gets depends on
the name and the sandbox alone, unless two names collide; the table is bounded, and the name that was asked for longest
ago makes room.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address

BASE = int(IPv4Address("198.18.0.0"))
SIZE = 1 << 17
RESERVED = 256
"""At the start: for the platform's own."""
PROXY = IPv4Address(BASE + 1)
"""Stands for the HTTP proxy in every sandbox."""
MOST = 8192


class StandIns:
    """One sandbox's."""

    def __init__(
        self, sandbox_id: str, saved: Callable[[str, int], None], known: Iterable[tuple[str, int]] = ()
    ) -> None:
        """`saved(name, address)`: a new pair, or one that is used again by another name."""
        self._salt = sandbox_id.encode()
        self._saved = saved
        self._by_name: dict[str, int] = {}
        self._by_address: dict[int, str] = {}
        for name, address in known:
            self._by_name[name] = address
            self._by_address[address] = name

    def __len__(self) -> int:
        return len(self._by_name)

    def address(self, name: str) -> IPv4Address:
        """The address that stands for a name from now on."""
        found = self._by_name.pop(name, None)
        if found is None:
            found = self._choose(name)
            self._by_address[found] = name
            self._saved(name, found)
        self._by_name[name] = found  # the last one asked for
        return IPv4Address(found)

    def name(self, address: IPv4Address) -> str | None:
        """What an address stands for."""
        return self._by_address.get(int(address))

    def _choose(self, name: str) -> int:
        if len(self._by_name) >= MOST:
            oldest = next(iter(self._by_name))
            del self._by_address[self._by_name.pop(oldest)]
        attempt = 0
        while True:
            digest = hashlib.blake2b(f"{attempt}\0{name}".encode(), key=self._salt[:64], digest_size=8).digest()
            address = BASE + RESERVED + int.from_bytes(digest, "big") % (SIZE - 2 * RESERVED)
            if address not in self._by_address:
                return address
            attempt += 1


def is_stand_in(address: IPv4Address) -> bool:
    """Whether an address is of the range."""
    return BASE <= int(address) < BASE + SIZE

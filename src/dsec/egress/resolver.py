"""Names outside, resolved once: the address that was checked is the one that is connected to.

Owns a bounded cache. Invariant: at most one look-up of a name is under way, and at most `AT_ONCE` of all, whatever
programs inside ask for.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

KEEP_S = 30.0
KEEP_FAILED_S = 2.0
MOST = 4096
AT_ONCE = 64
TIMEOUT_S = 10.0

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""Addresses of a name in the order to try them; OSError where it has none."""


async def system_lookup(name: str) -> list[str]:
    """By the host's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


class Resolver:
    """For one event loop."""

    def __init__(self, lookup: Lookup = system_lookup, fixed: Mapping[str, Sequence[str]] | None = None) -> None:
        """`fixed`: addresses of names that nobody is asked for."""
        self._lookup = lookup
        self._fixed = fixed or {}
        self._known: OrderedDict[str, tuple[float, Sequence[str]]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Sequence[str]]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def resolve(self, name: str) -> Sequence[str]:
        """Addresses of a name; empty where it has none."""
        fixed = self._fixed.get(name)
        if fixed is not None:
            return fixed
        loop = asyncio.get_running_loop()
        known = self._known.get(name)
        if known is not None and known[0] > loop.time():
            return known[1]
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = loop.create_task(self._ask(name))
        return await asyncio.shield(asking)

    async def _ask(self, name: str) -> Sequence[str]:
        try:
            async with self._turns, asyncio.timeout(TIMEOUT_S):
                found = await self._lookup(name)
        except (OSError, UnicodeError):
            found = ()
        finally:
            del self._asking[name]
        until = asyncio.get_running_loop().time() + (KEEP_S if found else KEEP_FAILED_S)
        self._known[name] = (until, found)
        self._known.move_to_end(name)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return found

    async def close(self) -> None:
        """Nobody waits for look-ups any more."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

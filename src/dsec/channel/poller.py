"""Readiness of many descriptors through one that the event loop watches.

An event loop registers a descriptor with several system calls and objects; with one of them a channel, that was a
noticeable share of making a short-lived sandbox. Here it is one call to register and none to let go. One poller an
event loop; it holds a descriptor of its own only while it watches any.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from weakref import WeakKeyDictionary

_EVENTS_AT_ONCE = 64


class Poller:
    """For one event loop. Level-triggered, as the loop itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None
        self._handlers: dict[int, Callable[[], None]] = {}

    def add(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `fd` can be read or its other end is closed."""
        epoll = self._epoll
        if epoll is None:
            epoll = self._epoll = select.epoll()
            self._loop.add_reader(epoll.fileno(), self._ready)
        epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """Before `fd` is closed, which also takes it out of the kernel's list. Idempotent."""
        self._handlers.pop(fd, None)
        if self._epoll is not None and not self._handlers:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _ready(self) -> None:
        handlers, epoll = self._handlers, self._epoll
        if epoll is None:
            return
        for fd, _ in epoll.poll(0, _EVENTS_AT_ONCE):
            handler = handlers.get(fd)
            if handler is not None:  # else one before it closed it
                handler()


_pollers: WeakKeyDictionary[asyncio.AbstractEventLoop, Poller] = WeakKeyDictionary()


def poller() -> Poller:
    """The running event loop's."""
    loop = asyncio.get_running_loop()
    found = _pollers.get(loop)
    if found is None:
        found = _pollers[loop] = Poller(loop)
    return found

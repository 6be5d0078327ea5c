"""The event loop behind the sync client: one background thread a process.

Owns that thread. It is made when it is first needed, again in a process that was forked (threads don't survive a
fork), and it is a daemon that ends with the process. Because the loop runs in a thread of its own, the sync client
works where a loop runs already, as in a notebook.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Portal:
    """A running event loop in a thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="dsec client", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it; an interrupt (Ctrl-C) cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "a sync dsec call inside a callback of the sync client would wait for itself; "
                "use the async client there, or another thread"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread; what is still open in the loop is closed first."""
        if self.pid != os.getpid() or self._loop.is_closed():
            return
        self.call(_finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


async def _finish() -> None:
    me = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not me]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


_lock = threading.Lock()
_portal: Portal | None = None


def portal() -> Portal:
    """This process's portal."""
    global _portal  # noqa: PLW0603
    found = _portal
    if found is not None and found.pid == os.getpid():
        return found
    with _lock:
        if _portal is None or _portal.pid != os.getpid():
            _portal = Portal()
            atexit.register(_portal.close)
        return _portal


def call(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the async client to its end."""
    return portal().call(work)


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """The items of an asynchronous iterator; it is closed when the loop over this is left."""
    try:
        while True:
            try:
                yield call(_next(items))
            except StopAsyncIteration:
                return
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            call(close())


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()  # a thread that no longer exists may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Wrapper:
    """A sync object: holds its async twin."""

    _async: Any


def unwrap(value: Any) -> Any:
    """The async twin of a sync object, also within a tuple; anything else as it is."""
    if type(value) is tuple:
        return tuple(unwrap(each) for each in value)
    return value._async if isinstance(value, Wrapper) else value


def unwrap_each(values: Iterable[Any]) -> list[Any]:
    """Likewise for the items of an iterable."""
    return [unwrap(value) for value in values]

"""The memory of a process that serves for weeks: what Python's collector and the C library's allocator do with it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc

TIDY_S = 60.0


def settle() -> None:
    """Call once the process is complete: what is there now stays, so that no collection walks over it. Requests leave
    few cycles behind and sandboxes are many objects to walk, so collections are rare."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def trim() -> None:
    """Give pages back in which nothing lives any more: the allocator alone does so only at the end of its heap. A few
    milliseconds; nothing where the C library has no such call."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(ctypes.c_size_t(0))


async def tidy_until(over: asyncio.Event) -> None:
    """`trim` now and then, until the event."""
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), TIDY_S)
            return
        await asyncio.to_thread(trim)

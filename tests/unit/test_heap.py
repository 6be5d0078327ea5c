"""Memory that nothing uses goes back."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path

import pytest

from dsec.kernel import heap

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library gives pages back by itself")
def test_pages_in_which_nothing_lives_are_given_back() -> None:
    blocks = [bytearray(2000) for _ in range(30_000)]
    last = bytearray(2000)  # what lives at the end of the heap keeps all below it
    full = resident()
    del blocks
    heap.trim()
    assert resident() < full - 30 * MIB
    assert len(last) == 2000


async def test_tidying_ends_with_the_event() -> None:
    over = asyncio.Event()
    task = asyncio.create_task(heap.tidy_until(over))
    await asyncio.sleep(0)
    assert not task.done()
    over.set()
    async with asyncio.timeout(120):
        await task

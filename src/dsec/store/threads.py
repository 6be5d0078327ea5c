"""Pools whose threads are there before the first call: starting one takes longer than most of what it is for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads, all of them running."""
    pool = ThreadPoolExecutor(threads, name)
    together = threading.Barrier(threads)
    for done in [pool.submit(together.wait) for _ in range(threads)]:
        done.result()
    return pool

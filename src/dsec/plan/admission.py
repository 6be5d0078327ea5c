"""Which creations start now, wait, or are refused.

Pure. Rules, in order: what can never fit is refused; the queue is first in, first out, so that a large request isn't
starved by small ones; what starts at the same time is bounded, because hundreds at once make all of them slow; live
sandboxes, promised memory, real free memory and disk are bounded by the node's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """What a node takes on."""

    max_starting: int
    max_live: int
    max_queued: int
    memory_capacity_bytes: int
    """Sum of the sandboxes' memory limits that may be promised: the node's memory times the overcommit."""
    memory_reserve_bytes: int = 0
    """Nothing starts while less memory than this is free in reality."""
    disk_reserve_bytes: int = 0
    """The same for the data volume."""


class Load(Struct, frozen=True, kw_only=True):
    """What a node carries."""

    starting: int
    live: int
    """Everything that isn't ended, starting and ending ones included."""
    memory_committed_bytes: int
    memory_free_bytes: int
    disk_free_bytes: int


class Wait(Enum):
    """What a creation waits for."""

    STARTING = "too many sandboxes are starting"
    LIVE = "the node has as many sandboxes as it takes"
    MEMORY_COMMITTED = "the node's memory is promised to other sandboxes"
    MEMORY_FREE = "the node is short of free memory"
    DISK_FREE = "the node's data volume is nearly full"


class Plan(Struct, frozen=True):
    """The first `start` of the queue begin now; the rest waits for `wait`."""

    start: int
    wait: Wait | None


def never_fits(memory_bytes: int, limits: Limits) -> str | None:
    """Why a request could not be met by this node even if it were empty, or None."""
    if limits.max_live < 1:
        return "this node takes no sandboxes"
    if memory_bytes > limits.memory_capacity_bytes:
        return f"memory_bytes is {memory_bytes}, this node promises at most {limits.memory_capacity_bytes} in all"
    return None


def plan(queue: Sequence[int], load: Load, limits: Limits) -> Plan:
    """How many from the head of the queue start now. `queue`: the memory limits of those that wait, in bytes, oldest
    first; looks at no more of it than can start."""
    if load.memory_free_bytes < limits.memory_reserve_bytes:
        return Plan(0, Wait.MEMORY_FREE if queue else None)
    if load.disk_free_bytes < limits.disk_reserve_bytes:
        return Plan(0, Wait.DISK_FREE if queue else None)
    committed = load.memory_committed_bytes
    for count, memory_bytes in enumerate(queue):
        if load.starting + count >= limits.max_starting:
            return Plan(count, Wait.STARTING)
        if load.live + count >= limits.max_live:
            return Plan(count, Wait.LIVE)
        committed += memory_bytes
        if committed > limits.memory_capacity_bytes:
            return Plan(count, Wait.MEMORY_COMMITTED)
    return Plan(len(queue), None)

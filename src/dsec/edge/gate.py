"""The queue of creations: `dsec.plan.admission` decides, this keeps count and order.

Invariant: every sandbox that was let in is counted in `starting` until `started`, and its memory in `committed_bytes`
until `left`, beside what is promised to function calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from dsec.edge.config import Capacity, EdgeConfig
from dsec.edge.sandbox import Sandbox
from dsec.errors import QuotaExceeded, Unsupported
from dsec.plan.admission import Limits, Load, Wait, never_fits, plan


class Gate:
    """Lets creations start, oldest first. All methods are synchronous and belong to the event loop."""

    def __init__(self, config: EdgeConfig, capacity: Capacity, start: Callable[[Sandbox], None]) -> None:
        self.limits = Limits(
            max_starting=config.max_starting,
            max_live=config.max_live,
            max_queued=config.max_queued,
            memory_capacity_bytes=int(capacity.memory_total_bytes() * config.memory_overcommit),
            memory_reserve_bytes=config.memory_reserve_bytes,
            disk_reserve_bytes=config.disk_reserve_bytes,
        )
        self.capacity = capacity
        self.starting = 0
        self.live = 0
        self.committed_bytes = 0
        self.wait: Wait | None = None
        """What the head of the queue waits for."""
        self._start = start
        self._queue: OrderedDict[str, Sandbox] = OrderedDict()
        self._pumping = False

    @property
    def queued(self) -> int:
        return len(self._queue)

    def check(self, memory_bytes: int) -> None:
        """Raises `Unsupported` for what can never fit, `QuotaExceeded` where the queue is full."""
        why = never_fits(memory_bytes, self.limits)
        if why is not None:
            raise Unsupported(why, remedy="Ask for less, or use a larger node.")
        if len(self._queue) >= self.limits.max_queued:
            raise QuotaExceeded(
                f"{len(self._queue)} creations are waiting already", remedy="Wait for some of them, then try again."
            )

    def enter(self, sandbox: Sandbox) -> None:
        """Queue it; it may start within this call."""
        self._queue[sandbox.id] = sandbox
        self.pump()

    def leave_queue(self, sandbox: Sandbox) -> bool:
        """Take it out of the queue; False where it isn't in it."""
        return self._queue.pop(sandbox.id, None) is not None

    def take_in(self, sandbox: Sandbox) -> None:
        """Count one that exists already (recovery)."""
        self.live += 1
        self.committed_bytes += sandbox.record.spec.memory_bytes

    def promise(self, change_bytes: int) -> None:
        """To what is no sandbox: that much memory more, or less. Raises `Unsupported` for what can never fit."""
        if change_bytes > self.limits.memory_capacity_bytes:
            most = self.limits.memory_capacity_bytes
            raise Unsupported(
                f"memory_bytes is {change_bytes}, this node promises at most {most} in all",
                remedy="Ask for less, or use a larger node.",
            )
        self.committed_bytes += change_bytes
        if change_bytes < 0:
            self.pump()

    def started(self) -> None:
        """One that was let in has been made, or has failed."""
        self.starting -= 1
        self.pump()

    def left(self, sandbox: Sandbox) -> None:
        """Nothing is left of one that was let in."""
        self.live -= 1
        self.committed_bytes -= sandbox.record.spec.memory_bytes
        self.pump()

    def pump(self) -> None:
        """Start what may start."""
        if not self._queue or self._pumping:
            return
        if self.starting >= self.limits.max_starting:  # as is the rule in a burst: there is nothing to plan
            self.wait = Wait.STARTING
            return
        load = Load(
            starting=self.starting,
            live=self.live,
            memory_committed_bytes=self.committed_bytes,
            memory_free_bytes=self.capacity.memory_free_bytes(),
            disk_free_bytes=self.capacity.disk_free_bytes(),
        )
        room = max(0, self.limits.max_starting - self.starting)
        head = [sandbox.record.spec.memory_bytes for sandbox in islice(self._queue.values(), room + 1)]
        decision = plan(head, load, self.limits)
        self.wait = decision.wait
        self._pumping = True
        try:
            for _ in range(decision.start):
                _, sandbox = self._queue.popitem(last=False)
                self.starting += 1
                self.take_in(sandbox)
                self._start(sandbox)
        finally:
            self._pumping = False

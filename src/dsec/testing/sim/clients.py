"""The published workload: tasks that ask for many sandboxes at once, of several environments, and keep a lease.

Distributions are lognormal through the published quantiles: sandboxes a task 2,528 (p50) and 7,969 (p90), at most
32,000; lifetimes 17.4 min (p50) and 231.5 (p99); environments a task 3 (p50) and 28 (p90). A smaller cluster gets
smaller tasks, in proportion. Some trainers die: their leases must then lapse, and nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsec.errors import DsecError, QuotaExceeded
from dsec.plan.placement import Ask

if TYPE_CHECKING:
    from dsec.testing.sim.world import World

LIFE_P50_S = 17.4 * 60
LIFE_SIGMA = math.log(231.5 / 17.4) / 2.3263
TASK_P50 = 2528
TASK_SIGMA = math.log(7969 / 2528) / 1.2816
TASK_MAX = 32_000
FAN_P50 = 3
FAN_SIGMA = math.log(28 / 3) / 1.2816
PRODUCTION_NODES = 160
MEMORY_BYTES = 640 << 20
LEASE_S = 60.0
RENEW_S = 15.0
DEADLINE_S = 120.0
PATIENCE_S = 6.0
"""A client that hears nothing for so long asks another apiserver, with the same key."""
ENVIRONMENTS = 2000
DYING = 0.1


def mean_life_s() -> float:
    return LIFE_P50_S * math.exp(LIFE_SIGMA**2 / 2)


class Request:
    """`count` sandboxes alike, asked for under one key."""

    __slots__ = (
        "answered",
        "count",
        "deadline",
        "done",
        "environment",
        "failed",
        "lease_s",
        "memory_bytes",
        "number",
        "project",
        "run",
        "started",
        "taken",
        "task",
    )

    def __init__(self, task: Task, number: int, environment: str, count: int, now: float) -> None:
        self.task = task
        self.number = number
        self.project = task.project
        self.run = task.run
        self.environment = environment
        self.count = count
        self.memory_bytes: int = MEMORY_BYTES
        self.lease_s = LEASE_S
        self.started = now
        self.deadline = now + DEADLINE_S
        self.taken = bytearray(count)
        """By index: 1 where the client was told that it is there, 2 that it failed."""
        self.answered = 0
        self.failed = 0
        self.done = False

    def ask(self) -> Ask:
        return Ask(memory_bytes=self.memory_bytes, environment=self.environment, run=self.run)

    @staticmethod
    def lifetime(gauss: Callable[[float, float], float]) -> float:
        """How long one of them lives, seconds."""
        return min(12 * 3600.0, LIFE_P50_S * math.exp(LIFE_SIGMA * gauss(0.0, 1.0)))

    def tell(self, first: int, count: int, error: DsecError | None) -> None:
        """The client hears of some of its sandboxes; again is the same."""
        mark = 2 if error is not None else 1
        for index in range(first, first + count):
            if not self.taken[index]:
                self.taken[index] = mark
                self.answered += 1
                self.failed += error is not None
        self.done = self.answered == self.count


class Task:
    """A trainer's job: one run, a request for each environment."""

    def __init__(self, world: World, number: int, size: int) -> None:
        self.world = world
        self.number = number
        rng = world.engine.stream(f"task{number}")
        self._rng = rng
        self.project = rng.choice(world.projects)
        self.run = f"run{number}"
        self.alive = True
        self.renewed_at = world.engine.now
        """When a renewal was last acknowledged."""
        fan = max(1, min(size, 400, round(FAN_P50 * math.exp(FAN_SIGMA * rng.gauss(0.0, 1.0)))))
        popular = [int(ENVIRONMENTS * rng.random() ** 2) for _ in range(fan)]
        self.requests = []
        for n, environment in enumerate(popular):
            count = size // fan + (n < size % fan)
            self.requests.append(Request(self, world.next_request(), f"e{environment}", count, world.engine.now))
        self.died_at = math.inf
        if rng.random() < DYING:
            world.engine.after(rng.uniform(30, 1800), self._die)
        for request in self.requests:
            world.judge.asked(request)
            self._ask(request, None)
        self._renew()

    def _die(self) -> None:
        self.alive = False
        self.died_at = self.world.engine.now
        self.world.judge.died(self)

    def _ask(self, request: Request, before: str | None) -> None:
        """Ask any apiserver that is there; where none answers, another."""
        world = self.world
        if request.done or not self.alive or world.engine.now > request.deadline + DEADLINE_S:
            return
        apis = [api for api in world.apis if api.up and api.name != before] or world.apis
        api = self._rng.choice(apis)
        world.network.send("client", api.name, api.create, request)
        world.engine.after(PATIENCE_S, self._again, request, api.name, api.instance)

    def _again(self, request: Request, name: str, instance: str) -> None:
        """The connection tells whether the apiserver is still at it."""
        api = next(api for api in self.world.apis if api.name == name)
        if api.up and api.instance == instance and api.works_on(request):
            self.world.engine.after(PATIENCE_S, self._again, request, name, instance)
        else:
            self._ask(request, name)

    def told(self, request: Request, first: int, count: int, error: DsecError | None) -> None:
        """An apiserver's answer."""
        if self.alive:
            request.tell(first, count, error)
            self.world.judge.told(request, count, error, refused=isinstance(error, QuotaExceeded))

    def _renew(self) -> None:
        world = self.world
        if not self.alive or world.engine.now - self.requests[0].started > 6 * 3600:
            return
        apis = [api for api in world.apis if api.up] or world.apis
        api = self._rng.choice(apis)
        world.network.send("client", api.name, api.renew, self)
        world.engine.after(RENEW_S, self._renew)

    def acknowledged(self) -> None:
        self.renewed_at = self.world.engine.now

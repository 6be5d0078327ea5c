"""Who kills a cluster's processes, one at a time, and starts them again; and how long the cluster takes to be well."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import msgspec
from cluster_kit import Cluster, Process, until
from msgspec import Struct

from dsec import Client
from dsec.errors import DsecError

MAKE_S = 30.0


class Blow(Struct, frozen=True):
    """One death."""

    what: str
    how: str
    at: float
    """When it was struck, wall clock."""
    back: float
    """When somebody began to start it again, or it was joined to the others."""
    well: float
    """When all apiservers heard all nodes, and made a sandbox."""

    @property
    def recovery_s(self) -> float:
        return self.well - self.back


class Monkey:
    """In a thread of its own."""

    def __init__(self, cluster: Cluster, *, seed: int, pause_s: float) -> None:
        """`pause_s`: between two deaths, all being well."""
        self.blows: list[Blow] = []
        self.failed: BaseException | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._cluster = cluster
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._striking: float | None = None

    def once(self) -> None:
        """Each process is killed once."""
        self._safely(lambda: [self._kill(each) for each in self._shuffled()])

    def until(self, deadline: float) -> None:
        """Every kind of death, over and over, to this moment of the monotonic clock."""

        def work() -> None:
            while time.monotonic() < deadline:
                for process in self._shuffled():
                    if time.monotonic() > deadline:
                        return
                    self._random.choice((self._kill, self._kill, self._cut, self._stop))(process)

        self._safely(work)

    def disturbed(self, since: float, to: float) -> bool:
        """Whether anything was dead between these moments (wall clock)."""
        began = self._striking
        return (began is not None and began <= to) or any(b.at <= to and b.well >= since for b in self.blows)

    # --- how ---

    def _kill(self, process: Process) -> None:
        process.kill()
        self._recover(process, "killed", self._random.uniform(0.2, 3.0), process.start)

    def _stop(self, process: Process) -> None:
        """It stands still, and the kernel keeps its connections."""
        process.pause(True)
        self._recover(process, "stopped", self._random.uniform(1.0, 8.0), lambda: process.pause(False))

    def _cut(self, process: Process) -> None:
        """Its network is away."""
        spaces, space = self._cluster.spaces, process.space
        assert spaces is not None
        assert space is not None
        spaces.cut(space)
        self._recover(process, "cut off", self._random.uniform(1.0, 12.0), lambda: spaces.cut(space, whole=True))

    def _recover(self, process: Process, how: str, away_s: float, again: Callable[[], None]) -> None:
        at = self._striking = time.time()
        time.sleep(away_s)
        back = time.time()
        again()
        until(self._well, f"{process.name} was {how}, and all is well again")
        self.blows.append(Blow(process.name, how, at, back, time.time()))
        self._striking = None
        time.sleep(self._pause_s)

    def _well(self) -> bool:
        cluster = self._cluster
        for api in cluster.apis:
            healths = cluster.healths(api)
            if len(healths) < len(cluster.edges) or {"silent", "lost"}.intersection(healths) or not self._makes(api):
                return False
        return True

    def _makes(self, api: Process) -> bool:
        with contextlib.suppress(DsecError), Client(api.url, self._cluster.key, retry_s=1.0) as client:
            made = client.create("debian", memory_bytes=64 << 20, disk_bytes=64 << 20, request_timeout_s=MAKE_S)
            made.kill(request_timeout_s=MAKE_S)
            return True
        return False

    def _shuffled(self) -> list[Process]:
        chosen = [*self._cluster.edges, *self._cluster.apis, *self._cluster.nats]
        self._random.shuffle(chosen)
        return chosen

    def _safely(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (the test says it)
            self.failed = error
        finally:
            self.goes_on.clear()


def summary(blows: list[Blow]) -> str:
    """As JSON: for each kind of process how often, and how long it took until all was well."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("edge", "api", "nats"):
        for how in ("killed", "stopped", "cut off"):
            times = sorted(blow.recovery_s for blow in blows if blow.what.startswith(kind) and blow.how == how)
            if times:
                found[f"{kind} {how}"] = {
                    "times": len(times),
                    "recovery_p50_s": round(times[len(times) // 2], 2),
                    "recovery_max_s": round(times[-1], 2),
                }
    return msgspec.json.encode(found).decode()

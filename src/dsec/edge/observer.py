"""How one node in process is seen: its metrics and its readiness, worked out when somebody asks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from dsec.edge.client import NodeInfo
from dsec.edge.lives import Lives
from dsec.edge.observed import Check, Readiness
from dsec.edge.tally import Family, Sample, one
from dsec.errors import DsecError
from dsec.ports import Backend

READY_TIMEOUT_S = 2.0


@runtime_checkable
class Inspectable(Protocol):
    """What a `Backend` may be besides: one that counts things of its own and knows whether it works."""

    def gauges(self) -> Mapping[str, Mapping[str, float]]:
        """Pool -> kind -> how many."""
        ...

    async def check_ready(self) -> None:
        """Raises a `DsecError` that says why it can't make sandboxes now."""
        ...


class Observer:
    """The state of one node, put into the forms above."""

    def __init__(self, *, lives: Lives, backends: Mapping[str, Backend]) -> None:
        self._lives = lives
        self._backends = backends

    def metrics(self, node: NodeInfo) -> list[Family]:
        """See `Observed.metrics`."""
        states = Counter(sandbox.state.value for sandbox in self._lives.sandboxes.values())
        pools = [
            Sample(count, {"backend": name, "pool": pool, "kind": kind})
            for name, backend in self._backends.items()
            if isinstance(backend, Inspectable)
            for pool, counts in backend.gauges().items()
            for kind, count in counts.items()
        ]
        return [
            Family(
                "dsec_sandboxes",
                "gauge",
                "Sandboxes by state.",
                [
                    Sample(states[each], {"state": each})
                    for each in ("queued", "starting", "running", "paused", "ending")
                ],
            ),
            one("dsec_sandboxes_stuck", "gauge", "Sandboxes whose removal failed and is tried again.", node.stuck),
            one("dsec_sandboxes_created_total", "counter", "Sandboxes that came to run.", node.created_total),
            one("dsec_sandboxes_max", "gauge", "Sandboxes that are admitted at most.", node.max_live),
            one(
                "dsec_memory_committed_bytes",
                "gauge",
                "Sum of the memory limits of live sandboxes.",
                node.memory_committed_bytes,
            ),
            one(
                "dsec_memory_capacity_bytes",
                "gauge",
                "Commitments are admitted up to here.",
                node.memory_capacity_bytes,
            ),
            one("dsec_disk_free_bytes", "gauge", "Free space of the data volume.", node.disk_free_bytes),
            Family("dsec_pool", "gauge", "Things made in advance, by kind.", pools),
            *self._lives.notes.tally.families(),
            *self._lives.networks.families(),
        ]

    async def ready(self, *, serving: bool) -> Readiness:
        """See `Observed.ready`."""
        checks = [Check(name="edge", ok=serving, detail="" if serving else "it is stopping")]
        gate = self._lives.gate
        free = gate.capacity.disk_free_bytes()
        room = free >= gate.limits.disk_reserve_bytes
        checks.append(Check(name="volume", ok=room, detail=f"{free} bytes free"))
        for name, backend in self._backends.items():
            if isinstance(backend, Inspectable):
                checks.append(await _check(name, backend))
        return Readiness(all(check.ok for check in checks), checks)


async def _check(name: str, backend: Inspectable) -> Check:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await backend.check_ready()
    except TimeoutError:
        return Check(name=name, ok=False, detail=f"no answer within {READY_TIMEOUT_S:g} s")
    except DsecError as error:
        return Check(name=name, ok=False, detail=error.message)
    return Check(name=name, ok=True)

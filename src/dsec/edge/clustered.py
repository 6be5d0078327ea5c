"""What an edge does besides when it is one of many: believe its apiservers, count for them, hear of runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from typing import cast

from msgspec import Struct

from dsec.edge.access import Access
from dsec.edge.charges import Charges
from dsec.edge.client import EdgeClient, Principal
from dsec.edge.config import EdgeConfig
from dsec.edge.lives import Lives
from dsec.edge.moving import Moving
from dsec.edge.naming import Naming
from dsec.edge.runs import Runs
from dsec.edge.settling import end_all
from dsec.edge.trajectory import Trajectories
from dsec.journal.records import Journal
from dsec.journal.state_dir import StateDir
from dsec.plan.quota import account_of
from dsec.ports import Backend
from dsec.spec.causes import Cause
from dsec.spec.cluster import Charged
from dsec.spec.runs import RunInfo

_RECENT = 50


class Counts(Struct, frozen=True):
    """Of live sandboxes."""

    projects: dict[str, int]
    runs: dict[str, int]
    """By `project` NUL `run`."""
    environments: list[str]
    create_ms: float
    """Median of the last creations."""
    charged: dict[str, dict[str, Charged]] = {}
    """By apiserver, by account (`plan/quota.py`)."""


class Clustered:
    """A part of `dsec.edge.node.Edge`."""

    _access: Access
    _backends: dict[str, Backend]
    _config: EdgeConfig
    _journal: Journal
    _lives: Lives
    _naming: Naming
    _runs: Runs
    _state: StateDir
    _trajectories: Trajectories

    def trust(self, asserted: Callable[[str], Principal]) -> None:
        """From now on callers are who an apiserver says they are (`asserted` raises `Unauthenticated`); API keys of
        this node's own are good for nothing, tokens of its sandboxes are as before."""
        self._access.asserted = asserted

    def hear_run(self, project: str, run: RunInfo) -> None:
        """The cluster's record of a run."""
        self._runs.hear(project, run)

    def moving(self) -> Moving:
        """Sandboxes that come from other nodes, and those that leave."""
        return Moving(
            cast("EdgeClient", self),
            number=self._state.edge,
            lives=self._lives,
            naming=self._naming,
            trajectories=self._trajectories,
            journal=self._journal,
            backends=self._backends,
            config=self._config,
        )

    def logs(self) -> tuple[Trajectories, bytes]:
        """The logs of its sandboxes, and the node's key."""
        return self._trajectories, self._state.key

    @property
    def charges(self) -> Charges:
        """On whose share of a quota what it makes counts."""
        return self._naming.charges

    def live(self) -> list[str]:
        """Ids of its sandboxes."""
        return list(self._lives.sandboxes)

    async def end_lost(self, timeout_s: float) -> bool:
        """End all sandboxes: the cluster has declared them lost. False where some are still there after `timeout_s`;
        they are nobody's, and their removal goes on."""
        return await end_all(self._lives, Cause.NODE_LOST, timeout_s)

    def counts(self) -> Counts:
        """What a report says of them."""
        projects: Counter[str] = Counter()
        runs: Counter[str] = Counter()
        environments: set[str] = set()
        made: list[tuple[float, float]] = []
        charged = Counter(self._naming.charges.standing)
        for sandbox in self._lives.sandboxes.values():
            record = sandbox.record
            projects[record.project] += 1
            if record.run:
                runs[f"{record.project}\0{record.run}"] += 1
            environments.add(record.spec.environment)
            if record.charged_to:
                spec = record.spec
                account = account_of(record.project, spec.backend, spec.cpus, spec.memory_bytes)
                charged[record.charged_to, account] += 1
            if record.create_ms is not None:
                made.append((record.created_at, record.create_ms))
        recent = [ms for _, ms in sorted(made)[-_RECENT:]]
        median = statistics.median(recent) if recent else 0.0
        accounts = charged_by(self._naming.charges.taken, charged)
        return Counts(dict(projects), dict(runs), sorted(environments), median, accounts)


def charged_by(taken: Counter[tuple[str, str]], live: Counter[tuple[str, str]]) -> dict[str, dict[str, Charged]]:
    """What a report says of quotas: by apiserver, by account."""
    found: dict[str, dict[str, Charged]] = {}
    for holder, account in {**taken, **live}:
        found.setdefault(holder, {})[account] = Charged(taken[holder, account], live[holder, account])
    return found

"""Which limits bound whom, by the projects on record: what an account of a quota costs each ledger above it."""

from __future__ import annotations

from dsec.plan.iam import Iam, lineage
from dsec.plan.quota import UNITS, costs_of

MAX_ACCOUNTS = 10_000


class Bounds:
    """Which ledgers bound whom, by the projects on record."""

    def __init__(self, iam: Iam) -> None:
        self._iam = iam
        self._costs: dict[str, list[tuple[str, int]]] = {}

    def charges(self, account: str) -> list[tuple[str, int]]:
        """The ledgers that bound an account, and what one of its sandboxes costs each."""
        found = self._costs.get(account)
        if found is None:
            if len(self._costs) > MAX_ACCOUNTS:
                self._costs.clear()
            project, costs = costs_of(account)
            found = self._costs[account] = [
                (f"{path}\0{field}", costs[field])
                for path in lineage(project)
                for field in self.limits(path)
                if field in costs
            ]
        return found

    def fits(self, account: str) -> bool:
        """Whether one would be within all limits if nothing else were there."""
        ledgers = ((*each.partition("\x00"), cost) for each, cost in self.charges(account))
        return all(self.limits(path).get(field, cost) >= cost for path, _, field, cost in ledgers)

    def limits(self, path: str) -> dict[str, int]:
        """A project's own, in ledgers' units."""
        project = self._iam.known(path)
        if project is None:
            return {}
        return {field: int(limit * UNITS.get(field, 1)) for field, limit in project.quota.limits().items()}

    def bound(self, project: str) -> bool:
        """Whether any quota bounds a project, by its pace or otherwise."""
        quotas = (known.quota for path in lineage(project) if (known := self._iam.known(path)) is not None)
        return any(quota.creates_per_s is not None or quota.limits() for quota in quotas)

    def ledgers(self) -> list[str]:
        """All of projects on record."""
        return [f"{each.path}\0{field}" for each in self._iam.projects("") for field in self.limits(each.path)]

    def changed(self) -> None:
        """The records are others now."""
        self._costs.clear()

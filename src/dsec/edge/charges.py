"""On whose share of a quota what this node makes counts: the apiserver whose request it is (`CHARGED_TO`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dsec.edge.context import CHARGED_TO
from dsec.plan.quota import account_of

_MAX_ACCOUNTS = 4096
Charge = tuple[str, str]
"""Who is charged, and the account."""


class Charges:
    """For the event loop."""

    def __init__(self) -> None:
        self.taken: Counter[Charge] = Counter()
        """What began to count since this process did."""
        self.standing: Counter[Charge] = Counter()
        """What counts now without being a sandbox."""

    def charge(self, account: str) -> str:
        """A new sandbox is charged; who pays, '' on a machine alone."""
        holder = CHARGED_TO.get()
        if holder:
            self.taken[holder, account] += 1
            while len(self.taken) > _MAX_ACCOUNTS:  # of apiservers that are long gone
                del self.taken[next(iter(self.taken))]
        return holder

    @contextmanager
    def one(self, project: str, backend: str, cpus: float, memory_bytes: int) -> Iterator[None]:
        """Whatever runs within, one after the other, counts as one of these all the while."""
        account = account_of(project, backend, cpus, memory_bytes)
        holder = self.charge(account)
        self.standing[holder, account] += bool(holder)
        before = CHARGED_TO.get()
        CHARGED_TO.set("")
        try:
            yield
        finally:
            CHARGED_TO.set(before)
            self.standing[holder, account] -= bool(holder)
            if not self.standing[holder, account]:
                del self.standing[holder, account]

"""How test files are handed to workers where there is one worker more than the machine can carry: that one takes the
files that wait far more than they compute, and nothing else. The others take what is left of these in the end.

So that the cores are busy while a cluster's tests wait for leases and silences, and never carry more of what computes.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = frozenset(
    {
        "test_chaos.py",
        "test_cluster_clients.py",
        "test_cluster_live.py",
        "test_cluster_moves.py",
        "test_fairness_live.py",
        "test_faults_live.py",
        "test_overflow_live.py",
        "test_quotas_live.py",
        "test_rights_live.py",
    }
)
"""A tenth to a half of their time is CPU time."""


class WithWaiting(LoadFileScheduling):
    """`--dist loadfile`, and the last worker as above."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = self._next(node)
        if scope is not None:
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self.workqueue and self._next(node) is None:
            if not node.shutting_down:
                node.shutdown()  # when it has done what it has
            return
        super()._reschedule(node)

    def _next(self, node: WorkerController) -> str | None:
        """The file that this worker takes next; None where there is none for it."""
        waits = node.gateway.id == f"gw{self.numnodes - 1}"
        for scope in self.workqueue:
            if (PurePosixPath(scope).name in WAITING) == waits:
                return scope
        return None if waits else next(iter(self.workqueue), None)

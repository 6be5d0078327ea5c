"""Tripwires of a machine, by what its own kernel tells of its programs.

Invariants: the rules are decided here, of each record anew; whoever is root in the machine can forge records or have
none sent, and no more; what a caller's own file call does is no hit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from dsec.edge.lookout import Hit, Lookout
from dsec.plan.tripwires import Matches, Pace, Seen
from dsec.spec.tripwires import Rule, Touch
from dsec.wire.looks import Look, LookKind

_ACTS: dict[LookKind, Touch] = {LookKind.READ: "read", LookKind.WRITE: "write", LookKind.REMOVE: "remove"}


class Told(Lookout):
    """One machine's. For the event loop."""

    def hear(self, said: Look | str) -> None:
        """A record of its guest's, or why there may have been others."""
        if isinstance(said, str):
            self._raise(said)
        elif not said.path.startswith("/"):
            return  # no guest says that
        elif said.kind is LookKind.START:
            self._started(said)
        elif not self._on_behalf(said):
            act = _ACTS[said.kind]
            hits = list(self.plan.touched(Seen(act, said.path)))
            if (decoy := self.plan.decoys.get(said.path)) is not None and act != "remove":
                hits.append((decoy, _nobody))
            self._hits(hits, act, said)

    def _started(self, said: Look) -> None:
        argv = " ".join(said.argv)
        rules = self.plan.started(said.path)
        hits = [(r, _nobody) for r, patterns in rules if not patterns or any(re.match(p, argv) for p in patterns)]
        self._hits(hits, "start", said)

    def _hits(self, hits: Sequence[tuple[Rule, Matches]], act: str, said: Look) -> None:
        for rule, spared in hits:
            if said.exe and spared(said.exe):
                continue
            count = self._paces.setdefault(rule.id, Pace()).hit(time.monotonic())
            if count:
                self._raise(Hit(rule, act, said.path, _process(said), count, time.time()))

    def _on_behalf(self, said: Look) -> bool:
        """Whether it may have been the guest at work for a caller: of one that has ended it can't tell."""
        if said.exe:
            return False
        until = self.expected.get(said.path.rpartition("/")[0])
        return until is not None and time.monotonic() < until


def _nobody(_: str) -> None:
    return None


def _process(said: Look) -> dict[str, Any] | None:
    if not said.pid:
        return None
    parents = []
    for each in said.parents:
        pid, _, exe = each.partition(" ")
        if pid.isdecimal() and len(pid) <= 10:
            parents.append({"pid": int(pid), "exe": exe})
    return {"pid": said.pid, "exe": said.exe, "argv": said.argv, "uid": said.uid, "parents": parents}

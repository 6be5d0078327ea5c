"""Quotas of projects that several apiservers enforce at once, exactly.

Pure. A project's `Ledger` (one record, changed by compare-and-set) splits a limit into shares, one a holder (an
apiserver). A holder lets a creation pass only while what is charged to it, in flight or live, is less than its share;
so the sum can never pass the limit, whatever races. Shares are taken in blocks and given back when they lie idle.
Every sandbox says to whom it is charged, so that the nodes' reports tell a holder what has arrived and what has ended.
When a holder dies its share shrinks to what is still charged to it, once nothing that it sent can arrive any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from dsec.spec.cluster import Charged, Natural


class Ledger(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who holds how much of one limit of one project."""

    limit: Natural
    shares: dict[str, Natural] = {}

    @property
    def held(self) -> int:
        return sum(self.shares.values())


def block(limit: int, holders: int) -> int:
    """How much a holder takes at once: few turns of the ledger, and enough left for the others."""
    return max(1, limit // (8 * max(1, holders)))


def take(ledger: Ledger, holder: str, need: int, size: int) -> tuple[Ledger, int]:
    """The holder wants `need` more; gets up to a whole number of blocks, what is left, or nothing. Returns what it
    got."""
    free = max(0, ledger.limit - ledger.held)
    wanted = -(-need // size) * size
    got = min(wanted, free)
    if got <= 0:
        return ledger, 0
    return _with(ledger, holder, ledger.shares.get(holder, 0) + got), got


def give(ledger: Ledger, holder: str, amount: int) -> Ledger:
    """The holder gives back what it has no use for."""
    return _with(ledger, holder, max(0, ledger.shares.get(holder, 0) - amount))


def shrink(ledger: Ledger, dead: str, charged: int) -> Ledger:
    """A holder is dead and nothing of its can be in flight: it keeps what its live sandboxes need, no more."""
    return _with(ledger, dead, min(ledger.shares.get(dead, 0), charged))


def with_limit(ledger: Ledger, limit: int) -> Ledger:
    """Another limit. A lower one takes nothing away: holders get nothing more until enough has ended and been given
    back."""
    return Ledger(limit=limit, shares=ledger.shares)


def _with(ledger: Ledger, holder: str, amount: int) -> Ledger:
    shares = dict(ledger.shares)
    if amount:
        shares[holder] = amount
    else:
        shares.pop(holder, None)
    return Ledger(limit=ledger.limit, shares=shares)


class _Track:
    """Of one project, on one node, for this holder."""

    __slots__ = ("before", "live", "pending", "sent", "taken")

    def __init__(self) -> None:
        self.before: int | None = None
        """How much of `pending` was sent before the node's last claim; None: there was none since the last report."""
        self.sent: deque[list[float]] = deque()
        """[when, how many], oldest first, of what no report has shown yet."""
        self.pending = 0
        self.taken = 0
        self.live = 0


class Holder:
    """One holder's accounts. What it counts is never less than what is there: a creation whose fate is unknown counts
    until a report shows it, or until `expiry_s` after which no node takes it any more."""

    def __init__(self, name: str, ledgers: Callable[[str], Sequence[str]], *, expiry_s: float) -> None:
        """`ledgers`: which of a project's own and its parents' quotas are kept as ledgers."""
        self.name = name
        self.shares: dict[str, int] = {}
        self._ledgers = ledgers
        self._expiry_s = expiry_s
        self._used: dict[str, int] = {}
        self._tracks: dict[int, dict[str, _Track]] = {}
        self._instances: dict[int, str] = {}

    def used(self, ledger: str) -> int:
        """Charged to this holder, in flight or live."""
        return self._used.get(ledger, 0)

    def free(self, project: str) -> int | None:
        """How many more may pass now; None: nothing bounds them here."""
        bounds = [self.shares.get(each, 0) - self.used(each) for each in self._ledgers(project)]
        return max(0, min(bounds)) if bounds else None

    def short(self, project: str, count: int) -> list[tuple[str, int]]:
        """Of which ledgers it has to take how much more for `count` to pass."""
        found = []
        for each in self._ledgers(project):
            need = count - (self.shares.get(each, 0) - self.used(each))
            if need > 0:
                found.append((each, need))
        return found

    def spend(self, project: str, edge: int, count: int, now: float) -> None:
        """`count` are about to be sent to a node; look at `free` first."""
        ledgers = self._ledgers(project)
        if ledgers:
            track = self._tracks.setdefault(edge, {}).setdefault(project, _Track())
            track.sent.append([now, count])
            track.pending += count
            self._add(ledgers, count)

    def joined(self, edge: int) -> None:
        """The node has made another claim: what is sent from now on is for that one."""
        for track in self._tracks.get(edge, {}).values():
            track.before = track.pending

    def refused(self, project: str, edge: int, count: int) -> None:
        """The node has said that it didn't take them, or they were never sent."""
        track = self._tracks.get(edge, {}).get(project)
        if track is not None:
            self._arrived(project, track, count)

    def report(self, edge: int, instance: str, charged: Mapping[str, Charged], now: float) -> None:
        """What a node says of this holder, by project."""
        tracks = self._tracks.setdefault(edge, {})
        if self._instances.setdefault(edge, instance) != instance:
            self._instances[edge] = instance
            for project, track in tracks.items():  # what the one before didn't take, this one won't
                self._arrived(project, track, track.pending if track.before is None else track.before)
                track.taken = 0
        for track in tracks.values():
            track.before = None
        for project in {**tracks, **charged}:
            track = tracks.setdefault(project, _Track())
            said = charged.get(project, Charged(track.taken, 0))
            self._arrived(project, track, said.taken - track.taken)
            track.taken = max(track.taken, said.taken)
            self._add(self._ledgers(project), said.live - track.live)
            track.live = said.live
            while track.sent and track.sent[0][0] < now - self._expiry_s:
                self._arrived(project, track, int(track.sent[0][1]))

    def gone(self, edge: int) -> None:
        """The node is lost, and what was on it."""
        for project, track in self._tracks.pop(edge, {}).items():
            self._add(self._ledgers(project), -track.pending - track.live)
        self._instances.pop(edge, None)

    def _arrived(self, project: str, track: _Track, count: int) -> None:
        """`count` of what was sent are no longer in flight; the oldest are taken to be those, so that one which is lost
        counts too long rather than too short."""
        count = max(0, min(count, track.pending))
        track.pending -= count
        self._add(self._ledgers(project), -count)
        while count > 0:
            first = track.sent[0]
            part = min(count, int(first[1]))
            first[1] -= part
            count -= part
            if first[1] <= 0:
                track.sent.popleft()

    def _add(self, ledgers: Sequence[str], count: int) -> None:
        for each in ledgers:
            self._used[each] = self._used.get(each, 0) + count

"""Quotas of projects that several apiservers enforce at once, exactly.

Pure. A project's `Ledger` (one record, changed by compare-and-set) splits a limit into shares, one a holder (an
apiserver). A holder lets a creation pass only while what is charged to it, in flight or live, is less than its share;
so the sum can never pass the limit, whatever races. Shares are taken in blocks and given back when they lie idle.
Every sandbox says to whom it is charged, so that the nodes' reports tell a holder what has arrived and what has ended.
When a holder dies its share shrinks to what is still charged to it, once nothing that it sent can arrive any more.

A ledger counts whole units: sandboxes, thousandths of a core, MiB. What is charged is charged to an *account*: a
project and what one sandbox of it costs each of the ledgers above it, so that nodes count sandboxes and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from dsec.spec.cluster import Charged, Natural


class Ledger(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who holds how much of one limit of one project."""

    limit: Natural
    shares: dict[str, Natural] = {}
    new: bool = False
    """Not all nodes have been asked yet what there was before the limit."""

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
    return replace(ledger, limit=limit)


def raised(ledger: Ledger, holder: str, charged: int) -> Ledger:
    """What is charged to a holder is its share, whatever the limit: it was there before that was, or was as low."""
    return ledger if ledger.shares.get(holder, 0) >= charged else _with(ledger, holder, charged)


def counted_in(ledger: Ledger, charged: Mapping[str, int], *, done: bool) -> Ledger:
    """A new ledger has to count what is charged to others: to those that are gone, too. `done`: it is new no more."""
    for holder, count in charged.items():
        ledger = raised(ledger, holder, count)
    return replace(ledger, new=not done)


def _with(ledger: Ledger, holder: str, amount: int) -> Ledger:
    shares = dict(ledger.shares)
    if amount:
        shares[holder] = amount
    else:
        shares.pop(holder, None)
    return replace(ledger, shares=shares)


def account_of(project: str, backend: str, cpus: float, memory_bytes: int) -> str:
    """The account of a sandbox: who it belongs to, and what it costs."""
    return f"{project}\0{backend}\0{max(1, round(cpus * 1000))}\0{max(1, -(-memory_bytes >> 20))}"


def costs_of(account: str) -> tuple[str, dict[str, int]]:
    """The project of an account, and what one sandbox costs by the limit's name, as `plan.iam` names limits. An account
    may come from a node that lies: what can't be read costs a sandbox."""
    project, *rest = account.split("\0")
    costs = {"sandboxes": 1}
    if len(rest) == 3 and rest[1].isdigit() and rest[2].isdigit():
        costs[f"backends.{rest[0]}"] = 1
        costs["cpus"] = min(int(rest[1]), 1 << 40)
        costs["memory_bytes"] = min(int(rest[2]), 1 << 40)
    return project, costs


UNITS = {"cpus": 1000.0, "memory_bytes": 1 / (1 << 20)}
"""Units of a ledger for one of a limit's; 1 where it isn't named."""


class _Track:
    """Of one account, on one node, for this holder."""

    __slots__ = ("before", "ever", "live", "pending", "sent", "spent_at", "taken")

    def __init__(self) -> None:
        self.before: int | None = None
        """How much of `pending` was sent before the node's last claim; None: there was none since the last report."""
        self.sent: deque[list[float]] = deque()
        """[when, how many], oldest first, of what no report has shown yet."""
        self.pending = 0
        self.ever = 0
        """How many were sent in all."""
        self.spent_at = float("-inf")
        self.taken = 0
        self.live = 0


class Holder:
    """One holder's accounts. What it counts is never less than what is there: a creation whose fate is unknown counts
    until a report shows it, or until `expiry_s` after which no node takes it any more."""

    def __init__(self, name: str, ledgers: Callable[[str], Sequence[tuple[str, int]]], *, expiry_s: float) -> None:
        """`ledgers`: the ledgers that bound an account, and what one sandbox costs each (1 or more)."""
        self.name = name
        self.frozen = False
        """It can't know whether its shares are still its own: nothing passes."""
        self.shares: dict[str, int] = {}
        self.over: set[str] = set()
        """Ledgers of which there is more than their limit allows: what ends makes no room."""
        self._ledgers = ledgers
        self._expiry_s = expiry_s
        self._used: dict[str, int] = {}
        self._tracks: dict[int, dict[str, _Track]] = {}
        self._instances: dict[int, str] = {}
        self._rejoined: set[int] = set()
        """Nodes with another claim, and no report since."""
        self._held: dict[str, int] = {}
        self._beyond: dict[int, int] = {}
        """What may be on a node of any account, beside what was spent."""

    def used(self, ledger: str) -> int:
        """Charged to this holder, in flight or live."""
        return self._used.get(ledger, 0)

    def ledgers(self) -> list[str]:
        """Those to which anything is charged."""
        return [ledger for ledger, used in self._used.items() if used]

    def free(self, account: str) -> int | None:
        """How many more may pass now; None: nothing bounds them here."""
        bounds = [(self.shares.get(each, 0) - self.used(each)) // cost for each, cost in self._ledgers(account)]
        if not bounds:
            return None
        return 0 if self.frozen else max(0, min(bounds))

    def short(self, account: str, count: int) -> list[tuple[str, int]]:
        """Of which ledgers it has to take how much more for `count` to pass."""
        found = []
        for each, cost in self._ledgers(account):
            need = count * cost - (self.shares.get(each, 0) - self.used(each))
            if need > 0:
                found.append((each, need))
        return found

    def spend(self, account: str, edge: int, count: int, now: float) -> None:
        """`count` are about to be sent to a node; look at `free` first."""
        tracks = self._tracks.setdefault(edge, {})
        track = tracks.get(account)
        if track is None:
            track = tracks[account] = _Track()
        track.sent.append([now, count])
        track.pending += count
        track.ever += count
        track.spent_at = now
        self._add(account, count)

    def expect(self, edge: int) -> None:
        """One more may come to be on a node, of which this holder doesn't know the account: it counts when the node
        reports it."""
        self._beyond[edge] = self._beyond.get(edge, 0) + 1

    def hold(self, account: str, count: int) -> None:
        """`count` run that no node reports, for as long as this holder keeps hold of them (negative: they have ended);
        look at `free` first."""
        held = self._held.pop(account, 0) + count
        if held:
            self._held[account] = held
        self._add(account, count)

    def recount(self) -> None:
        """The ledgers are others now."""
        self._used = {}
        for account, held in self._held.items():
            self._add(account, held)
        for tracks in self._tracks.values():
            for account, track in tracks.items():
                self._add(account, track.pending + track.live)

    def joined(self, edge: int) -> None:
        """The node has made another claim: what is sent from now on is for that one."""
        self._rejoined.add(edge)
        for track in self._tracks.get(edge, {}).values():
            track.before = track.pending

    def refused(self, account: str, edge: int, count: int) -> None:
        """The node has said that it didn't take them, or they were never sent."""
        track = self._tracks.get(edge, {}).get(account)
        if track is not None:
            self._arrived(account, track, count)

    def report(self, edge: int, instance: str, charged: Mapping[str, Charged], now: float) -> None:
        """What a node says of this holder, by account. A node that lies can't have more than was ever sent to it: no
        account pays for another's, nor for what this holder gave to others."""
        tracks = self._tracks.setdefault(edge, {})
        if self._instances.setdefault(edge, instance) != instance:
            self._instances[edge] = instance
            for account, track in tracks.items():  # what the one before didn't take, this one won't
                self._arrived(account, track, track.pending if track.before is None else track.before)
                track.taken = 0
        if edge in self._rejoined:
            self._rejoined.remove(edge)
            for track in tracks.values():
                track.before = None
        for account, said in charged.items():
            found = tracks.get(account)
            if found is None:
                found = tracks[account] = _Track()
            elif said.live == found.live and said.taken == found.taken and not found.sent:
                continue  # most are as they were
            self._reported(edge, account, found, said, now)
        if len(tracks) > len(charged):
            for account in [each for each in tracks if each not in charged]:
                track = tracks[account]
                self._reported(edge, account, track, Charged(track.taken, 0), now)
                if not track.pending and now - track.spent_at > 2 * self._expiry_s:
                    del tracks[account]  # not before the last of what was sent must have been reported

    def _reported(self, edge: int, account: str, track: _Track, said: Charged, now: float) -> None:
        live = min(said.live, track.ever + self._beyond.get(edge, 0))
        self._add(account, live - track.live)  # first: what has arrived isn't gone in between
        track.live = live
        self._arrived(account, track, said.taken - track.taken)
        track.taken = max(track.taken, said.taken)
        while track.sent and track.sent[0][0] < now - self._expiry_s:
            self._arrived(account, track, int(track.sent[0][1]))

    def settled(self, edge: int) -> bool:
        """Whether nothing is on its way to a node: a report that says what the last one said changes nothing."""
        return not any(track.pending for track in self._tracks.get(edge, {}).values())

    def gone(self, edge: int) -> None:
        """The node is lost, and what was on it."""
        for account, track in self._tracks.pop(edge, {}).items():
            self._add(account, -track.pending - track.live)
        self._instances.pop(edge, None)
        self._beyond.pop(edge, None)
        self._rejoined.discard(edge)

    def _arrived(self, account: str, track: _Track, count: int) -> None:
        """`count` of what was sent are no longer in flight; the oldest are taken to be those, so that one which is lost
        counts too long rather than too short."""
        count = max(0, min(count, track.pending))
        track.pending -= count
        self._add(account, -count)
        while count > 0:
            first = track.sent[0]
            part = min(count, int(first[1]))
            first[1] -= part
            count -= part
            if first[1] <= 0:
                track.sent.popleft()

    def _add(self, account: str, count: int) -> None:
        if count:
            for each, cost in self._ledgers(account):
                used = self._used[each] = self._used.get(each, 0) + count * cost
                if count < 0 and each in self.over:
                    self.shares[each] = min(self.shares.get(each, 0), used)

"""Quotas that several enforce at once: whatever races, the sum stays within the limit."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dsec.plan.quota import Charged, Holder, Ledger, block, counted_in, give, raised, shrink, take, with_limit


def test_shares_never_pass_the_limit() -> None:
    ledger = Ledger(limit=10)
    ledger, got = take(ledger, "a", 3, 4)
    assert got == 4
    ledger, got = take(ledger, "b", 9, 4)
    assert got == 6
    ledger, got = take(ledger, "c", 1, 4)
    assert got == 0
    ledger = give(ledger, "b", 5)
    ledger, got = take(ledger, "c", 1, 4)
    assert got == 4
    assert shrink(ledger, "a", 1).held == ledger.held - 3
    assert block(1000, 4) == 31


def test_what_was_there_before_a_limit_takes_its_part_of_it() -> None:
    ledger = raised(Ledger(limit=10, new=True), "a", 4)
    ledger = counted_in(ledger, {"gone": 5, "a": 2}, done=False)
    assert (ledger.shares, ledger.new) == ({"a": 4, "gone": 5}, True), "some nodes can't be heard"
    assert take(ledger, "a", 8, 1)[1] == 1
    ledger = counted_in(ledger, {"gone": 9}, done=True)
    assert (ledger.held, ledger.new) == (13, False)
    assert take(ledger, "b", 1, 1)[1] == 0
    assert raised(ledger, "gone", 1) == ledger
    assert take(with_limit(shrink(ledger, "gone", 0), 5), "b", 8, 1)[1] == 1


def test_what_ends_beyond_the_limit_makes_no_room() -> None:
    holder = Holder("a", lambda account: [("lab", 1)], expiry_s=60.0)
    holder.shares["lab"] = 10
    holder.spend("lab", 1, 8, now=0.0)
    assert holder.ledgers() == ["lab"]
    holder.over.add("lab")
    holder.report(1, "i", {"lab": Charged(8, 5)}, now=1.0)
    assert (holder.free("lab"), holder.shares) == (0, {"lab": 5})
    holder.recount()
    assert holder.shares == {"lab": 5}
    holder.over.clear()
    holder.report(1, "i", {"lab": Charged(8, 3)}, now=2.0)
    assert holder.free("lab") == 2


def test_what_was_sent_counts_until_it_is_certain_that_it_never_arrived() -> None:
    holder = Holder("a", lambda account: [("lab", 1)], expiry_s=60.0)
    holder.shares["lab"] = 10
    holder.spend("lab/x", 1, 6, now=0.0)
    assert holder.free("lab/y") == 4
    holder.report(1, "i", {"lab/x": Charged(4, 4)}, now=1.0)
    assert holder.free("lab/x") == 4, "four have arrived, two may yet"
    holder.report(1, "i", {"lab/x": Charged(4, 1)}, now=2.0)
    assert holder.free("lab/x") == 7
    holder.report(1, "i", {"lab/x": Charged(4, 1)}, now=61.0)
    assert holder.free("lab/x") == 9
    holder.refused("lab/x", 1, 5)
    assert holder.free("lab/x") == 9
    holder.report(1, "next", {"lab/x": Charged(0, 1)}, now=62.0)
    assert holder.free("lab/x") == 9
    holder.gone(1)
    assert holder.free("lab/x") == 10


def test_what_was_sent_to_the_next_process_outlives_its_first_report() -> None:
    """An order may pass the first report of a node that has just joined again."""
    holder = Holder("a", lambda account: [("lab", 1)], expiry_s=60.0)
    holder.shares["lab"] = 10
    holder.report(1, "first", {}, now=0.0)
    holder.spend("lab", 1, 4, now=1.0)
    holder.joined(1)
    holder.spend("lab", 1, 4, now=2.0)
    assert holder.free("lab") == 2
    holder.report(1, "second", {"lab": Charged(0, 3)}, now=3.0)
    assert holder.free("lab") == 3, "three live, four on their way"


def test_what_is_held_counts_until_it_is_let_go_of_whatever_nodes_report() -> None:
    holder = Holder("a", lambda account: [(account.partition("/")[0], 1)], expiry_s=60.0)
    holder.shares["lab"] = 10
    holder.hold("lab/x", 6)
    holder.spend("lab/x", 1, 2, now=99.0)
    holder.report(1, "i", {"lab/x": Charged(2, 2)}, now=100.0)
    assert holder.free("lab/y") == 2
    holder.recount()
    holder.gone(1)
    assert holder.free("lab/y") == 4
    holder.hold("lab/x", -6)
    holder.recount()
    assert holder.free("lab/y") == 10


def test_without_a_quota_nothing_is_counted() -> None:
    holder = Holder("a", lambda account: [], expiry_s=60.0)
    holder.spend("p", 1, 5, now=0.0)
    assert holder.free("p") is None
    assert holder.short("p", 100) == []


@pytest.mark.parametrize("seed", range(20))
def test_races_of_holders_edges_and_reports(seed: int) -> None:
    """Three holders, two nodes, messages in any order, some lost, nodes that restart: never above the limit, and in
    the end all of it can be used again."""
    rng = random.Random(seed)
    limit, now = 20, 0.0
    ledger = Ledger(limit=limit)
    holders = [Holder(name, lambda account: [("p", 1)], expiry_s=5.0) for name in "abc"]
    live: Counter[tuple[str, int]] = Counter()
    taken: Counter[tuple[str, int]] = Counter()
    instance = {1: 0, 2: 0}
    known: dict[tuple[str, int], int] = {}
    flying: list[tuple[float, Holder, int, int]] = []
    for _ in range(3000):
        now += rng.random() / 10
        step = rng.random()
        holder, edge = rng.choice(holders), rng.choice([1, 2])
        if step < 0.4:
            count = rng.randint(1, 3)
            for name, need in holder.short("p", count):
                ledger, got = take(ledger, holder.name, need, 2)
                holder.shares[name] = holder.shares.get(name, 0) + got
            if (holder.free("p") or 0) >= count:
                holder.spend("p", edge, count, now)
                current = known.get((holder.name, edge)) == instance[edge]  # a request names the instance it is for
                if current and rng.random() < 0.9:  # else it is lost on the way
                    flying.append((now, holder, edge, count))
        elif step < 0.7 and flying:
            sent, who, where, count = flying.pop(rng.randrange(len(flying)))
            if now - sent < 4.9 and rng.random() < 0.9:  # a node takes nothing that is older
                taken[who.name, where] += count
                live[who.name, where] += count
            elif now - sent < 4.9:
                who.refused("p", where, count)
        elif step < 0.8:
            alive = [key for key, n in live.items() if n]
            if alive:
                live[rng.choice(alive)] -= 1
        elif step < 0.97:
            said = Charged(taken[holder.name, edge], live[holder.name, edge])
            holder.report(edge, str(instance[edge]), {"p": said}, now)
            known[holder.name, edge] = instance[edge]
        elif step < 0.98:
            instance[edge] += 1
            flying = [each for each in flying if each[2] != edge]
            for name in "abc":
                taken[name, edge] = 0
        else:
            spare = min(holder.shares.get("p", 0) - holder.used("p"), 2)
            if spare > 0:
                holder.shares["p"] -= spare
                ledger = give(ledger, holder.name, spare)
        assert sum(live.values()) <= limit
        assert ledger.held <= limit
        assert ledger.held == sum(each.shares.get("p", 0) for each in holders)
    for holder in holders:
        for edge in (1, 2):
            holder.report(edge, "end", {"p": Charged(0, 0)}, now + 10)
        assert holder.used("p") == 0


def test_a_node_that_lies_takes_nobodys_quota() -> None:
    """It has no more of an account than was sent to it."""
    holder = Holder("a", lambda account: [(account.partition("/")[0], 1)], expiry_s=30.0)
    holder.shares.update({"victim": 10, "lab": 10})
    lie = Charged(1 << 40, 1 << 40)
    holder.report(3, "liar", {"victim/x": lie, "lab/x": lie}, now=0.0)
    assert holder.free("victim/x") == holder.free("lab/x") == 10
    holder.spend("lab/x", 3, 2, now=1.0)
    holder.spend("victim/x", 1, 4, now=1.0)
    holder.report(3, "liar", {"victim/x": lie, "lab/x": lie}, now=2.0)
    assert (holder.free("victim/x"), holder.free("lab/x")) == (6, 6), "twice, while they may be under way"
    holder.report(3, "liar", {"victim/x": lie, "lab/x": lie}, now=32.0)
    assert (holder.free("victim/x"), holder.free("lab/x")) == (6, 8)
    holder.report(3, "liar", {}, now=33.0)
    holder.report(3, "liar", {"lab/x": Charged(2, 2)}, now=34.0)
    assert holder.free("lab/x") == 8, "a report may have left out what had just begun"
    holder.gone(3)
    assert (holder.free("victim/x"), holder.free("lab/x")) == (6, 10)


def test_what_is_made_without_being_spent_counts_when_its_node_reports_it() -> None:
    """A sandbox that is rebuilt."""
    holder = Holder("a", lambda account: [("lab", 1)], expiry_s=30.0)
    holder.shares["lab"] = 10
    holder.expect(1)
    holder.report(1, "i", {"lab/x": Charged(1, 1)}, now=1.0)
    assert holder.free("lab/x") == 9
    holder.report(1, "i", {}, now=2.0)
    assert holder.free("lab/x") == 10

"""The scheduler: parts that are bound to a node, and a quota that is too small for them."""

from __future__ import annotations

import random

from dsec.errors import QuotaExceeded
from dsec.plan.fencing import Claim
from dsec.plan.iam import Iam
from dsec.plan.placement import Ask, Placer
from dsec.plan.quota import Holder
from dsec.plan.scheduler import MAX_PAUSES, Part, Scheduler, Wanted
from dsec.plan.watch import Health, Watch
from dsec.spec.cluster import NodeFacts, NodeReport


def test_a_part_that_is_bound_to_its_node_asks_for_more_once_a_second() -> None:
    """Where the share was above 0 and too small for it, it asked at once again, for ever."""
    holder = Holder("a", lambda account: [("lab", 1)], expiry_s=20.0)
    holder.shares["lab"] = 3
    made = Scheduler(placer=Placer("a", random.Random(1)), watch=Watch(), holder=holder, iam=Iam())
    facts = NodeFacts(edge=1, max_live=100, memory_capacity_bytes=1 << 40)
    made.join(facts, Claim(edge=1, incarnation=1, instance="i"), 0.0)
    made.hear(NodeReport(edge=1, instance="i", incarnation=1), 0.0)
    wanted = Wanted(project="lab", ask=Ask(memory_bytes=1 << 20), count=5, deadline=1e9)
    ticket = made.submit(wanted, [Part(0, 5, 1, 1)])
    for second in range(MAX_PAUSES):
        pumped = made.pump(float(second))
        assert ([(need.ledger, need.count) for need in pumped.needs], pumped.orders) == ([("lab", 2)], [])
        made.granted("lab", 3, more=False)
        assert not made.pump(float(second)).needs, "not before the next tick"
        made.tick(float(second))
    made.pump(99.0)
    made.granted("lab", 3, more=False)
    (failure,) = made.pump(99.0).failures
    assert (failure.first, failure.count, type(failure.error)) == (0, 5, QuotaExceeded)
    assert not made.knows(ticket)

    ticket = made.submit(wanted, [Part(0, 5, 1, 1)])
    made.pump(100.0)
    made.granted("lab", 3, more=False)
    made.tick(101.0)
    made.pump(101.0)
    made.granted("lab", 5, more=True)
    assert [order.part for order in made.pump(101.0).orders] == [Part(0, 5, 1, 1)]
    made.answered(ticket, Part(0, 5, 1, 1), 5)
    assert not made.knows(ticket)


def test_what_only_a_flapping_node_has_is_placed_there() -> None:
    """It waited for a calm one, and ended as `admission_timeout`."""
    made = Scheduler(
        placer=Placer("a", random.Random(1)), watch=Watch(), holder=Holder("a", lambda _: [], expiry_s=20.0), iam=Iam()
    )
    claims = {edge: Claim(edge=edge, incarnation=1, instance="i") for edge in (1, 2)}

    def join(edge: int, now: float) -> None:
        facts = NodeFacts(edge=edge, labels={"n": str(edge)}, max_live=1000, memory_capacity_bytes=1 << 40)
        made.join(facts, claims[edge], now)

    def second(now: float, *heard: int) -> None:
        made.watch.connected(now, True)
        for edge in heard:
            made.hear(NodeReport(edge=edge, instance="i", incarnation=claims[edge].incarnation), now)
        made.tick(now)

    def places(now: float, **labels: str) -> list[int]:
        ask = Ask(memory_bytes=1 << 20, labels=frozenset(labels.items()))
        made.submit(Wanted(project="lab", ask=ask, count=100, deadline=now + 60.0))
        return answer(now)

    def answer(now: float) -> list[int]:
        orders = made.pump(now).orders
        for order in orders:
            made.answered(order.ticket, order.part, order.part.count)
        return sorted(order.part.edge for order in orders)

    join(1, 0.0)
    join(2, 0.0)
    now = 0.0
    while now < 15:
        now += 1
        second(now, 2, *([1] if now % 5 == 0 else []))
    assert made.watch.health(1) is Health.FLAPPING
    assert places(now) == [2]
    assert places(now, n="1") == [1]
    claims[1] = Claim(edge=1, incarnation=2, instance="i")
    join(1, now)
    assert made.watch.health(1) is Health.FLAPPING
    assert places(now, n="1") == [], "not before its first report"
    second(now + 1, 1, 2)
    assert answer(now + 1) == [1]
    assert places(now + 1) == [2]

"""The scheduler: parts that are bound to a node, and a quota that is too small for them."""

from __future__ import annotations

import random

from dsec.errors import QuotaExceeded
from dsec.plan.fencing import Claim
from dsec.plan.iam import Iam
from dsec.plan.placement import Ask, Placer
from dsec.plan.quota import Holder
from dsec.plan.scheduler import MAX_PAUSES, Part, Scheduler, Wanted
from dsec.plan.watch import Watch
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

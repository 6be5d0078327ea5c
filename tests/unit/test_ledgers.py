"""What nodes say is charged to whom, where a ledger is new: without a server."""

from __future__ import annotations

from random import Random
from typing import cast

from dsec.cluster.bounds import Bounds
from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.ledgers import Ledgers
from dsec.cluster.presence import Presence
from dsec.plan.fencing import Claim
from dsec.plan.iam import Iam
from dsec.plan.placement import Placer
from dsec.plan.quota import Holder, Ledger
from dsec.plan.scheduler import Scheduler
from dsec.plan.watch import Watch
from dsec.spec.cluster import Charged, NodeFacts, NodeReport
from dsec.spec.iam import Project, Quota


def test_a_node_says_no_more_than_it_has() -> None:
    """Of a quota that has just been set: it may name any apiserver that is gone."""
    iam = Iam()
    iam.put_project(Project(path="lab", quota=Quota(sandboxes=100)))
    bounds = Bounds(iam)
    scheduler = Scheduler(
        placer=Placer("mine", Random(1)),
        watch=Watch(),
        holder=Holder("mine", bounds.charges, expiry_s=30.0),
        iam=iam,
    )
    nothing = None
    ledgers = Ledgers(cast(Bus, nothing), cast(Bucket[Ledger], nothing), scheduler, bounds, cast(Presence, nothing))
    account = "lab/x\0container\x001000\x0064"
    lies = {f"apiserver-{n}": {account: Charged(1 << 40, 1 << 40)} for n in range(50)}
    truths = {"apiserver-1": {account: Charged(9, 2)}, "mine": {account: Charged(9, 5)}}
    for edge, charged, live in ((1, lies, 6), (2, truths, 7)):
        scheduler.join(NodeFacts(edge=edge), Claim(edge=edge, incarnation=1, instance=f"i{edge}", host="h"), 0.0)
        report = NodeReport(edge=edge, instance=f"i{edge}", incarnation=1, live=live, charged=charged)
        scheduler.hear(report, 1.0)
    record = ledgers._reckoned("lab\0sandboxes", None, 100)
    assert record.held == 6 + 2
    assert record.shares["apiserver-1"] >= 2
    assert not record.new, "all nodes were heard"
    scheduler.join(NodeFacts(edge=3), Claim(edge=3, incarnation=1, instance="i3", host="h"), 2.0)
    assert ledgers._reckoned("lab\0sandboxes", None, 100).new, "one hasn't said anything yet"

"""The watcher and the fence: who is thought lost, and that nobody speaks for a node twice."""

from __future__ import annotations

import itertools
import math

import pytest

from dsec.errors import Conflict
from dsec.plan.fencing import Claim, Return, claim, fence, serves
from dsec.plan.watch import Change, Health, Verdict, Watch, WatchPolicy
from dsec.spec.cluster import NodeFacts, NodeReport

POLICY = WatchPolicy()


def watch(*edges: int) -> Watch:
    made = Watch(POLICY)
    made.connected(0.0, True)
    for edge in edges:
        made.join(NodeFacts(edge=edge), 0.0)
        hear(made, edge, 0.0)
    return made


def hear(made: Watch, edge: int, now: float, **more: object) -> bool | None:
    heard = made.hear(NodeReport(**{"edge": edge, "instance": "i", "incarnation": 1, **more}), now)  # type: ignore[arg-type]
    return None if heard is None else heard[1]


def test_silence_then_the_fence_then_nothing_more() -> None:
    made = watch(*range(10))
    for now in range(1, 31):
        for edge in range(1, 10):
            hear(made, edge, float(now))
        changes = made.tick(float(now))
        if now < 3:
            assert not changes
        elif now == 3:
            assert changes == [Change(0, 1, Verdict.SILENT)]
        elif now < 30:
            assert not changes
            assert made.health(0) is Health.SILENT
    assert changes == [Change(0, 1, Verdict.FENCE)]
    made.lost(0)
    assert hear(made, 0, 31.0) is None, "a fenced incarnation is not heard"
    assert made.tick(100.0)
    assert 0 not in made.edges()
    made.join(NodeFacts(edge=0), 101.0)
    assert hear(made, 0, 101.0, incarnation=2) is True


def test_how_long_a_node_has_been_quiet() -> None:
    made = watch(1)
    made.join(NodeFacts(edge=2), 0.0)
    assert made.quiet(1, 2.5) == 2.5
    assert made.again(1, 2.0)
    assert made.quiet(1, 2.5) == 0.5
    assert made.quiet(2, 2.5) == math.inf, "it has said nothing yet"
    assert made.quiet(3, 2.5) == math.inf
    made.lost(1)
    assert made.quiet(1, 2.5) == math.inf


def test_a_watcher_that_is_cut_off_judges_nobody() -> None:
    made = watch(1, 2, 3)
    made.connected(1.0, False)
    assert made.tick(500.0) == []
    made.connected(500.0, True)
    assert made.tick(501.0) == []
    assert {change.verdict for change in made.tick(504.0)} == {Verdict.SILENT}


def test_when_many_fall_silent_together_the_network_is_suspected() -> None:
    made = watch(*range(9))
    for now in range(1, 100):
        for edge in range(5):
            hear(made, edge, float(now))
        assert all(change.verdict is Verdict.SILENT for change in made.tick(float(now)))
    for edge in range(5):
        hear(made, edge, 301.0)
    assert {change.verdict for change in made.tick(301.0)} == {Verdict.FENCE}


def test_a_flapping_node_is_kept_out_until_it_was_calm() -> None:
    made = watch(*range(8))
    now = 0.0
    for _ in range(15):
        now += 1
        for edge in (0, 1, 2, *((3, 4, 5, 6, 7) if now % 5 == 0 else ())):
            hear(made, edge, now)
        made.tick(now)
    assert {made.health(edge) for edge in range(3, 8)} == {Health.FLAPPING}
    assert hear(made, 3, now), "it is the placer's to prefer others"
    made.join(NodeFacts(edge=3), now)
    assert made.health(3) is Health.FLAPPING, "to join again makes it no calmer"
    for _ in range(int(POLICY.calm_s) + 2):
        now += 1
        hear(made, 3, now)
    assert made.health(3) is Health.WELL


def test_a_node_that_answers_nonsense_gets_only_a_probe_now_and_then() -> None:
    made = watch(1, 2)
    assert [made.behaved(1, False, 1.0) for _ in range(3)] == [False, False, True]
    given = [hear(made, 1, float(now)) for now in range(2, 42)]
    assert made.health(1) is Health.SLOW
    assert 2 <= sum(map(bool, given)) <= 4
    assert not made.behaved(1, True, 42.0)
    assert hear(made, 1, 42.0)


def test_a_watcher_that_stood_still_blames_nobody() -> None:
    made = watch(1, 2, 3)
    for now in (1.0, 2.0, 60.0):
        made.connected(now, True)
        assert made.tick(now) == []
    made.connected(61.0, True)
    assert hear(made, 1, 61.0)


def test_a_slow_node_gets_only_a_probe_now_and_then() -> None:
    made = watch(*range(5))
    given = []
    for now in range(1, 41):
        for edge in range(4):
            hear(made, edge, float(now), create_ms=50.0)
        given.append(hear(made, 4, float(now), create_ms=5000.0))
        made.tick(float(now))
    assert made.health(4) is Health.SLOW
    assert 2 <= sum(map(bool, given[5:])) <= 5
    assert hear(made, 4, 41.0, create_ms=60.0)


def test_old_reports_and_lies_do_no_harm() -> None:
    made = watch(1, 2)
    hear(made, 1, 1.0, incarnation=5)
    assert hear(made, 1, 2.0, incarnation=4) is None
    heard = made.hear(
        NodeReport(
            edge=1, instance="i", incarnation=5, live=1 << 60, starting=1 << 61, busy=float("nan"), create_ms=1e300
        ),
        3.0,
    )
    assert heard is not None
    assert heard[0].live == heard[0].starting == 1 << 20
    assert heard[0].busy == 1.0
    assert hear(made, 77, 3.0) is None


def test_claims_grow_and_only_one_is_valid() -> None:
    first, how = claim(None, edge=1, instance="a", host="h", had=None, alive=False)
    assert how is Return.READOPT
    assert serves(first, 1)
    again, how = claim(first, edge=1, instance="b", host="h", had=1, alive=True)  # the lock says that `a` is dead
    assert (again.incarnation, how) == (2, Return.READOPT)
    assert not serves(again, 1)
    with pytest.raises(Conflict):
        claim(again, edge=1, instance="c", host="other", had=2, alive=True)
    lost = fence(again, 2, 0.0)
    assert lost is not None
    assert not serves(lost, 2)
    assert fence(lost, 2, 0.0) is None
    assert fence(again, 1, 0.0) is None
    back, how = claim(lost, edge=1, instance="d", host="h", had=2, alive=False)
    assert (back.incarnation, how) == (3, Return.END_ALL)


def test_a_number_is_free_that_nobody_had_or_whose_node_is_lost() -> None:
    first, _ = claim(None, edge=1, instance="a", host="h", had=None, alive=False, free="new")
    lost = fence(first, 1, 0.0)
    assert lost is not None
    for record, free in ((first, "new"), (first, "lost"), (lost, "new")):
        with pytest.raises(Conflict, match="isn't free"):
            claim(record, edge=1, instance="b", host="other", had=None, alive=False, free=free)
    new, how = claim(lost, edge=1, instance="b", host="other", had=None, alive=False, free="lost")
    assert (new.incarnation, how) == (2, Return.END_ALL)


def test_no_interleaving_of_two_processes_and_a_watcher_makes_two_owners() -> None:
    """Compare-and-set on one record: whatever the order, at most one may serve, and nobody readopts what was lost."""
    steps = ["a", "b", "fence", "a", "b"]
    for order in set(itertools.permutations(steps)):
        record: Claim | None = None
        had: int | None = None
        fenced: set[int] = set()
        for step in order:
            if step == "fence":
                gone = fence(record, record.incarnation, 0.0) if record else None
                if gone is not None:
                    fenced.add(gone.incarnation)
                    record = gone
                continue
            record, how = claim(record, edge=1, instance=step, host="h", had=had, alive=False)
            if how is Return.READOPT:
                assert had not in fenced
            had = record.incarnation
            assert [n for n in range(10) if serves(record, n)] == [had]

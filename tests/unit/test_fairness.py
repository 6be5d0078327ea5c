"""Fair queueing: shares by weight, level by level, whatever the sizes; deadlines; nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dsec.plan.fairness import FairQueue


def drain(queue: FairQueue[str], turns: int, cost: float = 1.0) -> list[str]:
    """Serve so often, each request going on waiting."""
    out = []
    for _ in range(turns):
        found = queue.peek()
        assert found is not None
        out.append(found[1])
        queue.served(found[0], cost, done=False)
    return out


def test_a_burst_does_not_starve_others() -> None:
    queue: FairQueue[str] = FairQueue()
    for n in range(1000):
        queue.push("big", f"big{n}")
    queue.push("small", "small")
    order = []
    for _ in range(3):
        number, item = queue.peek() or (0, "")
        queue.served(number, 1, done=True)
        order.append(item)
    assert "small" in order[:2]
    assert order.count("small") == 1


def test_shares_are_by_weight() -> None:
    weights = {"a": 3.0, "b": 1.0}
    queue: FairQueue[str] = FairQueue(lambda path: weights[path])
    queue.push("a", "a")
    queue.push("b", "b")
    assert Counter(drain(queue, 400)) == {"a": 300, "b": 100}


def test_sub_projects_gain_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for n in range(9):
        queue.push(f"many/sub{n}", "many")
    queue.push("one", "one")
    served = Counter(drain(queue, 200))
    assert abs(served["one"] - served["many"]) <= 2


def test_who_was_idle_saves_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "a")
    drain(queue, 100)
    queue.push("late", "late")
    served = Counter(drain(queue, 20))
    assert served["a"] >= 9


def test_who_comes_again_and_again_pays_for_it() -> None:
    """One request at a time isn't a way to be always first."""
    queue: FairQueue[str] = FairQueue()
    queue.push("steady", "steady")
    got: Counter[str] = Counter()
    queue.push("again", "again")
    for _ in range(100):
        number, item = queue.peek() or (0, "")
        got[item] += 1
        queue.served(number, 1, done=item == "again")
        if item == "again":
            queue.push("again", "again")
    assert abs(got["again"] - got["steady"]) <= 2


def test_large_and_small_costs_share_alike() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("large", "large")
    queue.push("small", "small")
    got: Counter[str] = Counter()
    for _ in range(1000):
        number, item = queue.peek() or (0, "")
        cost = 16 if item == "large" else 1
        got[item] += cost
        queue.served(number, cost, done=False)
    assert abs(got["large"] - got["small"]) <= 16


def test_deadlines_and_withdrawals() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "late", deadline=5.0)
    gone = queue.push("a", "gone")
    queue.push("a/b", "stays", deadline=50.0)
    assert queue.withdraw(gone) == "gone"
    assert queue.withdraw(gone) is None
    assert queue.next_deadline() == 5.0
    assert queue.expired(4.9) == []
    assert queue.expired(5.0) == ["late"]
    found = queue.peek()
    assert found is not None
    assert found[1] == "stays"
    queue.served(found[0], 1, done=True)
    assert queue.peek() is None
    assert len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from(["push", "serve", "part", "withdraw"]), st.integers(0, 5)), max_size=80))
def test_nothing_is_lost_and_nothing_comes_twice(steps: list[tuple[str, int]]) -> None:
    queue: FairQueue[int] = FairQueue(lambda path: 1.0 + len(path))
    projects = ["a", "b", "a/x", "a/y", "b/x/z", "c"]
    waiting: dict[int, int] = {}
    for count, (step, n) in enumerate(steps):
        if step == "push":
            waiting[queue.push(projects[n], count)] = count
        elif step == "withdraw" and waiting:
            number = sorted(waiting)[n % len(waiting)]
            assert queue.withdraw(number) == waiting.pop(number)
        elif waiting:
            found = queue.peek()
            assert found is not None
            number, item = found
            assert waiting[number] == item
            queue.served(number, n + 1, done=step == "serve")
            if step == "serve":
                del waiting[number]
        assert len(queue) == len(waiting)
    while (found := queue.peek()) is not None:
        queue.served(found[0], 1, done=True)
        del waiting[found[0]]
    assert not waiting

"""Edits of source text, bursts from a seed, and rewards from reports."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.rollout import candidates, catalog, grading
from dsec.rollout.faults import Answer, Edit, Fault, answered, apply, planted
from dsec.rollout.grading import Report, Scale, parse_report, reward, scale

TEXT = '''"""A stack."""


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()


def empty(stack):
    return not stack.items
'''
SOURCE = {"src/stack.py": TEXT}


def test_an_edit_changes_only_its_function() -> None:
    after = apply(SOURCE, [Edit("src/stack.py", "Stack.pop", "pop()", "pop(0)")])["src/stack.py"]
    assert after == TEXT.replace("self.items.pop()", "self.items.pop(0)")


def test_a_function_can_be_replaced_whole() -> None:
    new = """
    def push(self, item):
        self.items = [*self.items, item]
    """
    after = apply(SOURCE, [Edit("src/stack.py", "Stack.push", new=new)])["src/stack.py"]
    ast.parse(after)
    assert "    def push(self, item):\n        self.items = [*self.items, item]\n" in after
    assert "append" not in after
    assert "def pop(self)" in after


@pytest.mark.parametrize(
    "edit",
    [
        Edit("src/stack.py", "Stack.peek", "a", "b"),
        Edit("src/stack.py", "Stack.push", "not there", "b"),
        Edit("src/stack.py", "Stack.push", "item", "b"),
    ],
    ids=["no such function", "no such text", "more than once"],
)
def test_an_edit_that_does_not_fit_raises(edit: Edit) -> None:
    with pytest.raises(LookupError):
        apply(SOURCE, [edit])


def test_an_answer_reverts_parts_and_edits_on() -> None:
    fault = Fault(
        "both",
        "two parts",
        (
            Edit("src/stack.py", "Stack.push", "append(item)", "insert(0, item)"),
            Edit("src/stack.py", "empty", "not ", ""),
        ),
        2,
        (),
    )
    assert planted(SOURCE, fault)["src/stack.py"] != TEXT
    assert answered(SOURCE, fault, Answer("all", 2, reverts=(0, 1))) == SOURCE
    half = answered(SOURCE, fault, Answer("half", 1, reverts=(1,)))["src/stack.py"]
    assert "insert(0" in half
    assert "return not" in half


def test_the_catalog_is_consistent() -> None:
    names = [fault.name for fault in catalog.FAULTS]
    assert len(set(names)) == len(names)
    for fault in catalog.FAULTS:
        labels = [answer.label for answer in fault.answers]
        assert len(set(labels)) == len(labels)
        assert fault.answers[0].fixed == fault.broken
        assert not fault.answers[0].breaks
        rewards = {candidates.expected_reward(fault, answer) for answer in fault.answers}
        assert {0.0, 1.0} < rewards | {0.5}
        assert any(0 < value < 1 for value in rewards), f"{fault.name}: no answer earns a part"


IDS = "0" * 64
SCALE = Scale(10, IDS, frozenset({"t.a", "t.b", "t.c", "t.d"}))


def report(*failed: str, ran: int = 10, ids: str = IDS) -> Report:
    return Report(ran, failed, ids)


@pytest.mark.parametrize(
    ("given_report", "expected"),
    [
        (report(), 1.0),
        (report("t.a", "t.b", "t.c", "t.d"), 0.0),
        (report("t.a"), 0.75),
        (report("t.z"), 0.0),
        (report("t.a", "t.z"), 0.0),
        (report(ran=9), 0.0),
        (report(ids="1" * 64), 0.0),
        (None, 0.0),
    ],
    ids=["all", "none", "part", "breaks another", "mends and breaks", "a test less", "other tests", "no report"],
)
def test_rewards(given_report: Report | None, expected: float) -> None:
    assert reward(given_report, SCALE) == expected


@given(st.sets(st.sampled_from(["t.a", "t.b", "t.c", "t.d", "t.y", "t.z"])))
def test_a_reward_is_a_share_and_breaking_earns_nothing(failed: set[str]) -> None:
    value = reward(report(*failed), SCALE)
    assert 0 <= value <= 1
    if failed & {"t.y", "t.z"}:
        assert value == 0
    assert (value == 1) == (not failed)


def test_a_report_counts_only_under_its_nonce() -> None:
    body = json.dumps({"ran": 3, "failed": ["t.a"], "ids": IDS})
    assert parse_report(f"noise\n\nabc {body}\n".encode(), "abc") == Report(3, ("t.a",), IDS)
    assert parse_report(f"abd {body}\n".encode(), "abc") is None
    assert parse_report(b"Ran 3 tests in 0.001s\n\nOK\n", "abc") is None
    assert parse_report(b"abc {\xff", "abc") is None
    assert parse_report(b"", "abc") is None


def test_controls_that_are_wrong_are_refused() -> None:
    with pytest.raises(ValueError, match="untouched"):
        scale(report("t.a"), report("t.a", "t.b"))
    with pytest.raises(ValueError, match="fault"):
        scale(report(), report())
    with pytest.raises(ValueError, match="fault"):
        scale(report(), report("t.a", ids="1" * 64))
    assert scale(report(), report("t.a")).broken == {"t.a"}


def test_the_runner_is_a_file_of_its_own() -> None:
    tree = ast.parse(grading.INSIDE.read_text())
    ours = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsec")
    ]
    assert not ours, "it runs where dsec isn't installed"

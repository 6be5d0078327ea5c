"""Tripwires as decisions: rules, what they match, how often they speak."""

from __future__ import annotations

import time

import msgspec
import pytest

from dsec.errors import InvalidRequest
from dsec.plan.tripwires import EVERY_S, FIRST, Pace, Plan, Seen, resolve, rule_sets
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.tripwires import DecoyRule, PathRule, ProcessRule, Rule, Severity, Touch


def plan(*rules: str | Rule, workdir: str = "/") -> Plan:
    return Plan(resolve(rules), home="/h", workdir=workdir)


def hit(glob: str, path: str, touch: Touch = "write") -> bool:
    rule = PathRule(id="r", paths=[glob], on=[touch])
    return bool(plan(rule).touched(Seen(touch, path)))


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("/a/b", "/a/b", True),
        ("/a/b", "/a/bc", False),
        ("/a/*", "/a/b", True),
        ("/a/*", "/a/b/c", False),
        ("/a/?", "/a/b", True),
        ("/a/**", "/a", True),
        ("/a/**", "/a/b/c", True),
        ("/a/**", "/ab", False),
        ("**/tests/**", "/tests/x", True),
        ("**/tests/**", "/w/tests/a/b.py", True),
        ("**/tests/**", "/w/mytests/a", False),
        ("**/test_*.py", "/test_x.py", True),
        ("**/test_*.py", "/w/a/test_x.py", True),
        ("**/test_*.py", "/w/a/test_x/y.py", False),
        ("/w/**/x", "/w/x", True),
        ("/w/**/x", "/w/a/b/x", True),
        ("~/.ssh/*", "/h/.ssh/id", True),
        ("/a.c", "/abc", False),
        ("/a/**", "/a/line\nbreak", True),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert hit(glob, path) is matches


def test_what_a_machine_is_asked_for() -> None:
    wanted = plan(
        DecoyRule(id="d", path="~/.env"),
        PathRule(id="p", paths=["/etc/x", "**/t/**"], on=["read", "remove"]),
        ProcessRule(id="s", exe=["**/nmap"]),
    ).wanted()
    assert wanted == [b"F/h/.env", b"F/etc/x", b"r/etc/x", b"r/**/t/**", b"m/etc/x", b"m/**/t/**", b"s/**/nmap"]


def test_moving_away_a_directory_above_what_is_watched_counts() -> None:
    assert hit("/work/project/tests/**", "/work/project", "remove")
    assert hit("/work/project/tests/x", "/work", "remove")
    assert not hit("/work/project/tests/**", "/work/pro", "remove")


def test_excluded_paths_and_spared_programs() -> None:
    rule = PathRule(id="r", paths=["**/tests/**"], exclude=["**/__pycache__/**"], unless_exe=["/usr/bin/git"])
    one = plan(rule)
    assert not one.touched(Seen("write", "/w/tests/__pycache__/a.pyc"))
    [(found, spared)] = one.touched(Seen("write", "/w/tests/a.py"))
    assert found is rule
    assert spared("/usr/bin/git")
    assert not spared("/tmp/git")


def test_a_name_of_the_agents_choice_cannot_hold_matching_up() -> None:
    one = plan("default", "swe", PathRule(id="worst", paths=["**/*a*/**/*b*"], on=["write"]))
    worst = "/" + "/".join(["a" * 40] * 90)
    began = time.process_time()
    one.touched(Seen("write", worst))
    one.touched(Seen("write", "/" + "ab" * 120 + "/" + "a/" * 1900))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "rule",
    [
        PathRule(id="r", paths=["relative"]),
        PathRule(id="r", paths=["/a**"]),
        PathRule(id="r", paths=["/**/a/**/b/**/c"]),
        PathRule(id="r", paths=["/*a*b*c"]),
        PathRule(id="r", paths=["/a"], exclude=["b"]),
        ProcessRule(id="r", exe=["nmap"]),
        DecoyRule(id="r", path="/a/*"),
        DecoyRule(id="r", path="/a/"),
        DecoyRule(id="r", path="/a/../b"),
    ],
)
def test_what_cannot_be_matched_is_refused(rule: Rule) -> None:
    with pytest.raises(InvalidRequest, match="tripwires"):
        resolve([rule])


@pytest.mark.parametrize(
    "item",
    [
        '"No Such Name"',
        '{"kind":"path","id":"r"}',
        '{"kind":"path","id":"R!","paths":["/a"]}',
        '{"kind":"path","id":"r","paths":[]}',
        '{"kind":"path","id":"r","paths":["/a"],"on":["execute"]}',
        '{"kind":"path","id":"r","paths":["/a"],"severity":"terrible"}',
        '{"kind":"path","id":"r","paths":["/a"],"unknown":1}',
        '{"kind":"none","id":"r"}',
        '{"id":"r","paths":["/a"]}',
    ],
)
def test_the_spec_is_strict(item: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(f'{{"environment":"e","tripwires":[{item}]}}', type=SandboxSpec)


def test_an_unknown_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(["defualt"])
    assert "default" in caught.value.remedy


def test_a_later_rule_replaces_an_earlier_one() -> None:
    own = PathRule(id="loader-preload", paths=["/etc/ld.so.preload"], severity=Severity.INFO)
    rules = resolve(["default", own])
    assert [rule for rule in rules if rule.id == "loader-preload"] == [own]
    assert len(rules) == len(rule_sets()["default"].rule)


@pytest.mark.parametrize("name", rule_sets())
def test_the_built_in_sets_keep_the_rules(name: str) -> None:
    rules = rule_sets()[name].rule
    assert resolve(rules) == rules, "no id twice"
    assert all(rule.what for rule in rules)


def test_a_rule_speaks_at_once_then_seldom_and_counts() -> None:
    pace = Pace()
    assert [pace.hit(0.0) for _ in range(FIRST + 3)] == [1] * FIRST + [0, 0, 0]
    assert pace.hit(EVERY_S + 1) == 4
    assert pace.hits == FIRST + 4


def test_what_is_watched_follows_from_the_rules() -> None:
    none = plan(ProcessRule(id="r", exe=["/x"]))
    assert (none.starts, none.names, none.writes_everywhere, none.reads_everywhere) == (True, False, False, False)
    fixed = plan(PathRule(id="r", paths=["/etc/ld.so.preload"], on=["write"]))
    assert (fixed.starts, fixed.names, fixed.reads_everywhere) == (True, True, False)
    assert fixed.fixed == ["/etc/ld.so.preload"]
    assert fixed.directories == ["/etc"]
    assert fixed.watches_entries("/etc")
    assert not fixed.watches_entries("/usr")
    wild = plan(PathRule(id="r", paths=["**/tests/**"]), workdir="/w/")
    assert wild.writes_everywhere
    assert wild.walks == ["/w"]
    assert wild.watches_entries("/w/tests/deep")

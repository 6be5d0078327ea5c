"""Access: rights hold only as long as their givers' do, nobody gives more than they have, quotas are nested."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.errors import Conflict, InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from dsec.plan.iam import Iam
from dsec.spec.iam import ROLES, Binding, Key, Project, Quota, Usage, Verb

ADMIN = Binding(id="1", principal="person:ada", project="lab", verbs=ROLES["admin"])


def world() -> tuple[Iam, Key]:
    iam = Iam([Project(path="lab", quota=Quota(sandboxes=100)), Project(path="other")], [ADMIN])
    key = Key(hash="h", principal="person:ada", project="lab")
    iam.put_key(key)
    return iam, key


def give(iam: Iam, by: Key, to: str, role: str, n: str, **more: float) -> Key:
    principal, _, project = to.partition(" ")
    binding = Binding(id=n, principal=principal, project=project, verbs=ROLES[role], **more)
    iam.put_binding(iam.delegate(by, binding, 0.0))
    key = iam.new_key(by, Key(hash=n, principal=principal, project=project), 0.0)
    iam.put_key(key)
    return key


def test_a_right_reaches_down_and_not_sideways() -> None:
    iam, ada = world()
    iam.put_project(Project(path="lab/team"))
    iam.put_project(Project(path="labour"))
    assert iam.allowed(ada, Verb.CREATE, "lab/team", 0.0)
    assert not iam.allowed(ada, Verb.CREATE, "labour", 0.0)
    assert not iam.allowed(ada, Verb.CREATE, "other", 0.0)
    assert not iam.allowed(ada, Verb.OPERATE, "lab", 0.0)
    with pytest.raises(NotFound):
        iam.demand(ada, Verb.CREATE, "other", 0.0)


def test_nobody_gives_what_they_do_not_hold() -> None:
    iam, ada = world()
    agent = give(iam, ada, "agent:a lab", "agent", "2")
    with pytest.raises(PermissionDenied) as caught:
        give(iam, agent, "agent:b lab", "grader", "3")
    assert caught.value.details["beyond"] == ["grader.use", "logs.read"]
    with pytest.raises(NotFound):
        give(iam, agent, "agent:b other", "solver", "3")
    solver = give(iam, agent, "agent:b lab", "solver", "3")
    with pytest.raises(PermissionDenied):
        give(iam, solver, "agent:c lab", "solver", "4")
    assert not iam.allowed(solver, Verb.GRADE, "lab", 0.0), "a solver can't start a grader's environment"


def test_what_is_taken_from_a_giver_is_gone_below_at_once() -> None:
    iam, ada = world()
    agent = give(iam, ada, "agent:a lab", "agent", "2")
    solver = give(iam, agent, "agent:b lab", "solver", "3")
    assert iam.allowed(solver, Verb.CREATE, "lab", 0.0)
    iam.put_binding(Binding(id="2", principal="agent:a", project="lab", verbs=ROLES["viewer"], given_by="1"))
    assert not iam.allowed(solver, Verb.CREATE, "lab", 0.0)
    iam.put_binding(Binding(id="2", principal="agent:a", project="lab", verbs=ROLES["agent"], given_by="1"))
    assert iam.allowed(solver, Verb.CREATE, "lab", 0.0)
    iam.drop_binding("1")
    assert not iam.allowed(solver, Verb.READ, "lab", 0.0)
    assert not iam.allowed(ada, Verb.READ, "lab", 0.0)


def test_time_bounds_are_the_givers_at_most() -> None:
    iam, ada = world()
    agent = give(iam, ada, "agent:a lab", "agent", "2", expires_at=50.0)
    solver = give(iam, agent, "agent:b lab", "solver", "3", expires_at=500.0)
    assert iam.allowed(solver, Verb.USE, "lab", 49.0)
    assert not iam.allowed(solver, Verb.USE, "lab", 50.0)


def test_keys_expire_are_revoked_and_end_with_their_project() -> None:
    iam, ada = world()
    iam.put_project(Project(path="lab/team"))
    iam.put_key(Key(hash="t", principal="person:ada", project="lab/team", expires_at=10.0))
    assert iam.authenticate("t", 9.0).project == "lab/team"
    for hashed, now in (("t", 10.0), ("nothing", 0.0)):
        with pytest.raises(Unauthenticated):
            iam.authenticate(hashed, now)
    iam.put_project(Project(path="lab", deleted=True))
    for hashed in ("t", "h"):
        with pytest.raises(Unauthenticated):
            iam.authenticate(hashed, 0.0)
    assert not iam.allowed(ada, Verb.READ, "lab/team", 0.0)


def test_a_key_makes_no_stronger_one() -> None:
    iam, ada = world()
    narrow = iam.new_key(
        ada,
        Key(hash="n", principal="person:ada", project="lab", scopes=frozenset({Verb.READ, Verb.KEYS}), expires_at=9.0),
        0.0,
    )
    iam.put_key(narrow)
    assert not iam.allowed(narrow, Verb.CREATE, "lab", 0.0)
    made = iam.new_key(narrow, Key(hash="m", principal="person:ada", project="lab", expires_at=99.0), 0.0)
    assert (made.scopes, made.expires_at) == (narrow.scopes, 9.0)
    with pytest.raises(PermissionDenied):
        iam.new_key(narrow, Key(hash="m", principal="person:ada", project="lab", scopes=frozenset({Verb.CREATE})), 0.0)
    with pytest.raises(PermissionDenied):
        iam.new_key(narrow, Key(hash="m", principal="person:eve", project="lab"), 0.0)


def test_a_key_for_another_does_what_both_may() -> None:
    """An agent that may make keys made one for the administrator, and was that."""
    iam, ada = world()
    agent = give(iam, ada, "agent:a lab", "agent", "2")
    with pytest.raises(PermissionDenied):
        iam.new_key(agent, Key(hash="s", principal="person:ada", project="lab", scopes=frozenset({Verb.AUDIT})), 0.0)
    stolen = iam.new_key(agent, Key(hash="s", principal="person:ada", project="lab"), 0.0)
    assert {verb for verb in Verb if iam.allowed(stolen, verb, "lab", 0.0)} == ROLES["agent"]
    again = iam.new_key(stolen, Key(hash="t", principal="person:ada", project="lab"), 0.0)
    assert {verb for verb in Verb if iam.allowed(again, verb, "lab", 0.0)} == ROLES["agent"]
    iam.drop_binding("2")
    assert not any(iam.allowed(each, verb, "lab", 0.0) for verb in Verb for each in (stolen, again))


def test_sub_projects_have_a_parent_a_smaller_quota_and_a_name_that_is_used_once() -> None:
    iam, ada = world()
    agent = give(iam, ada, "agent:a lab", "agent", "2")
    made = iam.new_project(agent, Project(path="lab/kids", quota=Quota(sandboxes=100), created_by="person:eve"), 0.0)
    assert made.created_by == "agent:a"
    iam.put_project(made)
    with pytest.raises(Conflict):
        iam.new_project(agent, Project(path="lab/kids"), 0.0)
    with pytest.raises(InvalidRequest, match="sandboxes"):
        iam.new_project(agent, Project(path="lab/more", quota=Quota(sandboxes=101)), 0.0)
    for path in ("top", "nowhere/child"):
        with pytest.raises((PermissionDenied, NotFound)):
            iam.new_project(agent, Project(path=path), 0.0)


def test_quotas_count_all_below() -> None:
    iam, _ = world()
    iam.put_project(Project(path="lab/a", quota=Quota(sandboxes=60, backends={"microvm": 2}, memory_bytes=1000)))
    usage = {
        "lab/a/x": Usage(sandboxes=50, memory_bytes=900),
        "lab/b": Usage(sandboxes=45),
        "labour": Usage(sandboxes=9),
    }
    assert iam.room("lab/b", Usage(sandboxes=5), usage) is None
    assert iam.room("lab/b", Usage(sandboxes=6), usage) == ("lab", "sandboxes")
    assert iam.room("lab/a/x", Usage(sandboxes=1, memory_bytes=101), usage) == ("lab/a", "memory_bytes")
    assert iam.room("lab/a", Usage(sandboxes=3, backends={"microvm": 3}), usage) == ("lab/a", "backends.microvm")
    assert iam.limits("lab/a/x", "microvm") == [
        ("lab/a", "backends.microvm", 2),
        ("lab/a", "sandboxes", 60),
        ("lab/a", "memory_bytes", 1000),
        ("lab", "sandboxes", 100),
    ]


def test_circles_and_long_chains_allow_nothing() -> None:
    iam, _ = world()
    everything = frozenset(Verb)
    iam.put_binding(Binding(id="x", principal="agent:x", project="lab", verbs=everything, given_by="y"))
    iam.put_binding(Binding(id="y", principal="agent:y", project="lab", verbs=everything, given_by="x"))
    key = Key(hash="x", principal="agent:x", project="lab")
    assert not any(iam.allowed(key, verb, "lab", 0.0) for verb in Verb)


@given(st.integers(0, 10_000))
def test_no_sequence_of_gifts_gives_more_than_the_first_giver_had(seed: int) -> None:
    """Whatever is handed on, and taken back, by whom: nobody but an operator's binding is the source of a right."""
    rng = random.Random(seed)
    verbs = sorted(ROLES["agent"] | {Verb.GRADE})
    iam = Iam([Project(path="lab"), Project(path="lab/a"), Project(path="lab/a/b")])
    source = frozenset(rng.sample(verbs, 6)) | {Verb.GRANT}
    iam.put_binding(Binding(id="0", principal="person:p0", project="lab/a", verbs=source))
    keys = [Key(hash=str(n), principal=f"person:p{n}", project="lab") for n in range(4)]
    for n in range(1, 12):
        by, to = rng.choice(keys), rng.choice(keys)
        wanted = frozenset(rng.sample(verbs, rng.randint(1, 4)))
        binding = Binding(
            id=str(n), principal=to.principal, project=rng.choice(["lab", "lab/a", "lab/a/b"]), verbs=wanted
        )
        try:
            iam.put_binding(iam.delegate(by, binding, 0.0))
        except (PermissionDenied, NotFound):
            continue
        for key in keys:
            held = {verb for verb in Verb if iam.allowed(key, verb, "lab/a/b", 0.0)}
            assert held <= source
            assert not any(iam.allowed(key, verb, "lab", 0.0) for verb in Verb)
    iam.drop_binding("0")
    assert not any(iam.allowed(key, verb, "lab/a/b", 0.0) for key in keys for verb in Verb)

"""Sandboxes that stand still and that are forked, by E2B's client."""

from __future__ import annotations

from case_kit import run

from e2b import Sandbox, SandboxException, SandboxQuery, SandboxState


def case_pause_and_connect(_):
    with Sandbox.create(timeout=300) as box:
        box.files.write("/tmp/state", "kept")
        command = box.commands.run("sleep 1; echo done", background=True)
        assert box.pause()
        assert not box.pause(), "it is paused already"
        assert not box.is_running()
        assert Sandbox.get_info(box.sandbox_id).state == SandboxState.PAUSED
        paused = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
        assert box.sandbox_id in [each.sandbox_id for each in paused]
        again = Sandbox.connect(box.sandbox_id)
        assert again.is_running()
        assert again.files.read("/tmp/state") == "kept"
        assert command.wait().stdout == "done\n"


def case_a_request_resumes_it(_):
    with Sandbox.create() as box:
        box.pause()
        assert box.commands.run("echo hello").stdout == "hello\n"
        assert box.is_running()


def case_a_paused_one_is_killed(_):
    box = Sandbox.create()
    box.pause()
    assert box.kill()
    assert not box.kill()


def case_fork(_):
    if not hasattr(Sandbox, "fork"):
        return
    with Sandbox.create(metadata={"a": "b"}) as box:
        box.files.write("/tmp/state", "kept")
        children = box.fork(count=2, timeout=120)
        assert len({box.sandbox_id, *(child.sandbox_id for child in children)}) == 3
        for child in children:
            assert child.files.read("/tmp/state") == "kept"
            child.files.write("/tmp/state", child.sandbox_id)
            assert child.get_info().metadata == {"a": "b"}
        assert box.files.read("/tmp/state") == "kept"
        for child in children:
            assert child.kill()


def case_snapshots(_):
    if not hasattr(Sandbox, "create_snapshot"):
        return
    with Sandbox.create(envs={"SECRET": "s3cret"}) as box:
        box.files.write("/tmp/state", "kept")
        box.commands.run("mkdir /work; echo 1 > /work/f; rm /etc/motd; echo 1234 > /etc/machine-id")
        made = box.create_snapshot()
        named = box.create_snapshot(name="case-snapshot:v2")
        assert named.snapshot_id == "case-snapshot:v2"
        assert named.names == ["case-snapshot:v2"]
        assert box.is_running()
        box.files.write("/work/f", "2")
        again = box.create_snapshot(name="case-snapshot:v2")
        assert again.snapshot_id == named.snapshot_id
        listed = [each.snapshot_id for each in Sandbox.list_snapshots(sandbox_id=box.sandbox_id).next_items()]
        assert listed == [named.snapshot_id, made.snapshot_id], listed
        assert [each.snapshot_id for each in box.list_snapshots(limit=1).next_items()] == [named.snapshot_id]
    assert Sandbox.list_snapshots(sandbox_id="none").next_items() == []
    paginator = Sandbox.list_snapshots(limit=1)
    found = []
    while paginator.has_next:
        found += [each.snapshot_id for each in paginator.next_items()]
    assert {made.snapshot_id, named.snapshot_id} <= set(found)
    assert len(found) == len(set(found))
    with Sandbox.create(made.snapshot_id) as child, Sandbox.create("case-snapshot:v2") as later:
        assert child.files.read("/tmp/state") == "kept"
        assert (child.files.read("/work/f"), later.files.read("/work/f")) == ("1\n", "2")
        assert not child.files.exists("/etc/motd")
        assert child.commands.run("cat /etc/machine-id; echo $SECRET").stdout.strip() != "1234"
    assert Sandbox.delete_snapshot(made.snapshot_id)
    assert Sandbox.delete_snapshot(named.snapshot_id)
    assert not Sandbox.delete_snapshot(made.snapshot_id)
    try:
        Sandbox.create(made.snapshot_id).kill()
        raise AssertionError("it is gone")
    except SandboxException:
        pass


def case_a_snapshot_of_a_paused_one(_):
    if not hasattr(Sandbox, "create_snapshot"):
        return
    with Sandbox.create() as box:
        box.files.write("/work/state", "kept")
        box.pause()
        made = box.create_snapshot()
        assert Sandbox.get_info(box.sandbox_id).state == SandboxState.PAUSED
        with Sandbox.create(made.snapshot_id) as child:
            assert child.files.read("/work/state") == "kept"
        Sandbox.delete_snapshot(made.snapshot_id)


run(globals())

"""Sandboxes that stand still and that are forked, by E2B's client."""

from __future__ import annotations

from case_kit import run

from e2b import Sandbox, SandboxQuery, SandboxState


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


run(globals())

"""Tripwires of files and processes in a microVM, whose own kernel tells: what is seen, and what root of that kernel
does about it: it can blind and forge, and ending or garbling what looks out is noticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from egress_world import World, events, inside, now, world

import dsec
from dsec.errors import Unsupported
from dsec.spec.causes import Cause
from dsec.spec.tripwires import Action, MaskedRule, PathRule, ProcessRule, Rule, Severity
from microvm_kit import SMALL, first_box, machines_over, needs_qemu
from server_kit import PATIENCE_S

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    needs_qemu,
]

RULES: list[str | Rule] = [
    "default",
    "swe",
    PathRule(id="answers", paths=["/work/answers/**"], on=["read"], severity=Severity.CRITICAL),
    PathRule(id="kept", paths=["/work/kept", "/etc/debian_version"], on=["write", "remove"]),
    PathRule(id="spared", paths=["/work/spared/**"], on=["write"], unless_exe=["/usr/bin/touch"]),
    ProcessRule(id="nap", exe=["**/sleep"], argv=["*sleep 900*"]),
]
SPEC = msgspec.structs.replace(SMALL, pids=256, tripwires=RULES)
DECOY = "/root" + "/.ssh/id_rsa"
LOOKOUT = """
import os, select
def lookout():
    \"\"\"The guest's child that looks out: root's, with a fanotify group.\"\"\"
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                links = [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
            except OSError:
                continue
            if "anon_inode:[fanotify]" in links:
                return int(name)
"""


@pytest.fixture(scope="module")
def there(debian_module_state: Path, vm_templates: Path) -> Iterator[World]:
    with machines_over(debian_module_state, vm_templates), world(debian_module_state) as found:
        yield found


@pytest.fixture(scope="module")
def box(there: World) -> Iterator[dsec.Sandbox]:
    with first_box(there.client, SPEC) as box:
        yield box


def sh(box: dsec.Sandbox, command: str) -> None:
    box.commands.run(["sh", "-c", command]).check()


def wait_for(box: dsec.Sandbox, kind: str, at: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """An event after `at`."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for each in events(box, at):
            if each.type == kind and wanted(each.data):
                return each.data
        assert time.monotonic() < deadline, [(each.type, each.data) for each in events(box, at)]
        time.sleep(0.2)


def hit(box: dsec.Sandbox, at: int, rule: str, act: str) -> dict[str, Any]:
    return wait_for(box, "tripwire", at, lambda data: (data["rule"], data["act"]) == (rule, act))


def test_it_is_armed_and_says_what_is_not_watched(box: dsec.Sandbox) -> None:
    armed = next(each.data for each in events(box) if each.type == "tripwires_armed")
    assert armed["not_watched"] == ["masked-kernel-file"]
    assert "missing_decoys" not in armed


def test_what_is_seen(box: dsec.Sandbox) -> None:
    sh(box, "mkdir -p /work/answers /work/spared; echo 1 > /work/answers/one; echo new > /tmp/new; sleep 0.7")
    at = now(box)
    sh(box, f"cat {DECOY} > /dev/null")
    seen = hit(box, at, "decoy-ssh-key", "read")
    assert seen["path"] == DECOY
    assert seen["process"]["exe"] == "/usr/bin/cat"
    assert seen["process"]["uid"] == 0
    sh(box, "cat /work/answers/one > /dev/null")
    assert hit(box, at, "answers", "read")["severity"] == "critical"
    sh(box, "echo x > /etc/ld.so.preload; rm /etc/ld.so.preload")
    assert hit(box, at, "loader-preload", "write")["path"] == "/etc/ld.so.preload"
    sh(box, "mv /tmp/new /work/kept")  # a rename into place, by whom
    assert hit(box, at, "kept", "write")["process"]["exe"] == "/usr/bin/mv"
    sh(box, "rm /etc/debian_version")  # of a layer's: a whiteout takes its place
    assert wait_for(box, "tripwire", at, lambda data: data["path"] == "/etc/debian_version")["act"] == "remove"
    nap = box.commands.start(["sh", "-c", "sleep 900; true"])
    assert hit(box, at, "nap", "start")["process"]["argv"] == ["sleep", "900"]
    nap.kill()
    sh(box, "touch /work/spared/one; echo 1 > /work/spared/two")
    assert hit(box, at, "spared", "write")["path"] == "/work/spared/two"
    sh(box, "mkdir -p /work/tests; echo > /work/tests/test_a.py; mv /work /work2; mv /work2 /work")
    assert hit(box, at, "tests-changed", "write")["path"].startswith("/work/tests")
    assert hit(box, at, "answers", "read")["path"] == "/work/answers/one"


def test_honest_work_and_a_callers_own_file_calls_are_no_hits(box: dsec.Sandbox) -> None:
    at = now(box)
    box.files.read(DECOY)
    box.files.write("/work/answers/two", "2")
    box.files.read("/work/answers/two")
    sh(
        box,
        "cp -r /etc/default /tmp/etc; find /usr/bin >&2; python3 -c 'import json'; chmod +x /tmp/etc/*; sleep 0.3",
    )
    nap = box.commands.start(["sh", "-c", "sleep 900; true"])
    hit(box, at, "nap", "start")
    nap.kill()
    found = [each.data for each in events(box, at) if each.type == "tripwire"]
    assert {each["rule"] for each in found if each["severity"] in ("high", "critical")} == set(), found


def test_ending_what_looks_out_is_noticed(box: dsec.Sandbox) -> None:
    at = now(box)
    inside(box, LOOKOUT + "found = lookout(); os.kill(found, 9)")
    lost = wait_for(box, "tripwires_lost", at, lambda data: True)
    assert "ended" in lost["message"]
    deadline = time.monotonic() + PATIENCE_S
    while not any(each.type == "tripwire" for each in events(box, at)):  # another one looks out soon
        assert time.monotonic() < deadline
        sh(box, f"cat {DECOY} > /dev/null; sleep 0.3")


def test_garbage_and_forged_records_harm_its_own_watch_alone(box: dsec.Sandbox) -> None:
    at = now(box)
    inside(box, LOOKOUT + "found = os.write(os.open(f'/proc/{lookout()}/fd/1', os.O_WRONLY), b'\\xff' * 4096)")
    assert "malformed" in wait_for(box, "tripwires_lost", at, lambda data: True)["message"]
    at = now(box)
    deadline = time.monotonic() + PATIENCE_S
    while not any(each.type == "tripwire" for each in events(box, at)):  # another one looks out soon
        assert time.monotonic() < deadline
        sh(box, "echo 1 > /work/spared/three; sleep 0.3")
    forged = DECOY.encode() + b"\0/usr/bin/forged\0"
    inside(
        box,
        LOOKOUT
        + f"""
import struct
text = {forged!r}
record = struct.pack("<BBHII", 2, 0, len(text), 77, 0) + text
fd = os.open(f"/proc/{{lookout()}}/fd/1", os.O_WRONLY)
for _ in range(3000): os.write(fd, record)
found = 1
""",
    )
    assert hit(box, at, "decoy-ssh-key", "read")["process"]["exe"] == "/usr/bin/forged"  # a claim is a claim
    assert len([each for each in events(box, at) if each.type == "tripwire"]) < 40  # and no flood
    assert box.commands.run(["true"]).exit_code == 0


def test_a_fork_and_the_next_server_look_out_as_well(there: World, box: dsec.Sandbox) -> None:
    (child,) = box.fork(1)
    try:
        sh(child, f"cat {DECOY} > /dev/null")
        hit(child, 0, "decoy-ssh-key", "read")
    finally:
        child.kill()
    at = now(box)
    there.server.kill()
    there.server.start()
    wait_for(box, "tripwires_armed", at, lambda data: True)
    deadline = time.monotonic() + PATIENCE_S
    while not any(each.type == "tripwire" for each in events(box, at)):
        assert time.monotonic() < deadline
        sh(box, f"cat {DECOY} > /dev/null; sleep 0.3")


def test_a_hit_ends_it(there: World) -> None:
    rule = PathRule(id="trap", paths=["/etc/trap"], on=["write"], action=Action.END)
    with there.client.create(msgspec.structs.replace(SPEC, tripwires=[rule])) as other:
        other.commands.start(["sh", "-c", "echo > /etc/trap"])
        deadline = time.monotonic() + PATIENCE_S
        while other.refresh().cause is not Cause.TRIPWIRE:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_what_means_nothing_there_is_refused(there: World) -> None:
    with pytest.raises(Unsupported, match="no masked files"):
        there.client.create(msgspec.structs.replace(SPEC, tripwires=[MaskedRule(id="masks")]))

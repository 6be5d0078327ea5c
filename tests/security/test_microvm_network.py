"""Attacks on the egress from inside a microVM, whose programs reach it through the channel: some of those on a
container's, and what only root of a kernel of its own can try: to speak in its guest's name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from egress_world import ECHO, PRELUDE, World, events, heard, inside, now, world
from test_egress import (  # noqa: F401
    test_a_change_cuts_what_is_open,
    test_a_gateway_serves_while_it_is_granted,
    test_a_granted_name_is_reached_and_on_record,
    test_half_closed_and_slow_readers,
    test_limits,
    test_other_names_and_addresses_are_not,
)

import dsec
from dsec.spec.causes import Cause
from dsec.spec.tripwires import NetworkRule
from microvm_kit import SMALL, first_box, machines_over, needs_qemu
from server_kit import PATIENCE_S

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    needs_qemu,
]

NETWORK = {"good": True, "few": True, "little": True, "inner": True, "host:public.example": True}
SPEC = msgspec.structs.replace(SMALL, pids=256, network=NETWORK)
POSE = """
import os, select
def way():
    \"\"\"The pipe on which the guest says what programs connect to: root may write to it too.\"\"\"
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1" and open(f"/proc/{name}/comm").read() == "init\\n":
            with open(f"/proc/{name}/status") as status:
                if "\\nUid:\\t65534" in status.read():
                    return int(name), os.open(f"/proc/{name}/fd/1", os.O_WRONLY)
    return 0, -1
def record(kind, flow, data=b"", size=None):
    return struct.pack("<BBHI", kind, 0, len(data) if size is None else size, flow) + data
def open_(flow, address, port):
    return record(2, flow, socket.inet_aton(address) + struct.pack("<H", port))
def flush(fd, data):
    while data:
        data = data[os.write(fd, data[:4096]):]
"""


@pytest.fixture(scope="module")
def there(debian_module_state: Path, vm_templates: Path) -> Iterator[World]:
    with machines_over(debian_module_state, vm_templates), world(debian_module_state) as found:
        yield found


@pytest.fixture(scope="module")
def box(there: World) -> Iterator[dsec.Sandbox]:
    with first_box(there.client, SPEC) as box:
        yield box


def test_it_is_a_machine_without_a_card(box: dsec.Sandbox) -> None:
    found = box.commands.run(["sh", "-c", "ls /sys/class/net; ls /sys/class/net | wc -l"]).check().stdout
    assert found.split() == ["lo", "1"]


def test_records_of_roots_own_reach_no_more_than_programs_do(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    there.outside.received.clear()
    outside = there.outside.address
    found = inside(
        box,
        POSE
        + f"""
_, fd = way()
wanted = [("127.0.0.1", {there.server.port}), ("{outside}", {ECHO}), ("169.254.169.254", 80), ("0.0.0.0", 80),
          ("255.255.255.255", 9), ("224.0.0.1", 9), ("10.0.0.1", 22), ("8.8.8.8", 443), ("198.18.255.254", 80)]
for number, (address, port) in enumerate(wanted, 100_000):
    flush(fd, open_(number, address, port) + record(3, number, b"GET / HTTP/1.0\\r\\n\\r\\n"))
found = len(wanted)
""",
    )
    refused = heard(box, at, "connection_refused", lambda seen: sum(each.get("count", 1) for each in seen) >= found)
    assert sum(each.get("count", 1) for each in refused) == found
    assert not [each for each in events(box, at) if each.type == "connection"]
    assert not there.outside.received


def works_again(there: World, box: dsec.Sandbox) -> str:
    """What the echo answers, once the way out is there again."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := inside(box, f'found = reach("good.example", {ECHO})')) != "hello":
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    return str(found)


def test_nonsense_ends_its_own_connections_alone(there: World, box: dsec.Sandbox) -> None:
    """More bytes than it may send; more of the kind: `tests/unit/test_vmm_network.py`."""
    inside(
        box,
        POSE
        + """
_, fd = way()
flush(fd, open_(900_000, socket.gethostbyname('good.example'), 9000) + record(3, 900_000, bytes(16384)) * 40)
found = True
""",
    )
    assert works_again(there, box) == "hello"


def test_a_flood_of_wishes_leaves_the_server_to_others(there: World, box: dsec.Sandbox) -> None:
    """Connections, half of them never spoken on, and names as long as they can be."""
    at = now(box)
    command = box.commands.start(
        ["python3", "-c", f"{PRELUDE}{POSE}\n"
         "_, fd = way(); name = socket.gethostbyname('few.example'); number = 1_000_000\n"
         "label = bytes([63]) + b'x' * 63\n"
         "query = struct.pack('!HHHHHH', 1, 256, 1, 0, 0, 0) + label * 3 + bytes([61]) + b'x' * 61 + bytes(5)\n"
         "while not os.path.exists('/tmp/over'):\n"
         "    data = b''.join(open_(number + i, name if i % 2 else '10.0.0.1', 9000) for i in range(100))\n"
         "    flush(fd, data + record(7, number, query) * 20); number += 100\n"
         "print(number)"]
    )  # fmt: skip
    with there.client.create("debian") as other:
        heard(box, at, "connection_refused", len)
        for _ in range(20):
            other.commands.run(["true"]).check()
    assert box.network.get().open <= 4
    box.files.write("/tmp/over", "")
    assert int(command.wait().stdout) > 1_000_000
    assert works_again(there, box) == "hello"


def test_a_tripwire_for_what_is_refused(there: World) -> None:
    rule = {"kind": "network", "id": "evil", "names": ["*.evil.example"], "severity": "critical", "action": "end"}
    spec = msgspec.structs.replace(SPEC, tripwires=[msgspec.convert(rule, NetworkRule)])
    with there.client.create(spec) as box:
        assert [each.type for each in events(box)].count("tripwires_armed") == 1
        inside(box, 'found = reach("other.example", 80)')
        box.commands.start(["python3", "-c", f"{PRELUDE}reach('x.evil.example', 443)"])
        deadline = time.monotonic() + PATIENCE_S
        while box.refresh().cause is not Cause.TRIPWIRE:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hit = next(each.data for each in events(box) if each.type == "tripwire")
        assert (hit["rule"], hit["act"], hit["path"]) == ("evil", "refused", "x.evil.example")


def test_its_processes_end_is_its_own_loss(there: World, box: dsec.Sandbox) -> None:
    inside(box, POSE + "pid, _ = way(); os.kill(pid, 9); found = pid")
    assert works_again(there, box) == "hello"


def test_a_policy_that_comes_and_goes(there: World, box: dsec.Sandbox) -> None:
    with there.client.create(msgspec.structs.replace(SPEC, network={})) as other:
        assert inside(other, 'found = [reach("good.example", 80), reach("10.0.0.1", 80)]') == ["gaierror", "OSError"]
        other.network.set({"good": True})
        assert works_again(there, other) == "hello"
        children = other.fork(2)
        try:
            for child in children:
                assert works_again(there, child) == "hello"
        finally:
            for child in children:
                child.kill()
        other.pause()
        assert works_again(there, other) == "hello"


def test_policy_and_names_outlive_the_server(there: World, box: dsec.Sandbox) -> None:
    before = inside(box, 'found = socket.gethostbyname("good.example")')
    there.server.kill()
    there.server.start()
    assert works_again(there, box) == "hello"
    assert inside(box, 'found = socket.gethostbyname("good.example")') == before
    assert inside(box, 'found = reach("other.example", 80)') == "gaierror"

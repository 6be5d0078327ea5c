"""What goes wrong around machines: their template's files, the host's disk and memory, another version of what runs
them, a guest in hostile hands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from microvm_node_kit import PATIENCE_S, SPEC, Node, needs, node_on

from dsec.backends.container.host import Host
from dsec.backends.microvm import captures
from dsec.backends.microvm.backend import MicroVmBackend
from dsec.channel import files
from dsec.configuration import Config
from dsec.edge.config import EdgeConfig
from dsec.edge.node import Edge
from dsec.errors import AdmissionTimeout, CreateFailed, OutcomeUnknown, Unavailable, Unsupported
from dsec.spec.causes import Cause
from dsec.spec.operations import OpRequest
from dsec.spec.sandbox import State
from dsec.testing.conformance.kit import ENV, ok, shell
from dsec.vmm.instance import MachineInstance
from machines_kit import machine_host

pytestmark = needs


@pytest.fixture(scope="module")
def place(
    debian_module_state: Path, vm_templates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Config, Host]]:
    """A host for all tests, with a kernel, and with templates of its own, which get hurt."""
    with machine_host(debian_module_state, tmp_path_factory.mktemp("faults") / f"run-{os.getpid()}") as host:
        yield host


@pytest.fixture
async def node(place: tuple[Config, Host]) -> AsyncIterator[Node]:
    async with node_on(*place, suspend=True) as node:
        yield node


def machines(backend: MicroVmBackend) -> set[str]:
    """Sandboxes' machines, not stems."""
    return {name for name in backend.node.machines.names() if name.startswith("v")}


async def test_a_templates_files_go_while_clones_live(node: Node) -> None:
    one = await node.make("one")
    templates = node.backend.node.templates
    (key,) = templates._open
    boots = len(templates.boots_s)
    kept = templates.root / key
    for name in ("memory", "state", "disk"):
        os.truncate(kept / name, (kept / name).stat().st_size // 2)
    templates.disk(key).unlink()
    ok(await shell(one.channel, "cat /usr/bin/python3* > /dev/null; echo x > /x; sync"))
    two = await node.make("two")  # its template is made again
    assert len(templates.boots_s) == boots + 1
    assert ok(await shell(two.channel, "echo alive")) == b"alive\n"
    assert ok(await shell(one.channel, "cat /x")) == b"x\n"


async def test_a_template_that_is_no_use_is_made_again(node: Node) -> None:
    await node.make("one")
    templates = node.backend.node.templates
    (template,) = templates._open.values()
    broken = os.memfd_create("state", os.MFD_CLOEXEC)
    os.write(broken, os.pread(template.state, 1000, 0))
    os.dup2(broken, template.state)
    os.close(broken)
    node.backend.node.stems.drop_all()  # it would serve without the template's state
    for name in ("two", "three"):
        with pytest.raises((CreateFailed, Unavailable)):
            await node.make(name)
    four = await node.make("four")
    assert ok(await shell(four.channel, "echo alive")) == b"alive\n"


async def test_the_disk_is_full_during_a_snapshot(node: Node) -> None:
    one = await node.make("one")
    ok(await shell(one.channel, "head -c 30M /dev/urandom > /random; sync"))
    volume = node.backend.node.host.volume.root
    before = {path.name for path in volume.rglob("*")}
    with filled(volume):
        with pytest.raises(Unavailable):
            await node.capture("one")
        assert ok(await shell(one.channel, "echo alive")) == b"alive\n"
    left = {path.name for path in volume.rglob("*") if not path.name.startswith("s")} - before  # a stem's stays
    assert left == set()
    captured = await node.capture("one")
    assert (captured.upper / "random").stat().st_size == 30 << 20
    await node.backend.drop(captured.name)


@contextmanager
def filled(volume: Path) -> Iterator[None]:
    """There is no room left."""
    filler = volume / "filler"
    with filler.open("wb") as file:
        size, at = 1 << 36, 0
        while size >= 1 << 12:
            try:
                os.posix_fallocate(file.fileno(), at, size)
                at += size
            except OSError:
                size //= 2
    try:
        yield
    finally:
        filler.unlink()
        os.sync()


async def test_its_state_is_of_another_cpu_or_version(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.make("one")
    monkeypatch.setitem(node.backend.node.driver.__dict__, "fingerprint", "another")
    with pytest.raises(Unsupported, match="on another CPU"):
        await node.backend.split("one", node.handles["one"])
    with pytest.raises(Unsupported, match="on another CPU"):
        await node.capture("one")


async def test_a_suspended_one_can_not_be_resumed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = await node.make("one"), await node.make("two")
    for instance in (one, two):
        instance.freeze(True)
        assert (await instance.page_out()).after_bytes == 0
    assert machines(node.backend) == {one.machine.name, two.machine.name}
    with monkeypatch.context() as other:
        other.setitem(node.backend.node.driver.__dict__, "fingerprint", "another")
        one.freeze(False)
        async with asyncio.timeout(PATIENCE_S):
            end = await one.ended()
    assert end.cause is Cause.PLATFORM_KILLED
    assert "of another CPU" in end.message
    os.truncate(node.backend.node.disks.root / f"{two.machine.name}.suspended" / "memory", 1 << 20)
    two.freeze(False)
    async with asyncio.timeout(PATIENCE_S):
        assert "was cut" in (await two.ended()).message


async def test_a_storm_beyond_memory(node: Node, tmp_path: Path) -> None:
    class Small:
        def memory_total_bytes(self) -> int:
            return 1 << 30

        def memory_free_bytes(self) -> int:
            return 1 << 30

        def disk_free_bytes(self) -> int:
            return 1 << 40

    config = EdgeConfig(memory_overcommit=1.0)
    edge = await Edge.open({"microvm": node.backend}, tmp_path / "edge", config=config, capacity=Small())
    try:
        made = await asyncio.gather(
            *(edge.create(SPEC, project="default", deadline_s=PATIENCE_S if i < 4 else 1.0) for i in range(12)),
            return_exceptions=True,
        )
        running = [each for each in made if not isinstance(each, BaseException)]
        refused = [each for each in made if isinstance(each, AdmissionTimeout)]
        assert (len(running), len(refused)) == (4, 8)
        items = await edge.fork(running[0].sandbox.id, 3, deadline_s=0.0)
        assert {item.error.code for item in items if item.error} == {"admission_timeout"}
        assert all(edge.get(each.sandbox.id).state is State.RUNNING for each in running)
        assert len(machines(node.backend)) == 4
    finally:
        await edge.close(keep=False)


HIJACK = r"""
import sys
while True:
    words = open("/proc/1/syscall").read().split()
    if len(words) == 9:
        break
code = {
    "silent": b"\xeb\xfe",  # jmp .
    # write(4, here, 4096), again and again
    "flood": b"\xb8\x01\0\0\0\xbf\x04\0\0\0\x48\x8d\x35\xef\xff\xff\xff\xba\0\x10\0\0\x0f\x05\xeb\xe6",
}[sys.argv[1]]
with open("/proc/1/mem", "r+b", buffering=0) as memory:
    memory.seek(int(words[-1], 16))
    memory.write(code)
"""


async def test_a_guest_in_hostile_hands(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root inside writes over pid 1: one floods the channel with what is no frame, one falls silent."""
    flooding, silent, other = [await node.make(name) for name in ("flooding", "silent", "other")]
    for instance, how in ((flooding, "flood"), (silent, "silent")):
        await files.write_file(instance.channel, b"/hijack.py", _once(HIJACK.encode()), user="root")
        await instance.channel.start(OpRequest(argv=(b"/usr/bin/python3", b"/hijack.py", how.encode()), env=ENV))
    async with asyncio.timeout(PATIENCE_S):
        await flooding.channel.lost()
    with pytest.raises(OutcomeUnknown):
        await flooding.channel.ping()
    async with asyncio.timeout(PATIENCE_S):
        while await answers(silent, within_s=5):
            pass
    assert ok(await shell(other.channel, "echo alive")) == b"alive\n"
    monkeypatch.setattr(captures, "WRITE_S", 2.0)
    with pytest.raises(Unavailable, match="didn't write its files down"):
        await node.capture("silent")
    assert list((node.backend.node.host.volume.root / "captures").iterdir()) == []
    assert len(machines(node.backend)) == 3
    assert ok(await shell(other.channel, "echo alive")) == b"alive\n"


async def answers(instance: MachineInstance, *, within_s: float) -> bool:
    """Whether its guest does."""
    try:
        async with asyncio.timeout(within_s):
            await instance.channel.ping()
    except TimeoutError:
        return False
    return True


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data

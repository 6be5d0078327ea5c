"""The microVM backend on Firecracker, whose part is played (tests/firecracker_kit.py): launcher, jail, descriptors,
sockets, snapshots and page faults are real; only what a guest would do is not."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from dsec.app import open_host, open_machines
from dsec.backends.container.native import build_native
from dsec.backends.microvm.backend import MicroVmBackend
from dsec.configuration import Config
from dsec.edge.config import SystemClock
from dsec.errors import OutcomeUnknown, Unavailable, Unsupported
from dsec.spec.causes import Cause
from dsec.spec.operations import EndKind
from dsec.spec.sandbox import SandboxSpec
from dsec.store.kernels import Kernel, KernelStore
from dsec.store.views import remove_dev
from dsec.testing.conformance.kit import shell
from dsec.vmm.firecracker import FirecrackerDriver, Memory
from dsec.vmm.instance import MachineInstance

pytestmark = pytest.mark.root

KIT = Path(__file__).parent.parent / "firecracker_kit.py"
SPEC = SandboxSpec(environment="debian", backend="microvm", memory_bytes=128 << 20, disk_bytes=64 << 20, pids=128)
PYTHON = Path(sys.executable).resolve()


class Played(FirecrackerDriver):
    """Its VMM is a script, which needs an interpreter."""

    @property
    def paths(self) -> tuple[str, ...]:
        found = (Path(sys.base_prefix, "lib"), Path("/usr/lib"), Path("/usr/lib64"))
        return (*super().paths, str(PYTHON), *(str(each) for each in found if each.is_dir()))


@pytest.fixture
def state(state_over: Callable[[Path], Path], tmp_path: Path) -> Path:
    """With a kernel that was built, as far as one can see."""
    found = state_over(tmp_path / "state")
    shared = (found / "store").readlink()
    (found / "store").unlink()
    (found / "store").mkdir()
    for path in shared.iterdir():
        if path.name != "kernels":
            (found / "store" / path.name).symlink_to(path)
    kernel = Kernel(
        digest="0" * 64,
        release="6.1.0-dsec",
        origin="built",
        source="played",
        machine="pc",
        modules=[],
        size_bytes=4,
        created_at=0.0,
    )
    directory = KernelStore(found).path(kernel)
    directory.mkdir(parents=True)
    (directory / "kernel").write_bytes(b"\x7fELF")
    (directory / "kernel.json").write_bytes(msgspec.json.encode(kernel))
    return found


@pytest.fixture(
    params=[
        "File",
        pytest.param(
            "Uffd", marks=pytest.mark.skipif(not Path("/dev/userfaultfd").exists(), reason="this kernel has none")
        ),
    ]
)
async def backend(request: pytest.FixtureRequest, state: Path, tmp_path: Path) -> AsyncIterator[MicroVmBackend]:
    memory: Memory = request.param
    program = tmp_path / "firecracker"
    program.write_text(f"#!{PYTHON} -IS\n{KIT.read_text()}")
    program.chmod(0o755)
    config = Config(state=state, run=tmp_path / f"run-{os.getpid()}", vm_accel="tcg", vm_spare=0)
    host = open_host(config)
    try:
        node = open_machines(config, host, tmp_path / "templates")
        assert node is not None
        node.driver = node.machines.driver = Played(
            program, "Firecracker v1.17.0", memory=memory, build_native=lambda: build_native(state) / "guest"
        )
        node.stems.wanted = False  # as with KVM
        found = MicroVmBackend(node, SystemClock())
        await found.open({})
        try:
            yield found
        finally:
            await found.close(keep=False)
    finally:
        host.volume.close(keep=False)
        host.layers.unmount_all()
        host.views.remove()
        remove_dev(host.run)


async def test_a_machine_is_made_of_a_template_and_ends(backend: MicroVmBackend) -> None:
    handles = {name: backend.reserve(name, SPEC) for name in ("one", "two")}
    one, two = [await backend.create(name, SPEC, handle) for name, handle in handles.items()]
    assert len(backend.node.templates.boots_s) == 1
    (template,) = backend.node.templates._open.values()
    kept = os.fstat(template.memory)
    assert (kept.st_size, kept.st_blocks * 512 < 4 << 20) == (SPEC.memory_bytes, True)  # zeros are holes
    for each in (one, two):
        check_jail(each.machine.pid, each.machine.directory)
    asking = asyncio.ensure_future(shell(one.channel, "reboot"))
    end = await asyncio.wait_for(one.ended(), 120)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert end.cause is Cause.GUEST_EXITED
    assert "Kernel panic - not syncing: played" in end.message
    await backend.destroy("one", handles["one"])
    assert not one.machine.directory.exists()

    await two.channel.close()
    sock = await two.machine.port()  # as the next server does
    sock.close()
    os.kill(_vmm(two.machine.pid), 9)
    assert (await asyncio.wait_for(two.ended(), 120)).cause is Cause.PLATFORM_KILLED
    await backend.destroy("two", handles["two"])


async def test_forks_and_suspends(backend: MicroVmBackend) -> None:
    """A child is a clone of what its parent was; both, and one that was suspended, go on with their channels."""
    backend._suspend = True
    handle = backend.reserve("one", SPEC)
    one = await backend.create("one", SPEC, handle)
    await refused(one)  # an operation that is there when the stream is cut
    asking = [asyncio.ensure_future(one.channel.ping()) for _ in range(3)]
    name = await backend.split("one", handle)
    assert min(await asyncio.gather(*asking)) >= 0
    check_jail(one.machine.pid, one.machine.directory)
    template = backend.moments.get(name).template
    kept = os.fstat(template.memory)
    assert (kept.st_size, kept.st_blocks * 512 < 4 << 20) == (SPEC.memory_bytes, True)
    children = [f"child{number}" for number in range(2)]
    handles = {each: backend.reserve(each, SPEC, capture=name) for each in children}
    made = [await backend.create(each, SPEC, handles[each]) for each in children]
    for each in (one, *made):
        await refused(each)
    await backend.drop(name)
    with pytest.raises(Unsupported, match="firecracker's"):
        await backend.capture("one", handle)

    child = made[0]
    for _ in range(2):
        child.freeze(True)
        left = await child.page_out()
        assert (child.suspended, left.after_bytes) == (True, 0)
        assert child.machine.name not in {path.name for path in backend.node.machines.root.iterdir()}
        waiting = asyncio.ensure_future(child.channel.ping())
        child.freeze(False)
        assert await asyncio.wait_for(waiting, 120) >= 0
        await refused(child)
        async with child.lock:  # who woke it removes its files last
            assert not backend.suspends.has(child.machine.name)
    name = await backend.split(children[0], handles[children[0]])  # a copy of a copy
    grandchild = backend.reserve("grandchild", SPEC, capture=name)
    await refused(await backend.create("grandchild", SPEC, grandchild))

    frozen = made[1]
    frozen.freeze(True)
    backend._instances[children[1]].suspender = None
    name = await backend.split(children[1], handles[children[1]])
    assert frozen.machine.slot.frozen
    frozen.freeze(False)
    await refused(frozen)
    for each, used in (handles | {"one": handle, "grandchild": grandchild}).items():
        await backend.destroy(each, used)
    assert not list(backend.node.machines.root.iterdir())


async def test_a_monitor_that_ends_while_it_copies_ends_its_machine_alone(backend: MicroVmBackend) -> None:
    handles = {each: backend.reserve(each, SPEC) for each in ("one", "other")}
    one, other = [await backend.create(each, SPEC, handle) for each, handle in handles.items()]

    async def dies(state: int, memory: int = -1) -> None:
        os.kill(_vmm(one.machine.pid), 9)
        raise Unavailable("the VMM is gone")

    one.machine.control.split = dies  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await backend.split("one", handles["one"])
    assert (await asyncio.wait_for(one.ended(), 120)).cause is Cause.PLATFORM_KILLED
    assert await asyncio.wait_for(one.channel.lost(), 120)
    with pytest.raises(OutcomeUnknown):  # and nobody waits for ever
        await asyncio.wait_for(one.channel.ping(), 120)
    await refused(other)
    for each, handle in handles.items():
        await backend.destroy(each, handle)


async def refused(instance: MachineInstance) -> None:
    """It runs nothing, and says so."""
    async with asyncio.timeout(120):
        end = (await shell(instance.channel, "true")).end
    assert (end.kind, end.message) == (EndKind.START_FAILED, "nothing runs here")


def check_jail(pid: int, directory: Path) -> None:
    """What a VMM sees and owns."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert int(status["Uid"].split()[0]) >= 1 << 30
    assert (status["Seccomp"], status["Seccomp_filters"], status["NoNewPrivs"]) == ("2", "1", "1")
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    root = Path(f"/proc/{pid}/root")
    assert {path.name for path in (root / "dev").iterdir()} <= {"null", "zero", "urandom", "kvm", "userfaultfd"}
    assert not (root / "usr/bin/sh").exists()
    own = (directory / "own").stat()
    assert (own.st_uid, own.st_mode & 0o777) == (0, 0o711)  # it can make no file any more
    assert {path.name for path in (directory / "own").iterdir()} <= {"api", "vsock", "pages"}


def _vmm(pid: int) -> int:
    """The VMM itself, where its pager runs it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else pid

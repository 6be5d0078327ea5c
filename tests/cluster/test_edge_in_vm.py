"""An edge whose containers are in a machine of its own: it joins by the machine's way out, serves through an apiserver,
and another machine takes the place of one that is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import cluster_kit
import pytest
from cluster_kit import Cluster, eventually

from dsec.app import read_config
from dsec.errors import DsecError, SandboxLost
from dsec.spec.causes import Cause
from dsec.spec.sandbox import State
from machines_kit import own_state

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]


@pytest.fixture(scope="module")
def cluster(vm_templates: Path, debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    state = tmp_path_factory.mktemp("edge") / "state"
    own_state(state, debian_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_VM_ACCEL", "tcg")
        patch.setattr(cluster_kit, "PATIENCE_S", 900.0)  # a machine that boots and starts a server, imitated
        directory = tmp_path_factory.mktemp("cluster")
        with cluster_kit.running(directory, [state], servers=1, apiservers=1, prepare=in_vm) as found:
            yield found


def in_vm(cluster: Cluster) -> None:
    cluster.use(cluster.edges, in_vm="", vm_cpus="1", vm_memory_mib="1024", vm_state_gib="2")


def monitor_of(state: Path) -> int:
    """The host's number of the machine's QEMU."""
    socket = str(read_config(state).run / "vm.sock")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if socket.encode() in words and b"-I" in words:
            launcher = int(path.parent.name)
            (child,) = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            return int(child)
    raise AssertionError("no launcher")


async def test_it_serves_through_an_apiserver_and_outlives_its_machine(cluster: Cluster) -> None:
    async with cluster.client(0) as client:
        sandbox = await client.create("debian")
        assert (await sandbox.commands.run(["cat", "/etc/debian_version"])).check().stdout
        assert (await client.create("debian", backend="container")).id != sandbox.id
        os.kill(monitor_of(cluster.states[0]), signal.SIGKILL)

        async def ended() -> bool:
            try:
                info = await sandbox.refresh()
            except SandboxLost:  # the next machine was so long in coming that the whole node counts as lost
                return True
            except DsecError:
                return False
            return (info.state, info.cause, info.infra) == (State.ENDED, Cause.NODE_LOST, True)

        await eventually(ended)
        fresh = await client.create("debian", deadline_s=cluster_kit.PATIENCE_S)
        assert (await fresh.commands.run(["true"])).exit_code == 0
        await fresh.kill()

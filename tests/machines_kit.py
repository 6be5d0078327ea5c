"""What the factories of machines share: backends that keep launcher, templates and one machine from test to test."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsec.app import open_host
from dsec.backends.container.host import Host
from dsec.configuration import Config
from dsec.ports import Backend, Handle, InstanceEnd
from dsec.spec.sandbox import SandboxSpec
from dsec.store.views import remove_dev
from dsec.testing.conformance.kit import Feature, Keeper
from dsec.vmm.backend import InstanceT, MachineBackend, NodeT


class KeptBackend(MachineBackend[NodeT, InstanceT]):
    """Before a backend of machines: what a test ends is ended; launcher and templates stay for the next one."""

    handles: dict[str, Handle]

    async def open(self, known: dict[str, Handle]) -> Mapping[str, InstanceT | InstanceEnd]:
        self.handles = dict(known)
        return await super().open(known)

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        handle = self.handles[sandbox_id] = super().reserve(sandbox_id, spec, tenant, capture)
        return handle

    async def close(self, *, keep: bool) -> None:
        for sandbox_id, handle in () if keep else self.handles.items():
            await self.destroy(sandbox_id, handle)
        await super().close(keep=True)


class MachineFactory(ABC):
    """One host with machines on an imitated CPU."""

    features = Feature.LOCAL | {Feature.PROCESSES, Feature.KILL_GUEST, Feature.FAIL_CREATE}

    def __init__(self, config: Config, host: Host, templates: Path) -> None:
        self.config = config
        self.host = host
        self.templates = templates
        self.keeper = Keeper()
        self.backend: MachineBackend[Any, Any] | None = None

    @abstractmethod
    def new(self) -> MachineBackend[Any, Any]:
        """A backend, and what it needs, that is not opened yet."""

    def make(self) -> Backend:
        self.backend = self.new()
        return self.backend

    async def kill_guest(self, sandbox_id: str) -> None:
        assert self.backend is not None
        os.kill(self.backend.pid(sandbox_id), signal.SIGKILL)

    def fail_next_create(self) -> None:
        """Its disk is there already: a leftover that nobody knows of."""
        assert self.backend is not None
        disks = self.backend.node.disks
        copy = disks.copy

        def fail(name: str, source: Path) -> int:
            if name.startswith("s"):  # a stem's: without one machines are plain clones
                made: int = copy(name, source)
                return made
            disks.copy = copy
            os.close(copy(name, source))
            made = copy(name, source)
            return made

        disks.copy = fail


def launchers(run: Path) -> list[int]:
    """Processes that were started for this run directory: launchers, by the socket that they are told."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if os.fsencode(run) in path.read_bytes() else []
    return found


@contextmanager
def machine_host(state: Path, run: Path, *, spare: int = 0) -> Iterator[tuple[Config, Host]]:
    """A host for a module's machines; it is empty in the end. `spare`: machines to have ready of a kind."""
    config = Config(state=state, run=run, vm_accel="tcg", vm_spare=spare)
    host = open_host(config)
    try:
        yield config, host
    finally:
        host.volume.close(keep=False)
        host.layers.unmount_all()
        host.views.remove()
        remove_dev(host.run)


def own_state(state: Path, debian_store: Path) -> None:
    """A state directory for a shield, over the tests' store: the layer with our server stays here, and what other tests
    make of environments meanwhile stays there."""
    store = state / "store"
    for name in ("layers", "environments"):
        (store / name).mkdir(parents=True)
    for path in (*debian_store.glob("*"), *debian_store.glob("layers/*"), debian_store / "environments/debian.json"):
        if not (place := store / path.relative_to(debian_store)).exists():
            place.symlink_to(path)
    (state / "native").symlink_to(debian_store.parent / "native")

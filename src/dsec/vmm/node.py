"""What every backend of machines owns on a node: a launcher, machines that run, their disks and cgroups, an epoch.

`<run>/<name>` holds the machines' sockets, `<run>/<name>.sock` is the launcher's, `<run>/<name>.epoch` outlives the
server; disks are in `<volume>/<name>`. The launcher is started with the first machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from dsec.errors import Unavailable
from dsec.kernel.cgroup_pool import CgroupPool
from dsec.kernel.cgroups import CgroupRoot
from dsec.store.environments import EnvironmentStore
from dsec.store.remote import RemoteCatalog
from dsec.store.volume import Volume
from dsec.vmm.disks import Disks
from dsec.vmm.driver import VmmDriver
from dsec.vmm.launching import LauncherClient, LauncherState, start_launcher
from dsec.vmm.machine import Machines
from dsec.vmm.stems import Stems

log = logging.getLogger(__name__)

_NOBODY = LauncherState(0, {}, {}, frozenset())


class VmHost(Struct, frozen=True, kw_only=True):
    """Parts of the host that other backends stand on too. They are opened before and closed after this one."""

    state: Path
    run: Path
    volume: Volume
    environments: EnvironmentStore
    remote: RemoteCatalog | None
    make_swap: Callable[[], None]
    build_guest: Callable[[], Path]
    """The compiled guest; blocks while it is compiled first."""
    image_failures: Callable[[Sequence[str]], Callable[[], int]]
    """Counts the reads of layers that failed, from now on."""
    zeros_read: Callable[[], bool]
    """Whether layers that are filled on demand may have been read as zeros before this server."""


class MachineNode(ABC):
    """A base of the backends' nodes."""

    stems: Stems

    def __init__(
        self, name: str, host: VmHost, driver: VmmDriver, cgroups: CgroupRoot, *, accel_reason: str = ""
    ) -> None:
        """`accel_reason`: why the driver's accelerator is what it is."""
        self.host = host
        self.driver = driver
        self.accel_reason = accel_reason
        self.pool = CgroupPool(cgroups, spare=8, refill=1)
        self.disks = Disks(host.volume.root / name)
        self.machines = Machines(host.run / name, driver, self.disks, self.pool, host.environments.layers)
        self.epoch = 0
        self._name = name
        self._socket = host.run / f"{name}.sock"
        self._starting: asyncio.Task[None] | None = None
        self._on_lost: Callable[[], None] = lambda: None

    @abstractmethod
    async def open(self, on_lost: Callable[[], None]) -> tuple[LauncherState, bool]:
        """As `connect`."""

    @abstractmethod
    async def close(self, *, keep: bool) -> None:
        """`keep`: machines and templates go on for the next server."""

    @abstractmethod
    async def launcher_started(self) -> None:
        """There is a new one, which holds nothing."""

    @abstractmethod
    def launcher_lost(self) -> None:
        """It died, and all machines with it."""

    async def connect(self, on_lost: Callable[[], None]) -> tuple[LauncherState, bool]:
        """What the launcher of an earlier server says, and whether it is there no more. `on_lost()`: the launcher died,
        and all machines with it."""
        self._on_lost = on_lost
        self.machines.root.mkdir(mode=0o700, exist_ok=True)
        state, fresh = _NOBODY, True
        client = LauncherClient(on_exit=self.machines.on_exit, on_lost=self._lost)
        with contextlib.suppress(Unavailable):
            state, fresh = await client.connect(self._socket), False
            self.machines.launcher = client
        self._set_epoch(renew=fresh)
        return state, fresh

    async def serving(self) -> None:
        """See to it that there is a launcher. Raises `Unavailable`."""
        if self.machines.launcher is not None:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_launcher(), name=f"launcher of {self._name}")
        await asyncio.shield(self._starting)  # who asked may go away; a launcher that is up has to be known

    async def _start_launcher(self) -> None:
        unit = f"dsec-{self._name}-{self.host.run.name}"
        await start_launcher(self._socket, self.driver.paths, unit=unit, sockets=self.driver.listens)
        client = LauncherClient(on_exit=self.machines.on_exit, on_lost=self._lost)
        await client.connect(self._socket)
        self.machines.launcher = client
        await self.launcher_started()

    async def disconnect(self, *, keep: bool) -> None:
        """`keep`: machines go on for the next server."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        launcher, self.machines.launcher = self.machines.launcher, None
        if launcher is not None and keep:
            launcher.close()
        elif launcher is not None:
            with contextlib.suppress(Unavailable):
                await launcher.shutdown()
        await asyncio.to_thread(self.pool.close, keep=keep)
        if not keep:
            self.disks.remove_all()
            shutil.rmtree(self.machines.root, ignore_errors=True)
            for path in (self._socket, self._epoch_path):
                path.unlink(missing_ok=True)

    @property
    def _epoch_path(self) -> Path:
        return self.host.run / f"{self._name}.epoch"

    def _set_epoch(self, *, renew: bool) -> None:
        if not renew:
            with contextlib.suppress(OSError, ValueError):
                self.epoch = int(self._epoch_path.read_text()) & 0xFFFFFF
                return
        self.epoch = secrets.randbelow(0xFFFFFF) + 1
        self._epoch_path.write_text(str(self.epoch))

    def _lost(self) -> None:
        log.error("the launcher of virtual machines died, and with it all machines")
        self.machines.launcher = None
        self._set_epoch(renew=True)
        self.machines.lose_all()
        self.launcher_lost()
        self._on_lost()

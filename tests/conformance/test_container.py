"""The conformance suite on the container backend: real namespaces, real cgroups, a Debian environment."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.app import Config, open_host
from dsec.backends.container.backend import ContainerBackend
from dsec.edge.config import SystemClock
from dsec.ports import Backend
from dsec.testing.conformance import *  # noqa: F403
from dsec.testing.conformance.kit import Feature, Keeper

pytestmark = pytest.mark.root


class ContainerFactory:
    """One host for all tests: each opens it as the next edge does, beside a sandbox that goes from test to test."""

    features = Feature.LOCAL | {Feature.PROCESSES, Feature.KILL_GUEST, Feature.FAIL_CREATE, Feature.DISK_LIMIT}
    environment = "debian"

    def __init__(self, state: Path, run: Path) -> None:
        self.config = Config(state=state, run=run)
        self.keeper = Keeper()
        self.backend: ContainerBackend | None = None

    def make(self) -> Backend:
        self.backend = ContainerBackend(open_host(self.config), SystemClock())
        return self.backend

    async def kill_guest(self, sandbox_id: str) -> None:
        assert self.backend is not None
        os.kill(self.backend.pid(sandbox_id), signal.SIGKILL)

    def fail_next_create(self) -> None:
        """Its directories are there already: a leftover that nobody knows of."""
        assert self.backend is not None
        volume = self.backend.host.volume
        make = volume.make

        def fail(sandbox_id: str, disk_bytes: int, uid_base: int, capture: str = "") -> tuple[Path, Path]:
            volume.make = make  # type: ignore[method-assign]
            make(sandbox_id, disk_bytes, uid_base)
            return make(sandbox_id, disk_bytes, uid_base)

        volume.make = fail  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def factory(debian_module_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerFactory]:
    run = tmp_path_factory.mktemp("host") / f"run-{os.getpid()}"  # its name is its cgroups'
    made = ContainerFactory(debian_module_state, run)
    yield made
    asyncio.run(end_all(made))
    assert not list((run / "volume").iterdir())


async def end_all(factory: ContainerFactory) -> None:
    """The sandbox that is kept, and what all stand on."""
    backend = factory.make()
    await backend.open({})
    await backend.close(keep=False)

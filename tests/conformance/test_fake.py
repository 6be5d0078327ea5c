"""The conformance suite on the fake backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.backends.fake import FakeBackend, FakeHost
from dsec.edge.config import SystemClock
from dsec.ports import Backend
from dsec.testing.conformance import *  # noqa: F403
from dsec.testing.conformance.kit import Feature


class FakeFactory:
    features = Feature.LOCAL | {Feature.KILL_GUEST, Feature.FAIL_CREATE, Feature.DISK_LIMIT}
    environment = "base"

    def __init__(self, directory: Path) -> None:
        self.host = FakeHost(directory / "spool")

    def make(self) -> Backend:
        return FakeBackend(self.host, SystemClock())

    async def kill_guest(self, sandbox_id: str) -> None:
        self.host.kill_guest(sandbox_id)

    def fail_next_create(self) -> None:
        self.host.fail_next_create("mount")


@pytest.fixture
def factory(tmp_path: Path) -> FakeFactory:
    return FakeFactory(tmp_path)

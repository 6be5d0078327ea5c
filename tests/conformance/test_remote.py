"""The conformance suite through SDK and HTTP, on a real server in a process of its own. The next edge is the server
killed (SIGKILL) and started again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.testing.conformance import *  # noqa: F403
from dsec.testing.conformance.kit import Feature
from dsec.testing.remote import RemoteBackend
from server_kit import Server, serving

pytestmark = pytest.mark.root


class RemoteFactory:
    features = frozenset({Feature.PROCESSES, Feature.KILL_GUEST, Feature.DISK_LIMIT})
    environment = "debian"

    def __init__(self, server: Server) -> None:
        self.server = server
        self.backend: RemoteBackend | None = None

    def make(self) -> RemoteBackend:
        if self.backend is not None:
            self.server.kill()
        if not self.server.alive():  # nor where an earlier test couldn't start it
            self.server.start()
        endpoint = self.server.endpoint()
        self.backend = RemoteBackend(endpoint.url, endpoint.api_key)
        return self.backend

    async def kill_guest(self, sandbox_id: str) -> None:
        assert self.backend is not None
        os.kill(await self.server.pid1(self.backend.sandbox(sandbox_id)), signal.SIGKILL)

    def fail_next_create(self) -> None:
        raise AssertionError("nothing of a server's is in reach here")


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as server:
        yield server


@pytest.fixture
def factory(server: Server) -> RemoteFactory:
    return RemoteFactory(server)

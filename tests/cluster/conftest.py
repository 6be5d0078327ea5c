"""Clients of a module's `cluster`, each of another of its apiservers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from cluster_kit import Cluster

from dsec import AsyncClient


@pytest.fixture
async def one(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with cluster.client(0) as client:
        yield client


@pytest.fixture
async def other(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with cluster.client(1) as client:
        yield client

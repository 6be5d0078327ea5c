"""Memory that is promised to what is no sandbox: function calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edge_kit import Kit, spec, until

from dsec.edge.config import EdgeConfig
from dsec.errors import AdmissionTimeout, Unsupported
from dsec.spec.sandbox import GIB


async def test_sandboxes_wait_for_memory_that_calls_may_take(tmp_path: Path) -> None:
    kit = Kit(tmp_path, config=EdgeConfig(memory_overcommit=1.0))
    kit.room.memory = 4 * GIB
    async with kit.edge() as edge:
        with pytest.raises(Unsupported, match="promises at most"):
            edge.promise(5 * GIB)
        edge.promise(3 * GIB)
        with pytest.raises(AdmissionTimeout, match="promised"):
            await edge.create(spec(memory_bytes=2 * GIB), project="p", deadline_s=0.02)
        waiting = asyncio.ensure_future(edge.create(spec(memory_bytes=2 * GIB), project="p"))
        await until(lambda: edge.node().queued == 1)
        edge.promise(-3 * GIB)  # lets it in at once
        await waiting
        assert edge.node().memory_committed_bytes == 2 * GIB

"""The filler's control socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dsec.store.lazy.control import Control


def test_a_filler_that_ends_while_somebody_is_connected_writes_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def call(name: str, layer: str) -> dict[str, Any]:
        return {}

    async def live() -> None:
        await Control(call).serve(tmp_path / "socket")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        writer.write(b'{"id": 1, "call": "status"}\n')
        assert await reader.readline() == b'{"id":1,"ok":{}}\n'

    asyncio.run(live())
    assert caplog.records == []

"""Tasks are ended also where a cancellation is lost."""

from __future__ import annotations

import asyncio

import pytest

from dsec.tasks import ended


async def test_a_task_that_loses_a_cancellation_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.tasks._AGAIN_S", 0.01)
    lost = 0

    async def work() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost += 1

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await ended([task, None])
    assert task.cancelled()
    assert lost == 1


async def test_how_they_ended_is_nobodys_business() -> None:
    async def fail() -> None:
        raise ValueError

    failed = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await ended([failed])
    await ended([])
    assert isinstance(failed.exception(), ValueError)

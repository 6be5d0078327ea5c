"""Guests that say nothing more: no caller waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edge_kit import PATIENCE_S, Kit, finish, spec, until

from dsec.edge.config import EdgeConfig
from dsec.errors import SandboxEnded
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecSpec, State


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path, config=EdgeConfig(silence_s=0.5))


async def test_a_guest_that_keeps_no_time_limit_and_says_nothing_is_its_sandboxs_end(kit: Kit) -> None:
    async with kit.edge() as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        command = await edge.exec(box, ExecSpec(argv=["sleep", "1000"], command_timeout_s=0.2))
        await command.started()
        kit.host.guests[box].fall_silent()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(SandboxEnded, match="said nothing") as caught:
                await finish(command)
        assert not caught.value.infra
        await until(lambda: edge.get(box).state is State.ENDED)
        assert edge.get(box).cause is Cause.GUEST_EXITED
        assert not kit.left()


async def test_one_that_has_nothing_to_say_and_one_that_stands_still_go_on(kit: Kit) -> None:
    async with kit.edge() as edge:
        quiet, paused = [(await edge.create(spec(), project="p")).sandbox.id for _ in range(2)]
        for box in (quiet, paused):
            await (await edge.exec(box, ExecSpec(argv=["sleep", "1000"]))).started()
        await (await edge.exec(paused, ExecSpec(argv=["sleep", "1000"], command_timeout_s=0.6))).started()
        await edge.pause(paused)
        for box in (quiet, paused):
            kit.host.guests[box].fall_silent()
        await asyncio.sleep(3)
        assert [edge.get(box).state for box in (quiet, paused)] == [State.RUNNING, State.PAUSED]

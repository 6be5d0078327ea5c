"""What compilers made is shared, and nobody has a hand in what another gets."""

from __future__ import annotations

import asyncio

from dsec.grading.programs import Built, Programs
from dsec.grading.running import Ran
from dsec.grading.tools import PROGRAM
from dsec.spec.causes import Cause
from dsec.spec.judging import Language
from dsec.spec.sandbox import ExecStatus

MADE = Ran(status=ExecStatus(exit_code=0, cause=Cause.EXITED), fetched={PROGRAM: b"made"})
LATE = Ran(status=ExecStatus(exit_code=137, cause=Cause.COMMAND_TIMEOUT))


def test_all_that_it_depends_on_is_in_its_name() -> None:
    def key(env: dict[str, str], layers: tuple[str, ...] = ("a", "b"), source: bytes = b"x") -> str:
        return Programs.key((layers, env), Language.C, source, {})

    same = {key({"A": "1", "B": "2"}), key({"B": "2", "A": "1"})}
    others = [
        key({}),
        key({"A": "1"}),
        key({"A": "1", "B": "3"}),
        key({"A": "1\n", "B": "2"}),
        key({"A": "1", "B": "2"}, ("a",)),
        key({"A": "1", "B": "2"}, ("a", "b", "", "A=1")),
        key({"A": "1", "B": "2"}, source=b"y"),
    ]
    assert len(same) == 1
    assert len({*same, *others}) == 1 + len(others)


async def test_anothers_limit_is_not_mine() -> None:
    """Who joins what somebody else has made, with a short time limit, has it made again where that struck."""
    programs = Programs()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hasty() -> Ran:
        begun.set()
        await go_on.wait()
        return LATE

    async def patient() -> Ran:
        return MADE

    first = asyncio.create_task(programs.get("key", hasty))
    await begun.wait()
    second = asyncio.create_task(programs.get("key", patient))
    await asyncio.sleep(0)
    go_on.set()
    hurried, mine = await first, await second
    assert (hurried.program, hurried.ran.status.cause) == (None, Cause.COMMAND_TIMEOUT)
    assert (mine.program, mine.fresh) == (b"made", True)
    again: Built = await programs.get("key", hasty)
    assert (again.program, again.fresh) == (b"made", False)

"""What the case scripts share: they run in a process with E2B's client alone, one function a case, and write a JSON
line for each: its name, and what went wrong with it."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback

from e2b import AsyncSandbox, Sandbox

PATIENCE_S = 120.0


def until(condition, what):
    """Wait, bounded."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def raises(kind, work, words=""):
    """The error that `work` raises, which is of this kind and holds these words."""
    try:
        work()
    except kind as error:
        found = error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert words in str(found), f"{words!r} is not in {found}"
    return found


async def until_async(condition, what):
    """Wait, bounded."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


async def raises_async(kind, work, words=""):
    """The error that awaiting `work` raises."""
    try:
        await work
    except kind as error:
        found = error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert words in str(found), f"{words!r} is not in {found}"
    return found


def run(module):
    """Run the cases of a script, those that its arguments name or all. A case whose argument is `box` gets a
    sandbox."""
    asyncio.run(_run(module))


async def _run(module):
    for name, case in list(module.items()):
        if not name.startswith("case_") or (sys.argv[1:] and name not in sys.argv[1:]):
            continue
        wants_box = next(iter(inspect.signature(case).parameters)) == "box"
        began = time.monotonic()
        wrong = None
        try:
            if inspect.iscoroutinefunction(case):
                box = await AsyncSandbox.create() if wants_box else None
                try:
                    await case(box)
                finally:
                    if box is not None:
                        await box.kill()
            else:
                await asyncio.to_thread(_sync, case, wants_box)
        except BaseException:  # noqa: BLE001 (reported)
            wrong = traceback.format_exc()
        sys.stdout.write(json.dumps({"case": name, "wrong": wrong, "s": round(time.monotonic() - began, 2)}) + "\n")
        sys.stdout.flush()


def _sync(case, wants_box):
    box = Sandbox.create() if wants_box else None
    try:
        case(box)
    finally:
        if box is not None:
            box.kill()

"""A lane and a run in it, from asking for a jail until all is given back, whatever becomes of the call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from dsec.backends.fncall.jail import FunctionJail
from dsec.backends.fncall.lane import Lane
from dsec.backends.fncall.pool import Jails, Key
from dsec.backends.fncall.run import Run
from dsec.errors import CreateFailed
from dsec.spec.functions import FunctionLimits


class Calling(NamedTuple):
    """What a call holds."""

    jail: FunctionJail
    lane: Lane
    run: Run


@asynccontextmanager
async def calling(
    jails: Jails, key: Key, payload: bytes, limits: FunctionLimits, *, answers: bool, fds: Sequence[int] = ()
) -> AsyncIterator[Calling]:
    """Begin a call; see `Run`. Raises as `Jails.use`, and `CreateFailed` where the host refuses it: it didn't begin
    then."""
    jail = await jails.use(key)
    try:
        lane = await jail.take()
        try:
            try:
                run = Run(lane, payload, limits, answers=answers, fds=fds)
            except OSError as error:
                raise CreateFailed(f"the host refused a call: {error}", remedy="Try again.") from error
            try:
                yield Calling(jail, lane, run)
            finally:
                run.stop()
        finally:
            jail.give(lane)
    finally:
        jails.left(jail)

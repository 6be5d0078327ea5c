"""Requests for creations under way in one apiserver, and their records.

Invariant: where a request with a key (or a name) goes is on record in the bucket `dsec_made` before anything of it is
sent; whoever decides about it has written the record's last revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dsec.cluster.bus import Bucket
from dsec.cluster.wire import Made
from dsec.edge.client import Principal
from dsec.errors import Conflict
from dsec.plan.scheduler import Failure, Order, Part


class Taken(Exception):
    """Another apiserver decides about this request now."""


class Known(Exception):
    """There is a record of this request already, and nothing of it was sent from here."""


class Job:
    """A request in the scheduler, its record, and what may be where."""

    def __init__(self, principal: Principal, name: str | None, revision: int, record: Made) -> None:
        self.principal = principal
        self.name = name
        self.revision = revision
        """0: its record is still to be made."""
        self.record = record
        self.ticket = 0
        self.doubt = {part.edge for part in record.parts}
        """Edges to which something was sent that may have arrived: that they can't be reached proves nothing."""
        self.repeated = bool(record.parts)
        """What it asks for may be there, and have moved since."""
        self.lock = asyncio.Lock()
        self.wanting: list[Part] = []
        """To be put on record."""
        self.broken: Exception | None = None
        """Why nothing more of it goes on record here."""
        self.order: Callable[[Order], Awaitable[None]]
        self.failed: Callable[[Failure], None]
        self.tasks: set[asyncio.Task[None]] = set()


class Records:
    """For the event loop."""

    def __init__(self, made: Bucket[Made], instance: str) -> None:
        self._made = made
        self._instance = instance

    def unwritten(self, principal: Principal, name: str | None, digest: str) -> Job:
        """A job without a record yet: most keys are new, and then one write says both that it is ours and where it
        goes."""
        return Job(principal, name, 0, Made(digest=digest, owner=self._instance))

    async def own(self, principal: Principal, name: str | None, digest: str, *, named: bool) -> Job:
        """A job whose record says that this apiserver decides. Raises `Conflict` where the key was for something else,
        `Unavailable`."""
        new = Made(digest=digest, owner=self._instance)
        if name is None:
            return Job(principal, None, 0, new)
        revision = 0
        while True:
            done = await self._made.put_if(name, revision, new)
            if done is not None:
                return Job(principal, name, done, new)
            revision, there = await self._made.get(name)
            if there is not None:
                if there.digest != digest and not named:
                    raise Conflict(
                        "the key was used for a different request",
                        remedy="A key goes with one request; use a new one.",
                    )
                new = Made(digest=digest, owner=self._instance, parts=there.parts)

    async def note(self, job: Job, part: Part) -> None:
        """Put on record where a part goes, with all others that wait for it. Raises `Taken`, `Known`, `Unavailable`;
        then nothing of the job may be sent that wasn't on record before."""
        if job.name is None:
            return
        async with job.lock:
            if job.broken is not None:
                raise job.broken
            if part not in job.wanting:
                return  # one before wrote it too
            new, job.wanting = job.wanting, []
            begins = {each.first for each in new}
            parts = (*(each for each in job.record.parts if each.first not in begins), *new)
            record = Made(digest=job.record.digest, owner=self._instance, parts=parts)
            try:
                revision = await self._made.put_if(job.name, job.revision, record)
                if revision is None:
                    raise Taken if job.revision else Known
            except Exception as error:
                job.broken = error
                raise
            job.revision, job.record = revision, record

"""The sandboxes of deleted projects: they end with their project, also on nodes that couldn't be reached then.

Invariant: what a node reports of a deleted project is ended, by every apiserver, until there is nothing of it: its keys
are refused, but tokens of its sandboxes would be good for as long as those live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from dsec.cluster.fanout import Fanout
from dsec.cluster.nodes import Nodes
from dsec.cluster.wire import Member
from dsec.edge.client import Page, Principal
from dsec.errors import DsecError
from dsec.plan.iam import below
from dsec.tasks import ended

LOOK_S = 15.0
log = logging.getLogger("dsec.cluster")
_encode = msgspec.json.Encoder().encode
_page = msgspec.json.Decoder(Page).decode


class Endings:
    """For the event loop."""

    def __init__(self, nodes: Nodes, fanout: Fanout, deleted: Callable[[str], bool]) -> None:
        """`deleted`: whether a project, or one above it, is."""
        self._nodes = nodes
        self._fanout = fanout
        self._deleted = deleted
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look(), name="endings")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    async def end(self, project: str, known: Sequence[str]) -> None:
        """End all sandboxes of a project and of those below it: of `known` ones, and of those that nodes tell of; what
        is under way still is ended when it is told of. Raises `Unavailable` where a node doesn't answer; the others'
        are ended then too, and its when it is back."""
        ended = await asyncio.gather(
            *(self._end_at(member, {project, *known, *self._told(member, project)}) for member in self._nodes.alive()),
            return_exceptions=True,
        )
        for each in ended:
            if isinstance(each, BaseException):
                raise each

    def _told(self, member: Member, top: str) -> list[str]:
        """Projects at or below one of which a node tells."""
        report = self._nodes.scheduler.watch.report(member.claim.edge)
        return [each for each in (report.projects if report is not None else ()) if below(each, top)]

    async def _end_at(self, member: Member, projects: Iterable[str]) -> None:
        """Raises `Unavailable`."""
        for project in projects:
            who = Principal(project)
            asked: set[str] = set()  # what takes longer to end is no reason to ask on and on
            while True:
                states = "state=queued&state=starting&state=running&state=paused"
                answer = await self._fanout.whole(member, "GET", f"/v1/sandboxes?limit=1000&{states}", who)
                ids = [each.id for each in _page(answer).sandboxes if each.id not in asked]
                if not ids:
                    break
                asked.update(ids)
                await self._fanout.whole(member, "POST", "/v1/sandboxes:delete", who, _encode({"ids": ids}))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(DsecError):
                for member in self._nodes.alive():
                    await self._look_at(member)

    async def _look_at(self, member: Member) -> None:
        report = self._nodes.scheduler.watch.report(member.claim.edge)
        left = [each for each, live in report.projects.items() if live and self._deleted(each)] if report else []
        if left:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._end_at(member, left)
            except (DsecError, TimeoutError, msgspec.MsgspecError) as error:
                log.warning("ending what edge %d has of deleted projects: %s", member.claim.edge, error)

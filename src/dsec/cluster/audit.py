"""The audit stream: who changed which right, and who was refused one.

Owns the stream `dsec_audit`, replicated and on disk. Invariant: what changes rights is answered after its entry is
acknowledged by the stream; what was refused is noted without waiting, at most so many a second, so that who is refused
can't fill it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import msgspec
from msgspec import Struct

from dsec.cluster.bus import Bus, Log
from dsec.errors import Unavailable
from dsec.plan.iam import below

STREAM = "dsec_audit"
KEPT_S = 30 * 86400.0
KEPT_BYTES = 1 << 30
REFUSALS_PER_S = 50
REFUSALS = 400_000
"""Most that are kept: who is refused again and again doesn't wash out what was done."""
TOPICS = 64
"""Among which what was done is spread, so that the bound of refusals never is one of it."""
log = logging.getLogger("dsec.cluster")


class AuditEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was done, or refused."""

    number: int = 0
    """Its place in the stream; given when it is read."""
    at: float
    what: str
    """`key.create`, `key.revoke`, `key.rotate`, `role.grant`, `role.revoke`, `project.create`, `project.change`,
    `project.delete`, `node.cordon`, `node.uncordon`, `refused`."""
    project: str
    about: str = ""
    """The key's id, the role's id, the project, the node, or the path of a call that was refused."""
    by: str
    """The principal, or `key:` and the id of a key that has none."""
    details: dict[str, Any] = {}


class Audit:
    """For the event loop."""

    def __init__(self, entries: Log) -> None:
        self._entries = entries
        self._tasks: set[asyncio.Task[None]] = set()
        self._second = 0
        self._refused = 0

    @staticmethod
    async def open(bus: Bus, replicas: int) -> Audit:
        """Raises `Unavailable`."""
        return Audit(
            await bus.log(
                STREAM, "dsec.audit", replicas=replicas, kept_s=KEPT_S, kept_bytes=KEPT_BYTES, kept_each=REFUSALS
            )
        )

    async def note(self, what: str, *, by: str, project: str, about: str = "", **details: Any) -> None:
        """On record when this returns. Raises `Unavailable`."""
        entry = AuditEntry(at=time.time(), what=what, project=project, about=about, by=by, details=details)
        await self._entries.append(entry, "refused" if what == "refused" else f"done.{secrets.randbelow(TOPICS)}")

    def refused(self, *, by: str, project: str, about: str, verb: str) -> None:
        """Somebody was refused something."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._refused = second, 0
        self._refused += 1
        if self._refused <= REFUSALS_PER_S:
            task = asyncio.ensure_future(self._note_quietly(by, project, about, verb))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _note_quietly(self, by: str, project: str, about: str, verb: str) -> None:
        try:
            await self.note("refused", by=by, project=project, about=about[:300], verb=verb)
        except Unavailable as error:
            log.warning("audit: %s", error)

    async def read(self, project: str | None, after: int, limit: int) -> tuple[list[AuditEntry], int]:
        """Entries of a project and those below it (None: of all), oldest first, and the number to go on from. Raises
        `Unavailable`."""
        found: list[AuditEntry] = []
        while len(found) < limit:
            some = await self._entries.read(after, limit)
            if not some:
                break
            for number, data in some:
                after = number
                entry = msgspec.json.decode(data, type=AuditEntry)
                if project is None or below(entry.project, project):
                    found.append(msgspec.structs.replace(entry, number=number))
                if len(found) == limit:
                    break
        return found, after

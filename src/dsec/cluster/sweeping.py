"""Records of moved sandboxes (`moves.py`) that lead nowhere any more are taken out.

Every apiserver looks through all of them now and then. The rule: a record goes when its node, asked, says that it
doesn't have the sandbox, nor keeps word of its end (it then refuses older orders to make it), or is lost; and when the
streams have nothing of the sandbox, of any generation. So nothing can be asked of it that a record would lead to, and
nothing is left to make it anew from: not even an older state, in the node of its id. It is deleted by compare-and-set,
so that one that is just being written again stays.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from random import uniform

import msgspec

from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.handing import PATH, Question, Standing
from dsec.cluster.logs import SHARDS, all_of, shard_of, stream_of
from dsec.cluster.moves import Moved, Moves
from dsec.cluster.nodes import Nodes
from dsec.cluster.upstream import Upstream
from dsec.edge.client import Principal
from dsec.errors import SandboxLost, SandboxNotFound, Unavailable
from dsec.spec.trajectory import RebuildRequest
from dsec.tasks import ended

PAUSE_S = 0.02
"""Between two records: there may be many."""
log = logging.getLogger("dsec.cluster")
_encode = msgspec.json.Encoder().encode
_standing = msgspec.json.Decoder(Standing).decode


class Sweeper:
    """For the event loop."""

    def __init__(  # noqa: PLR0917
        self, bus: Bus, bucket: Bucket[Moved], moves: Moves, nodes: Nodes, upstream: Upstream, every_s: float
    ) -> None:
        """`every_s`: how often all records are looked at, on average."""
        self._bus = bus
        self._bucket = bucket
        self._moves = moves
        self._nodes = nodes
        self._upstream = upstream
        self._every_s = every_s
        self._marks: dict[str, int] = {}
        """What the bucket keeps of records that were deleted here, so that all hear of it; it goes at the next turn."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_on(), name="sweeping")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(self._every_s * uniform(0.5, 1.5))
            with suppress(Unavailable):  # at another time
                for sandbox_id, revision in self._marks.items():
                    await self._bucket.clear(sandbox_id, revision)
                self._marks.clear()
            for sandbox_id in self._moves.known():
                with suppress(Unavailable):
                    await self._look(sandbox_id)
                await asyncio.sleep(PAUSE_S)

    async def _look(self, sandbox_id: str) -> None:
        revision, record = await self._bucket.get(sandbox_id)
        if record is None or await self._has(sandbox_id, record):
            return
        if await self._bus.has(stream_of(shard_of(sandbox_id, SHARDS)), all_of(sandbox_id, SHARDS)):
            return
        mark = await self._bucket.delete_if(sandbox_id, revision)
        if mark is not None:
            self._marks[sandbox_id] = mark
            log.info("sandbox %s, which moved to edge %d, is long over: its record goes", sandbox_id, record.edge)

    async def _has(self, sandbox_id: str, record: Moved) -> bool:
        """Whether its node has it, or may have it. Raises `Unavailable`."""
        try:
            member = await self._nodes.find(record.edge, sandbox_id)
        except (SandboxLost, SandboxNotFound):  # or it was taken out of the cluster
            return False
        question = Question(request=RebuildRequest(sandbox=sandbox_id), generation=record.generation)
        target = f"{PATH}/{sandbox_id}/standing"
        status, body = await self._upstream.json(member, "POST", target, Principal(""), _encode(question))
        try:
            return status != 200 or _standing(body).standing != "gone"
        except msgspec.MsgspecError:
            return True

"""An edge's place in its cluster: its claim, its heartbeats, whom it believes.

Invariants: it serves only under a claim that no watcher has fenced, as far as it can know, and takes no word of an
apiserver that names another incarnation; what was declared lost is ended before the next claim is served; the
incarnation is on disk only after that. What it holds survives it: on disk is `cluster.json` with the last incarnation.
Apiservers say every few seconds whom they hear, and a node that isn't told so for longer asks: a NATS server that lost
the others takes all and passes nothing on, so that it goes to another one before it is declared lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from dsec.cluster.bus import Bus
from dsec.cluster.wire import HEARD, Asserted, Heard, Heartbeat, Join, Joined, Ping, RunNews, verify
from dsec.edge.client import NodeInfo, Principal
from dsec.edge.clustered import Counts
from dsec.edge.context import CHARGED_TO
from dsec.errors import Conflict, DsecError, Unavailable
from dsec.kernel.files import replace_file
from dsec.plan.fencing import Claim
from dsec.spec.cluster import NodeFacts, NodeReport, brief
from dsec.spec.runs import RunInfo

BEAT_S = 1.4
"""Two may be missed before a node counts as silent."""
BUSY_BEAT_S = 0.2
SOON_S = 0.1
"""No beat is so soon after another, but for news."""
TOGETHER = 256
"""So many nodes beat at the same moment: what comes together costs servers and apiservers half of what it does alone.
Those of other numbers have a moment of their own, so that no apiserver is busy with all of them at once."""
MOMENTS = 8
ASK_AFTER_S = 5.5
"""A node that was told that it is heard asks after so long; apiservers tell it at half of that (`nodes.py`)."""
HEARD_S = 2.0
UNHEARD = 2
"""So many questions without an answer, and it tries another server."""
END_LOST_S = 120.0
FILE = "cluster.json"
log = logging.getLogger("dsec.cluster")
_encode = msgspec.json.Encoder().encode


class Disk(Struct, frozen=True):
    """`cluster.json`."""

    had: int


class Carried(Protocol):
    """What a membership asks of its edge: `dsec.edge.node.Edge`, or a simulated one."""

    def node(self) -> NodeInfo: ...
    def counts(self) -> Counts: ...
    def hear_run(self, project: str, run: RunInfo) -> None: ...
    async def end_lost(self, timeout_s: float) -> bool: ...


class Membership:
    """One process's membership; `run` until it ends."""

    def __init__(
        self, edge: Carried, bus: Bus, facts: NodeFacts, *, url: str, state: Path, certificate: str = ""
    ) -> None:
        """`url`: where apiservers reach this edge, which shows a `certificate` of this digest there."""
        self.joined: Callable[[Joined], None] = lambda joined: None
        """Called after each join."""
        self.unshipped: Callable[[], int] = lambda: 0
        """How many logs aren't in the cluster to their end."""
        self._certificate = certificate
        self.facts = facts
        self.instance = f"e{facts.edge}-{secrets.token_hex(6)}"
        self.claim: Claim | None = None
        self.draining = False
        self.taken: dict[str, int] = {}
        """Creations taken, by apiserver; `gate.py` counts."""
        self._edge = edge
        self._bus = bus
        self._url = url
        self._path = state / FILE
        self._secret = secrets.token_hex(32)
        self._host = host_of(state)
        self._fenced = asyncio.Event()
        self._details: tuple[object, ...] = ()
        """As they were said last."""
        self._detail_number = 0
        self._asked = False
        """Somebody has to be told them again."""
        self._brief = False
        """Whether the apiservers know reports without them."""
        self._hears = False
        """Whether the apiservers say that they hear it."""
        self._ask_at = 0.0
        self._unheard = 0

    async def run(self) -> None:
        """Join, and go on. Raises `Conflict` where this node's number is another's."""
        subject = f"dsec.edge.{self.facts.edge}"
        await self._join()
        await self._bus.listen(f"{subject}.ping", self._ping)
        await self._bus.listen(f"{subject}.fenced", self._hear_fenced)
        await self._bus.listen(f"{subject}.runs", self._hear_run)
        await self._bus.listen(f"{subject}.tell", self._hear_asked)
        await self._bus.listen(HEARD, self.hear_heard)
        while True:
            await self._beat()
            if self._fenced.is_set():
                self._fenced.clear()
                self.claim = None
                log.warning("this node was declared lost, or another process took its number: joining again")
                await self._join()

    def asserted(self, bearer: str) -> Principal:
        """For whom an apiserver speaks. Raises `Unauthenticated`, `Unavailable` while there is no claim."""
        return self.check(bearer).principal

    def check(self, bearer: str) -> Asserted:
        """The same, and which apiserver."""
        if self.claim is None:
            raise Unavailable("this node is joining its cluster", remedy="Try again in a moment.")
        asserted = verify(bearer, secret=self._secret, incarnation=self.claim.incarnation, now=time.time())
        CHARGED_TO.set(asserted.holder)
        return asserted

    async def _join(self) -> None:
        asked = Join(
            facts=self.facts,
            instance=self.instance,
            host=self._host,
            had=self._had(),
            url=self._url,
            secret=self._secret,
            certificate=self._certificate,
        )
        while True:
            try:
                answer = await self._bus.ask(f"dsec.join.{self.facts.edge}", asked)
                joined = msgspec.json.decode(answer, type=Joined)
            except (DsecError, msgspec.MsgspecError) as error:
                log.warning("joining: %s", error)
            else:
                if joined.claim is not None:
                    break
                if joined.fatal:
                    raise Conflict(joined.error, remedy="Give this node a number and credentials of its own.")
                log.warning("joining: %s", joined.error)
            await asyncio.sleep(1.0)
        await self.accept(joined)

    async def accept(self, joined: Joined) -> None:
        """Serve under this claim from now on."""
        assert joined.claim is not None
        if joined.end_all:
            log.warning("what this node had was declared lost: ending it")
            if not await self._edge.end_lost(END_LOST_S):
                log.error("some sandboxes that were declared lost could not be ended yet")
        replace_file(self._path, _encode(Disk(joined.claim.incarnation)))
        self.claim = joined.claim
        self.taken.clear()
        self._brief = joined.brief
        self._hears = joined.hears
        self.joined(joined)
        log.info("edge %d serves, incarnation %d", self.facts.edge, joined.claim.incarnation)

    async def _beat(self) -> None:
        """One heartbeat, then a pause: a shorter one while sandboxes are made."""
        await self.say()
        said = dict(self.taken)
        deadline = time.monotonic() + until_beat(self.facts.edge, time.time())
        while (left := deadline - time.monotonic()) > 0 and not self._fenced.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fenced.wait(), min(left, BUSY_BEAT_S))
            if said != self.taken or self._asked:
                return

    async def say(self) -> None:
        """One heartbeat, which asks whether it is heard where nobody has said so lately."""
        beat = self.heartbeat()
        subject = f"dsec.beat.{self.facts.edge}"
        if not self._hears or time.monotonic() < self._ask_at:
            await self._bus.publish(subject, beat)
            return
        try:
            await self._bus.ask(subject, beat, HEARD_S)
        except Unavailable:
            self._unheard += 1
            if self._unheard >= UNHEARD:
                self._unheard = 0
                await self._bus.elsewhere()
        else:
            self._is_heard()

    def _is_heard(self) -> None:
        self._unheard = 0
        self._ask_at = time.monotonic() + ASK_AFTER_S

    def heartbeat(self) -> Heartbeat:
        """The next one: brief where nothing of its details is new."""
        report = self.report()
        details = (report.projects, report.runs, report.layers, report.charged)
        same = self._brief and details == self._details and not self._asked
        if not same:
            self._asked = False
            self._details = details
            self._detail_number += 1
        said_now = brief(report) if same else report
        return Heartbeat(said_now, time.time(), self._detail_number, same, self.unshipped())

    def report(self) -> NodeReport:
        """How this node is now."""
        assert self.claim is not None
        node, counts = self._edge.node(), self._edge.counts()
        return NodeReport(
            edge=self.facts.edge,
            instance=self.instance,
            incarnation=self.claim.incarnation,
            live=node.live,
            starting=node.starting,
            queued=node.queued,
            memory_committed_bytes=node.memory_committed_bytes,
            busy=round(min(1.0, os.getloadavg()[0] / (4 * (os.cpu_count() or 1))), 2),
            create_ms=counts.create_ms,
            draining=self.draining,
            projects=counts.projects,
            runs=counts.runs,
            layers=tuple(counts.environments),
            taken=dict(self.taken),
            charged=counts.charged,
        )

    def _had(self) -> int | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Disk).had
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    async def _ping(self, message: Msg) -> None:
        await message.respond(_encode(Ping(self.instance, self._host)))

    async def _hear_fenced(self, message: Msg) -> None:
        """Which incarnation isn't served any more."""
        with contextlib.suppress(msgspec.MsgspecError):
            incarnation = msgspec.json.decode(message.data, type=int)
            if self.claim is not None and incarnation == self.claim.incarnation:
                self._fenced.set()

    async def _hear_asked(self, _: Msg) -> None:
        """Details with the next beat."""
        self._asked = True

    async def hear_heard(self, message: Msg) -> None:
        """Whom an apiserver hears."""
        with contextlib.suppress(msgspec.MsgspecError):
            if msgspec.json.decode(message.data, type=Heard).has(self.facts.edge):
                self._is_heard()

    async def _hear_run(self, message: Msg) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            news = msgspec.json.decode(message.data, type=RunNews)
            self._edge.hear_run(news.project, news.run)


async def keep_member(member: Membership, failed: Callable[[BaseException], Awaitable[None]]) -> None:
    """Run it until it is cancelled; `failed` is told why it can't go on."""
    try:
        await member.run()
    except Exception as error:  # noqa: BLE001 (a node that serves and says nothing is worse than one that ends)
        await failed(error)


def until_beat(edge: int, now: float) -> float:
    """Seconds until a node's next moment to beat, at `now` of its wall clock: the same for all whose clocks are right,
    and whatever a clock says at most `SOON_S` more than `BEAT_S` away."""
    moment = edge // TOGETHER % MOMENTS * BEAT_S / MOMENTS
    left = BEAT_S - (now - moment) % BEAT_S
    return left if left > SOON_S else left + BEAT_S


def host_of(state: Path) -> str:
    """This machine and its boot, and the state directory: a lock on it says that no other process is this node."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat(state).st_dev}:{os.stat(state).st_ino}"  # noqa: PTH116

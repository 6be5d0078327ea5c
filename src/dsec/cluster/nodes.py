"""The nodes as an apiserver knows them: their records, their reports, who is lost.

Soft state over one bucket (`dsec_members`, a record a node): an apiserver that starts follows it and hears the next
reports. Any apiserver answers a join and fences; each is a compare-and-set on the node's record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from msgspec.structs import replace
from nats.aio.msg import Msg

from dsec.cluster.asking import KVM
from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.logs import SHARDS
from dsec.cluster.wire import HEARD, Heard, Heartbeat, Join, Joined, Member, Ping
from dsec.edge.specs import lacks_features
from dsec.errors import Conflict, DsecError, NotFound, SandboxLost, SandboxNotFound, Unavailable, Unsupported
from dsec.plan.fencing import Return, claim, fence, serves
from dsec.plan.iam import below
from dsec.plan.scheduler import Scheduler
from dsec.plan.watch import Health, Verdict
from dsec.spec.cluster import NodeFacts, NodeReport, filled, sane_facts
from dsec.tasks import ended

TICK_S = 1.0
PULSE_S = 2.7
"""Between two words of who is heard, of whichever apiserver: one that has heard another's says nothing itself."""
QUIET_S = 4.0
"""A node that wasn't heard for so long isn't named there."""
PING_S = 0.5
ABSENT_S = 2.0
log = logging.getLogger("dsec.cluster")
_encode = msgspec.json.Encoder().encode
_heartbeat = msgspec.json.Decoder(Heartbeat).decode


def said_facts(facts: NodeFacts) -> NodeFacts:
    """Of a node of the release before, which names no features: whether its machines run by KVM is its to say."""
    return facts if facts.features else replace(facts, features=(KVM,))


class Nodes:
    """For the event loop."""

    def __init__(self, bus: Bus, members: Bucket[Member], scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.changed: Callable[[], None] = lambda: None
        """Called when there may be room that there wasn't."""
        self.arrived: Callable[[Member], None] = lambda member: None
        """Called when an edge serves under a new claim."""
        self.lost: Callable[[int], None] = lambda edge: None
        """Called when an edge's incarnation is lost, or its record is gone."""
        self.sound: Callable[[], bool] = lambda: True
        """Whether this server has a majority of NATS servers behind it: else to be heard by it is worth nothing."""
        self.ready = asyncio.Event()
        """All records are known."""
        self._bus = bus
        self._members = members
        self._known: dict[int, Member] = {}
        self._skew: dict[int, float] = {}
        self.unshipped: dict[int, int] = {}
        """By edge: logs that would be lost with it, in part."""
        self._said: dict[int, tuple[str, int, NodeReport]] = {}
        """Whose details, and which of them, the last report of an edge had; and that report, as it came."""
        self._absent: dict[int, float] = {}
        """Numbers that were looked up in vain, and until when that counts; at most as many as there are numbers."""
        self._pulsed_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen, and follow the records."""
        await self._bus.listen("dsec.beat.*", self._beat)
        await self._bus.listen("dsec.join.*", self._join, group="join")
        await self._bus.listen(HEARD, self._hear_pulse)
        self._tasks = [
            asyncio.create_task(self._members.follow(self._changed, self.ready.set), name="members"),
            asyncio.create_task(self._tick(), name="watch"),
        ]

    async def close(self) -> None:
        """Idempotent."""
        await ended(self._tasks)

    # --- what is known ----------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """All, by number. Raises `Unavailable` before they are known."""
        if not self.ready.is_set():
            raise Unavailable("this server has just begun to learn about the cluster", remedy="Try again.")
        return [self._known[edge] for edge in sorted(self._known)]

    def alive(self) -> list[Member]:
        """Those that aren't lost, by number. Raises `Unavailable` before they are known."""
        return [member for member in self.members() if not member.claim.lost]

    def health(self, edge: int) -> Health:
        return self.scheduler.watch.health(edge) or Health.SILENT

    def member(self, edge: int, what: str) -> Member:
        """Where an edge is. Raises `SandboxNotFound` (of `what`) for a number that never joined, `SandboxLost` where
        the node is lost."""
        found = self._known.get(edge)
        if found is None:
            raise SandboxNotFound(
                f"there is no sandbox {what[:64]}", remedy="Records of ended sandboxes are kept for a day."
            )
        if found.claim.lost:
            raise SandboxLost(
                f"the node of sandbox {what[:64]} was lost",
                remedy="Nothing of it is left. Create it again; this was the platform's fault.",
                cause="node_lost",
            )
        return found

    async def find(self, edge: int, what: str) -> Member:
        """As `member`, for a number that somebody names: a node that has just joined is looked up. Raises `Unavailable`
        too."""
        self.members()
        now = time.monotonic()
        if edge not in self._known and self._absent.get(edge, now) <= now:
            revision, record = await self._members.get(str(edge)) if edge >= 0 else (0, None)
            if record is None:
                self._absent[edge] = now + ABSENT_S
            elif edge not in self._known:
                self._changed(str(edge), record, revision)
        return self.member(edge, what)

    def now_at(self, edge: int) -> float:
        """An edge's wall clock, as far as its reports tell."""
        return time.time() + self._skew.get(edge, 0.0)

    def live_in(self, project: str) -> int:
        """Live sandboxes of a project and those below it, as the last reports say."""
        reports = (self.scheduler.watch.report(edge) for edge in self._known)
        return sum(
            count
            for report in reports
            if report is not None
            for name, count in report.projects.items()
            if below(name, project)
        )

    def with_run(self, project: str, run: str) -> list[int]:
        """Edges that have sandboxes of a run."""
        name = f"{project}\0{run}"
        found = []
        for edge in self._known:
            report = self.scheduler.watch.report(edge)
            if report is not None and name in report.runs:
                found.append(edge)
        return found

    def lacking(self, features: frozenset[str]) -> Unsupported | None:
        """Why no node that isn't lost has all of these features; None where one has."""
        found = [
            frozenset(said_facts(member.facts).features) for member in self._known.values() if not member.claim.lost
        ]
        if any(features <= each for each in found):
            return None
        missing = features.difference(*found)
        if missing:
            return lacks_features(sorted(missing), "no node of the cluster has")
        return lacks_features(sorted(features), "no node of the cluster has at the same time")

    # --- joining ----------------------------------------------------------------------------------------------------

    async def _join(self, message: Msg) -> None:
        try:
            asked = msgspec.json.decode(message.data, type=Join)
            if message.subject != f"dsec.join.{asked.facts.edge}":
                raise Conflict("an edge joins under its own number")
            answer = await self._admit(asked)
        except Conflict as error:
            answer = Joined(error=error.message, fatal=True)
        except (DsecError, msgspec.MsgspecError) as error:
            answer = Joined(error=str(error))
        await message.respond(_encode(answer))

    async def _admit(self, asked: Join) -> Joined:
        edge = asked.facts.edge
        revision, record = await self._members.get(str(edge))
        alive = record is not None and record.claim.instance != asked.instance and await self._answers(edge)
        new, how = claim(
            record.claim if record is not None else None,
            edge=edge,
            instance=asked.instance,
            host=asked.host,
            had=asked.had,
            alive=alive,
            free=asked.free,
        )
        member = Member(
            claim=new,
            facts=sane_facts(asked.facts),
            url=asked.url,
            secret=asked.secret,
            certificate=asked.certificate,
            cordoned=record.cordoned if record is not None else False,
        )
        if await self._members.put_if(str(edge), revision, member) is None:
            raise Unavailable("its record changed meanwhile")
        log.info("edge %d joins at %s: incarnation %d, %s", edge, asked.url, new.incarnation, how.value)
        return Joined(claim=new, end_all=how is Return.END_ALL, shards=SHARDS, brief=True, hears=True)

    async def _answers(self, edge: int) -> bool:
        """Whether a process serves as this edge now."""
        try:
            await self._bus.ask(f"dsec.edge.{edge}.ping", Ping(), PING_S)
        except Unavailable:
            return False
        return True

    # --- watching ---------------------------------------------------------------------------------------------------

    def _changed(self, key: str, member: Member | None, _: int) -> None:
        if member is None:
            known = self._known.pop(int(key), None)
            if known is not None:
                self.scheduler.lost(known.claim.edge)
                self.scheduler.watch.forget(known.claim.edge)
                self.lost(known.claim.edge)
            return
        edge = member.claim.edge
        known = self._known.get(edge)
        self._known[edge] = member
        if known is None or known.claim.incarnation != member.claim.incarnation:
            self.scheduler.join(said_facts(member.facts), replace(member.claim, lost=False), time.monotonic())
            self.arrived(member)
        if member.claim.lost and (known is None or not known.claim.lost):
            log.warning("edge %d is lost", edge)
            self.scheduler.lost(edge)
            self.lost(edge)
        self.scheduler.placer.cordon(edge, member.cordoned)
        self.changed()

    async def _beat(self, message: Msg) -> None:
        try:
            beat = _heartbeat(message.data)
        except msgspec.MsgspecError as error:
            log.warning("a report that can't be read at %s: %s", message.subject, error)
            return
        report = beat.report
        if message.subject != f"dsec.beat.{report.edge}":
            log.warning("edge %d speaks at %s", report.edge, message.subject)
            return
        known = self._known.get(report.edge)
        if known is None or known.claim.incarnation < report.incarnation:
            return  # its record is on its way
        if not serves(known.claim, report.incarnation):
            await self._bus.publish(f"dsec.edge.{report.edge}.fenced", report.incarnation)
            return
        if message.reply and self.sound():
            await self._bus.publish(message.reply, None)
        edge, now, said = report.edge, time.monotonic(), self._said.get(report.edge)
        self._said[edge] = (report.instance, beat.details, report)
        self._skew[edge] = beat.now - time.time()
        self.unshipped[edge] = beat.unshipped
        if beat.brief:
            last = self.scheduler.watch.report(edge)
            if last is None or said is None or said[:2] != (report.instance, beat.details):
                del self._said[edge]
                await self._bus.publish(f"dsec.edge.{edge}.tell", None)
                return
            if report == said[2] and self.scheduler.again(edge, now):
                return  # most are, where nothing is asked for
            report = filled(report, last)
        self.scheduler.hear(report, now)
        self.changed()

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            self.scheduler.watch.connected(now, self._bus.connected and self.ready.is_set())
            for change in self.scheduler.tick(now):
                if change.verdict is Verdict.FENCE:
                    await self._fence(change.edge)
                else:
                    log.warning("edge %d is silent", change.edge)
            self.changed()
            if now - self._pulsed_at >= PULSE_S and self.ready.is_set() and self.sound():
                self._pulsed_at = now
                await self._bus.publish(HEARD, self.heard(now))
            await asyncio.sleep(TICK_S)

    def heard(self, now: float) -> Heard:
        """Whose beats come here."""
        return Heard.of(edge for edge in self._known if self.scheduler.watch.quiet(edge, now) < QUIET_S)

    async def _hear_pulse(self, _: Msg) -> None:
        self._pulsed_at = time.monotonic()

    async def _fence(self, edge: int) -> None:
        """Declare what it has lost, unless another has, or it has joined anew."""
        known = self._known.get(edge)
        if known is None:
            return
        try:
            revision, record = await self._members.get(str(edge))
            lost = fence(record.claim, known.claim.incarnation, time.time()) if record is not None else None
            if record is not None and lost is not None:
                await self._members.put_if(str(edge), revision, replace(record, claim=lost))
        except Unavailable as error:
            log.warning("fencing edge %d: %s", edge, error)

    async def cordon(self, edge: int, cordoned: bool) -> Member:
        """An operator's word: nothing new goes there. Raises `NotFound`, `Unavailable`."""
        while True:
            revision, record = await self._members.get(str(edge))
            if record is None:
                raise NotFound(f"no node {edge} has joined this cluster", remedy="`dsec node ls` lists them.")
            new = replace(record, cordoned=cordoned)
            if await self._members.put_if(str(edge), revision, new) is not None:
                return new

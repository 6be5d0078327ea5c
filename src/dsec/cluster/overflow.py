"""Nodes for overflow, started and ended by an operator's program (`plan/overflow.py` says when).

One apiserver leads at a time: it renews a record; another takes over when that hasn't changed for `LEAD_S` of its own
clock. What was asked of the hook is on record before it is asked, so that the next leader asks again: the hook has to
be idempotent. It is run as `HOOK start NUMBER` and `HOOK stop NUMBER`, and has the number's node joined or gone for
good when it exits with 0, or will have soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dsec.cluster.bus import Bucket
from dsec.cluster.nodes import Nodes
from dsec.errors import DsecError, InvalidRequest
from dsec.plan.overflow import Machine, Overflow, OverflowPolicy, Phase, Seen, Step
from dsec.tasks import ended

TICK_S = 2.0
LEAD_S = 20.0
ASKED_S = 300.0
"""They are started for requests that may be there, so long after the last one."""
AGAIN_S = 20.0
log = logging.getLogger("dsec.cluster")


class OverflowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that `dsec apiserver --overflow` names."""

    hook: Annotated[str, Meta(pattern="^/")]
    policy: OverflowPolicy
    hook_s: Annotated[float, Meta(gt=0)] = 300.0
    """A hook that takes longer is killed, and asked again later."""


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In the bucket `dsec_overflow`: of a machine by its number, and of the leader as `leader`."""

    phase: Phase | None = None
    since: float = 0.0
    """Wall clock."""
    holder: str = ""
    beat: int = 0


def read_overflow(path: Path) -> OverflowConfig:
    """Raises `InvalidRequest`."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=OverflowConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path}: {error}", remedy="docs/DEPLOY.md says what it holds.") from error
    return found


class OverflowKeeper:
    """One apiserver's part in it. For the event loop."""

    def __init__(
        self, config: OverflowConfig, nodes: Nodes, bucket: Bucket[Record], *, instance: str, urls: list[str]
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._bucket = bucket
        self._instance = instance
        self._environment = {**os.environ, "DSEC_JOIN": " ".join(urls)}
        self._overflow = Overflow(config.policy)
        self._records: dict[int, tuple[int, Machine]] = {}
        """With their revisions."""
        self._leader: tuple[int, Record | None, float] = (0, None, time.monotonic())
        """The leader's record, its revision, and when it came."""
        self._leads = False
        self._eligible: tuple[int, float] = (0, float("-inf"))
        self._hooks: dict[int, asyncio.Task[None]] = {}
        self._done: dict[int, Machine] = {}
        """What the hook has answered with 0 for."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Follow the records, and look after the machines while this one leads."""
        ready = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._bucket.follow(self._changed, ready.set), name="overflow records"),
            asyncio.create_task(self._run(ready), name="overflow"),
        ]

    async def close(self) -> None:
        """Idempotent. Hooks that run are killed; the next leader asks again."""
        await ended([*self._tasks, *self._hooks.values()])

    def _changed(self, key: str, record: Record | None, revision: int) -> None:
        if key == "leader":
            self._leader = (revision, record, time.monotonic())
        elif record is None or record.phase is None:
            self._records.pop(int(key), None)
        else:
            self._records[int(key)] = (revision, Machine(int(key), record.phase, record.since))

    async def _run(self, ready: asyncio.Event) -> None:
        await ready.wait()
        while True:
            try:
                await self._lead()
                if self._leads and self._nodes.ready.is_set():
                    await self._look()
            except DsecError as error:
                self._leads = False
                log.warning("overflow: %s", error)
            await asyncio.sleep(TICK_S)

    async def _lead(self) -> None:
        """Renew the lead, or take it where nobody does."""
        revision, record, at = self._leader
        if record is not None and record.holder != self._instance and time.monotonic() - at < LEAD_S:
            self._leads = False
            return
        beat = record.beat + 1 if record is not None else 0
        own = await self._bucket.put_if("leader", revision, Record(holder=self._instance, beat=beat)) is not None
        if own and not self._leads:
            log.info("this apiserver looks after nodes for overflow")
            self._done.clear()
        self._leads = own

    async def _look(self) -> None:
        scheduler, now = self._nodes.scheduler, time.monotonic()
        if scheduler.eligible != self._eligible[0]:
            self._eligible = (scheduler.eligible, now)
        members = self._nodes.alive()
        loads = scheduler.placer.loads()
        seen, capacities = {}, []
        for member in members:
            edge = member.claim.edge
            capacities.append(member.facts.memory_capacity_bytes)
            report = scheduler.watch.report(edge)
            if edge in self._records and (edge in loads or self._records[edge][1].phase is not Phase.STARTING):
                seen[edge] = Seen(report.live if report is not None else 0, loads.get(edge, 0.0))
        burst = {member.claim.edge for member in members if member.facts.labels.get("burst") == "true"}
        steps = self._overflow.decide(
            time.time(),
            [machine for _, machine in self._records.values()],
            others=[load for edge, load in loads.items() if edge not in burst and edge not in self._records],
            seen=seen,
            waiting=scheduler.waiting_bytes() * len(capacities) / max(1, sum(capacities)),
            asked=now - self._eligible[1] < ASKED_S,
        )
        for step in steps:
            await self._take(step)
        for _, machine in list(self._records.values()):
            busy = machine.edge in self._hooks or self._done.get(machine.edge) == machine
            if machine.phase in (Phase.STARTING, Phase.STOPPING) and not busy:
                task = asyncio.create_task(self._ask(machine), name=f"overflow hook for {machine.edge}")
                self._hooks[machine.edge] = task

    async def _take(self, step: Step) -> None:
        """Put it on record; the hook is asked for what is there."""
        known = self._records.get(step.edge)
        if known is not None and step.phase in (Phase.EMPTYING, Phase.RUNNING):
            await self._nodes.cordon(step.edge, step.phase is Phase.EMPTYING)
        revision = known[0] if known is not None else (await self._bucket.get(str(step.edge)))[0]
        record = Record(phase=step.phase, since=time.time())
        new = await self._bucket.put_if(str(step.edge), revision, record)
        if new is not None:
            self._changed(str(step.edge), record, new)
            log.info("overflow: edge %d is %s: %s", step.edge, step.phase.value, step.why)

    async def _ask(self, machine: Machine) -> None:
        """Ask the hook for a machine; again later where it fails."""
        edge, verb = machine.edge, "start" if machine.phase is Phase.STARTING else "stop"
        try:
            said = await self._call(verb, edge)
            if said:
                log.error("overflow: the hook could not %s edge %d: %s", verb, edge, said)
                await asyncio.sleep(AGAIN_S)
                return
            self._done[edge] = machine
            if verb == "stop":
                with contextlib.suppress(DsecError):
                    await self._bucket.delete(str(edge))
        finally:
            del self._hooks[edge]

    async def _call(self, verb: str, edge: int) -> str:
        """Run the hook: "", or why it failed. What it leaves running may hold its output."""
        with tempfile.TemporaryFile() as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    self._config.hook,
                    verb,
                    str(edge),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                return str(error)
            try:
                code = await asyncio.wait_for(process.wait(), self._config.hook_s)
            except TimeoutError:
                return f"it took more than {self._config.hook_s:g} s"
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            if not code:
                return ""
            output.seek(max(0, output.seek(0, os.SEEK_END) - 500))
            return f"exit code {code}: {output.read().decode(errors='replace').strip()}"

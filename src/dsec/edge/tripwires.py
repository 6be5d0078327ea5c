"""The tripwires of a node's sandboxes: armed before a sandbox is handed out, and what a hit leads to.

Owns which sandbox is watched. Invariants: only sandboxes with tripwires cost anything; a hit is in the event log before
its action begins; what an edge did not see while it was away is lost, and the event `tripwires_armed` says from when on
it looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from dsec.channel import files
from dsec.edge.events import Events
from dsec.edge.lookout import Hit, Lookout
from dsec.edge.post import EXPECTED_S, Post
from dsec.edge.sandbox import Sandbox
from dsec.edge.sentry import Sentry
from dsec.edge.tasks import log, quiet
from dsec.edge.told import Told
from dsec.errors import Conflict, CreateFailed, DsecError, FileError
from dsec.kernel.syscalls import KernelError
from dsec.plan.tripwires import Plan, from_outside, from_within, resolve
from dsec.ports import Instance, TellingHost, WatchedHost
from dsec.spec.causes import Cause
from dsec.spec.events import EventType
from dsec.spec.sandbox import PausedBy, SandboxSpec
from dsec.spec.tripwires import Action, TripwireState

AGAIN_S = 1.0
"""So long after it was resumed a rule doesn't pause again: what it was paused in the middle of goes on to its end."""


class Tripwires:
    """For the event loop."""

    def __init__(self, events: Events, key: bytes) -> None:
        """`key`: the node's own; canaries are made of it."""
        self._events = events
        self._key = key
        self._sentry = Sentry()
        self._posts: dict[str, Lookout] = {}
        self._resumed: dict[str, tuple[str, float]] = {}
        self._sandboxes: Mapping[str, Sandbox] = {}
        self._end: Callable[[Sandbox, Cause, str], object] | None = None
        self._pause_it: Callable[[Sandbox, PausedBy, str], asyncio.Future[None]] | None = None
        self._resume_it: Callable[[Sandbox], asyncio.Future[None]] | None = None

    def serve(
        self,
        sandboxes: Mapping[str, Sandbox],
        *,
        end: Callable[[Sandbox, Cause, str], object],
        pause: Callable[[Sandbox, PausedBy, str], asyncio.Future[None]],
        resume: Callable[[Sandbox], asyncio.Future[None]],
    ) -> None:
        """Where the node's sandboxes are, and how one is ended, paused and resumed."""
        self._sandboxes, self._end = sandboxes, end
        self._pause_it, self._resume_it = pause, resume
        self._events.on_refused = self.refused

    async def arm(self, sandbox_id: str, spec: SandboxSpec, instance: Instance, *, fresh: bool) -> None:
        """Put the decoys there and set the marks. `fresh`: nothing of the caller's has run in it. Raises `Unsupported`,
        `CreateFailed`."""
        if not spec.tripwires:
            return
        left_out: list[str] = []
        if isinstance(instance, WatchedHost):
            rules = resolve(spec.tripwires)
        elif isinstance(instance, TellingHost):
            rules, left_out = from_within(spec.tripwires)
        else:
            rules = from_outside(spec.tripwires)
        plan = Plan(rules, home=_home(spec), workdir=spec.workdir)
        canary = self.canary(sandbox_id)
        missing = await self._put_decoys(plan, spec, instance, canary) if fresh else []
        loop = asyncio.get_running_loop()

        def raises(hit: Hit | str) -> None:
            loop.call_soon_threadsafe(self._hit, sandbox_id, hit)

        if isinstance(instance, WatchedHost):
            try:
                post = await asyncio.to_thread(Post, plan, instance.pid, raises)
            except (KernelError, OSError) as error:
                raise CreateFailed(f"its tripwires can't be armed: {error}", remedy="See `dsec doctor`.") from error
            self._posts[sandbox_id] = post
            self._sentry.add(post)
        elif isinstance(instance, TellingHost) and plan.wanted():
            told = Told(plan, raises)
            await instance.look(plan.wanted(), told.hear)
            self._posts[sandbox_id] = told
        else:
            self._posts[sandbox_id] = Lookout(plan, raises)
        data: dict[str, Any] = {"rules": len(plan.rules), "canary": canary}
        if left_out:
            data["not_watched"] = left_out
        if missing:
            data["missing_decoys"] = missing
        self._events.add(sandbox_id, EventType.TRIPWIRES_ARMED, data)

    async def adopt(self, sandbox: Sandbox) -> None:
        """One of an earlier edge. Where it can't be watched any more, the log says so."""
        try:
            await self.arm(sandbox.id, sandbox.record.spec, sandbox.here(), fresh=False)
        except DsecError as error:
            log.warning("sandbox %s: its tripwires are not armed again: %s", sandbox.id, error)
            self._events.add(sandbox.id, EventType.TRIPWIRES_LOST, {"message": error.message})

    @staticmethod
    async def _put_decoys(plan: Plan, spec: SandboxSpec, instance: Instance, canary: str) -> list[str]:
        missing = []
        for path, rule in plan.decoys.items():
            data = rule.content.lstrip("\n").replace("{canary}", canary).encode()
            try:
                await files.write_file(
                    instance.channel,
                    path.encode(),
                    _once(data),
                    user=spec.user,
                    mode=int(rule.mode, 8),
                    parents=True,
                    exclusive=True,
                )
            except FileError as error:
                if error.details.get("errno") != "EEXIST":
                    missing.append(path)
            except DsecError:
                missing.append(path)
        return missing

    def canary(self, sandbox_id: str) -> str:
        """The token in a sandbox's decoys: who shows it anywhere has read one."""
        return hmac.new(self._key, f"canary {sandbox_id}".encode(), hashlib.sha256).hexdigest()[:32]

    def disarm(self, sandbox_id: str) -> None:
        """Its end is decided. Idempotent."""
        post = self._posts.pop(sandbox_id, None)
        self._resumed.pop(sandbox_id, None)
        if isinstance(post, Post):
            self._sentry.remove(post)

    def close(self) -> None:
        """Nothing is watched any more; what is paused stays so. Idempotent."""
        self._posts.clear()
        self._sentry.close()

    # --- hits ---

    def _hit(self, sandbox_id: str, hit: Hit | str) -> None:
        if isinstance(hit, str):
            self._events.add(sandbox_id, EventType.TRIPWIRES_LOST, {"message": hit})
            return
        rule = hit.rule
        data: dict[str, Any] = {
            "rule": rule.id,
            "severity": str(rule.severity),
            "action": str(rule.action),
            "act": hit.act,
            "path": hit.path,
            "at": round(hit.time, 3),
        }
        if rule.what:
            data["what"] = rule.what
        if hit.count > 1:
            data["count"] = hit.count
        if hit.process is not None:
            data["process"] = hit.process
        self._events.add(sandbox_id, EventType.TRIPWIRE, data)
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or sandbox_id not in self._posts:
            return  # it is ending already
        if rule.action == Action.END and self._end is not None:
            self._end(sandbox, Cause.TRIPWIRE, f"rule {rule.id!r}: {hit.act} {hit.path}")
        elif rule.action == Action.PAUSE and _paused_by(sandbox) is None:
            resumed, at = self._resumed.get(sandbox_id, ("", 0.0))
            if resumed != rule.id or time.monotonic() - at > AGAIN_S:
                self._pause(sandbox, rule.id)

    def _pause(self, sandbox: Sandbox, rule_id: str) -> None:
        if self._pause_it is None:
            return
        try:
            quiet(self._pause_it(sandbox, PausedBy.TRIPWIRE, rule_id))
        except DsecError as error:
            log.warning("sandbox %s: it can't be paused: %s", sandbox.id, error)

    def refused(self, sandbox_id: str, name: str) -> None:
        """The network policy refused a connection."""
        post = self._posts.get(sandbox_id)
        if post is not None:
            post.refused(name)

    # --- callers ---

    @contextlib.contextmanager
    def file_call(self, sandbox_id: str, *paths: bytes) -> Iterator[None]:
        """What a caller's file call does is nobody's misbehaviour."""
        post = self._posts.get(sandbox_id)
        if post is None:
            yield
            return
        places = {os.fsdecode(path).rpartition("/")[0] for path in paths}
        for place in places:
            post.expected[place] = float("inf")
        try:
            yield
        finally:
            until = time.monotonic() + EXPECTED_S
            post.expected = {p: t for p, t in post.expected.items() if t > time.monotonic()}
            for place in places:
                post.expected[place] = until

    def resume(self, sandbox: Sandbox) -> TripwireState:
        """Let a paused sandbox go on. Raises `Conflict` where it isn't paused."""
        rule = _paused_by(sandbox)
        if rule is None or self._resume_it is None:
            raise Conflict(f"sandbox {sandbox.id} is not paused by a tripwire")
        quiet(self._resume_it(sandbox))
        self._resumed[sandbox.id] = rule, time.monotonic()
        return self.state(sandbox)

    def state(self, sandbox: Sandbox) -> TripwireState:
        """How its tripwires stand."""
        post = self._posts.get(sandbox.id)
        return TripwireState(
            armed=post is not None,
            paused=_paused_by(sandbox),
            rules=resolve(sandbox.record.spec.tripwires),
            hits=post.hits() if post is not None else {},
        )


def _paused_by(sandbox: Sandbox) -> str | None:
    """The rule that paused it."""
    paused = sandbox.record.paused
    return paused.rule if paused is not None and paused.by is PausedBy.TRIPWIRE else None


def _home(spec: SandboxSpec) -> str:
    return "/root" if spec.user == "root" else f"/home/{spec.user}"


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data

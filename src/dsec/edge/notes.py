"""What an edge writes down of what it does: into a sandbox's logs and into the node's counters, in one call each.

Owns which facts go into which event. On the path of every command: about 2 us for its start and its end together.
"""

from __future__ import annotations

from typing import Any

from dsec.edge.context import REQUEST_ID
from dsec.edge.events import Events
from dsec.edge.sandbox import Sandbox
from dsec.edge.tally import Tally
from dsec.edge.tasks import log
from dsec.edge.trajectory import Trajectories
from dsec.journal.records import Journal, Record
from dsec.ports import Instance
from dsec.spec.causes import Cause
from dsec.spec.events import EventType
from dsec.spec.network import Network
from dsec.spec.sandbox import ExecStatus

_LIMITS = frozenset({Cause.COMMAND_TIMEOUT, Cause.OUTPUT_LIMIT, Cause.MEMORY_LIMIT, Cause.PIDS_LIMIT, Cause.DISK_LIMIT})


class Notes:
    """Events, trajectories and counters of one node."""

    def __init__(self, events: Events, trajectories: Trajectories) -> None:
        self.events = events
        self.trajectories = trajectories
        events.on_event = trajectories.event
        self.tally = Tally()

    async def begin(self, record: Record, *, again: bool = False) -> None:
        """It is about to be made; `again`: perhaps not for the first time. Raises `Unavailable` where that can't be
        written down."""
        self.trajectories.create(record, again=again)
        if record.spec.sync == "always":
            await self.trajectories.settled(record.id)

    async def prune(self, before: float, journal: Journal) -> None:
        """Forget what happened to sandboxes before a time, once they have no record any more."""
        self.events.prune(before)
        await self.trajectories.prune(before, lambda sandbox_id: journal.get(sandbox_id) is not None)

    def created(self, sandbox: Sandbox, instance: Instance, create_s: float, record_s: float) -> None:
        """It runs. An instance may have `phases_s`, the steps of its making."""
        phases: dict[str, float] = {"record": record_s, **getattr(instance, "phases_s", {})}
        self.tally.create.observe(create_s)
        for name, seconds in phases.items():
            self.tally.phase(name, seconds)
        record = sandbox.record
        data: dict[str, Any] = {
            "environment": record.spec.environment,
            "queue_ms": round(record.queue_ms, 3),
            "create_ms": round(create_s * 1e3, 3),
            "phases": {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in phases.items()},
        }
        if sandbox.request_id:
            data["request_id"], sandbox.request_id = sandbox.request_id, ""
        self.events.add(sandbox.id, EventType.CREATED, data)

    def ending(self, sandbox: Sandbox) -> None:
        """Its end is decided, its removal is next."""
        record = sandbox.record
        self.trajectories.end(record)
        data: dict[str, Any] = {"cause": record.cause, "infra": record.cause is not None and record.cause.infra}
        if record.message:
            data["message"] = record.message
        if sandbox.request_id:
            data["request_id"] = sandbox.request_id
        self.events.add(sandbox.id, EventType.ENDING, data)
        log.debug("sandbox %s: ending: %s %s", sandbox.id, record.cause, record.message)

    def ended(self, sandbox: Sandbox, now: float) -> None:
        """Nothing is left of it. `now`: on the monotonic clock."""
        cause = sandbox.record.cause or Cause.NODE_LOST
        removal_s = now - sandbox.ending_at
        self.tally.ends[cause] += 1
        self.tally.removal.observe(removal_s)
        self.events.end(sandbox.id, {"cause": cause, "infra": cause.infra, "removal_ms": round(removal_s * 1e3, 3)})

    def command_started(self, sandbox: Sandbox, key: str, argv0: str, op: int) -> None:
        """The guest was asked to run it as its operation `op`."""
        self.tally.commands += 1
        data = {"command": key, "argv0": argv0[:200], "op": op}
        self.events.add(sandbox.id, EventType.COMMAND_STARTED, _with_request(data))

    def command_ended(self, sandbox: Sandbox, key: str, status: ExecStatus, began: float | None, now: float) -> None:
        """Its result is known; once each. `began`: when it was asked for, None where an earlier edge was."""
        tally, add, cause = self.tally, self.events.add, status.cause
        tally.command_ends[cause] += 1
        tally.output_bytes += status.stdout_bytes + status.stderr_bytes
        if began is not None:
            tally.exec.observe(now - began)
            if sandbox.running_at is not None:
                since_s, sandbox.running_at = now - sandbox.running_at, None
                tally.first_exec.observe(since_s)
                took = {"since_running_ms": round(since_s * 1e3, 3), "exec_ms": round((now - began) * 1e3, 3)}
                add(sandbox.id, EventType.FIRST_EXEC, took)
        if cause in _LIMITS:
            add(sandbox.id, EventType.LIMIT, {"limit": cause, "command": key, "message": status.message})
        data = {
            "command": key,
            "cause": cause,
            "exit_code": status.exit_code,
            "wall_ms": round(status.wall_s * 1e3, 3),
            "stdout_bytes": status.stdout_bytes,
            "stderr_bytes": status.stderr_bytes,
        }
        add(sandbox.id, EventType.COMMAND_ENDED, data)

    def network_changed(self, sandbox_id: str, network: Network, summary: dict[str, Any]) -> None:
        """It may reach this from now on."""
        self.events.add(sandbox_id, EventType.NETWORK, summary)
        self.trajectories.network(sandbox_id, network)

    def file_written(self, sandbox_id: str, path: bytes, size: int) -> None:
        """By a file call; what commands write is not seen."""
        self.tally.written_bytes += size
        self.events.add(sandbox_id, EventType.FILE_WRITTEN, _with_request({"path": _shown(path), "bytes": size}))

    def file_moved(self, sandbox_id: str, path: bytes, to: bytes) -> None:
        self.events.add(sandbox_id, EventType.FILE_MOVED, _with_request({"path": _shown(path), "to": _shown(to)}))

    def file_removed(self, sandbox_id: str, path: bytes, recursive: bool) -> None:
        data = {"path": _shown(path), "recursive": recursive}
        self.events.add(sandbox_id, EventType.FILE_REMOVED, _with_request(data))


def _with_request(data: dict[str, Any]) -> dict[str, Any]:
    request_id = REQUEST_ID.get()
    if request_id:
        data["request_id"] = request_id
    return data


def _shown(path: bytes) -> str:
    """A path in an event: readable, bounded."""
    return path[:1024].decode("utf-8", "replace")

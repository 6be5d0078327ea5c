"""What happened to a sandbox, as the edge saw it from outside: the lines of its event log.

Owns the line's form and the list of types. Invariants: `seq` grows within a sandbox, and a gap in it says that events
were lost or dropped; what a caller chose (names) or an agent (host names and addresses, a tripwire's paths and command
lines) is bounded and made printable. A later log of
whole trajectories keeps this form and adds types.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct


class EventType(StrEnum):
    """What an event can be. A client meets others on a newer server."""

    CREATED = "created"  # queue_ms, create_ms, phases: {record_ms, mount_ms, clone_ms, setup_ms, hello_ms, ...}
    COMMAND_STARTED = "command_started"  # command, argv0, request_id
    COMMAND_ENDED = "command_ended"  # command, cause, exit_code, wall_ms, stdout_bytes, stderr_bytes
    FIRST_EXEC = "first_exec"  # since_running_ms: from running to the first result; exec_ms: the command's own part
    LIMIT = "limit"  # limit (a cause), command, message
    FILE_WRITTEN = "file_written"  # path, bytes
    FILE_MOVED = "file_moved"  # path, to
    FILE_REMOVED = "file_removed"  # path, recursive
    RENEWED = "renewed"  # ttl_s
    NETWORK = "network"  # policy: what it may reach from now on (at most 100 permissions named), permissions: how many
    CONNECTION = "connection"  # one that was allowed, at its end: name, address, port, permission, out, in, ms, reason
    REFUSED = "connection_refused"  # name or address, port, reason, permission; aggregated: count, ports, names
    NAME_REFUSED = "name_refused"  # name: a look-up of one that isn't granted
    GATEWAY = "gateway"  # a request that a gateway answered: permission, method, path, status, bytes
    ADOPTED = "adopted"  # a server that was started again took it over
    TRIPWIRES_ARMED = "tripwires_armed"  # rules, canary, missing_decoys: watched from here on
    TRIPWIRE = "tripwire"  # rule, severity, action, act, path, what, process, count, at
    TRIPWIRES_LOST = "tripwires_lost"  # more happened than could be looked at: hits may be missing
    PAUSED = "paused"  # by, rule (of a tripwire)
    PAGED_OUT = "paged_out"  # before_bytes, after_bytes, compressed_bytes, ms: a pause gave this memory back
    SNAPSHOT = "snapshot"  # name, layer, at (see `ports.Captured.seq`), removed, kept, built_by
    FORKED = "forked"  # children: their ids; or parent, of a child
    CHECKPOINT = "checkpoint"  # name, memory_bytes
    REVERTED = "reverted"  # name: all that happened inside since that checkpoint is undone
    RESUMED = "resumed"  # paused_s, rule
    ENDING = "ending"  # cause, infra, message
    ENDED = "ended"  # cause, infra, removal_ms: nothing of it is left; always last


class SandboxEvent(Struct, frozen=True, omit_defaults=True):
    """One line of a sandbox's event log."""

    seq: int
    """1 for the first of a sandbox."""
    time: float
    """Seconds since the epoch."""
    type: str
    """Mostly one of `EventType`."""
    data: dict[str, Any] = {}

"""Why something ended: the closed list of causes, each with the party that is responsible for it.

Owns: the names. They are stable, appear on the wire, in records and in results, and trainers mask on `infra`.
"""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a command or a sandbox ended. `Cause.infra` says whether the platform is at fault."""

    # commands
    EXITED = "exited"  # by itself, with an exit code
    SIGNALED = "signaled"  # by a signal that came from inside
    START_FAILED = "start_failed"  # the caller named a missing binary, user or directory
    COMMAND_TIMEOUT = "command_timeout"  # its command_timeout_s passed
    OUTPUT_LIMIT = "output_limit"  # it wrote more than output_bytes
    MEMORY_LIMIT = "memory_limit"  # the kernel ended it for memory_bytes
    PIDS_LIMIT = "pids_limit"  # it failed after it was refused another process
    DISK_LIMIT = "disk_limit"  # it failed with the sandbox's disk full
    KILLED = "killed"  # by the caller
    # sandboxes
    DELETED = "deleted"  # by the caller
    TTL = "ttl"  # its ttl_s passed
    IDLE_TTL = "idle_ttl"  # its idle_ttl_s passed
    LEASE_LAPSED = "lease_lapsed"
    SHUTDOWN = "shutdown"  # the server was told to end its sandboxes
    TRIPWIRE = "tripwire"  # a tripwire's action was to end it
    GUEST_EXITED = "guest_exited"  # pid 1 inside ended, by the sandbox's own memory limit or by an agent's doing
    # the platform's fault
    CREATE_FAILED = "create_failed"
    NODE_LOST = "node_lost"  # zygote or machine died
    PLATFORM_KILLED = "platform_killed"  # an operator or the platform ended it
    MOVED = "moved"  # another node has it now, under the same id, or is to have it
    INFRA_IMAGE = "infra_image"  # it failed after files of its environment could not be had, or the node's disk failed
    OUTCOME_UNKNOWN = "outcome_unknown"  # the guest died under a command: it may or may not have run

    @property
    def infra(self) -> bool:
        """True where the platform is at fault, so that the outcome says nothing about the agent."""
        return self in _INFRA


_INFRA = frozenset(
    {
        Cause.CREATE_FAILED,
        Cause.NODE_LOST,
        Cause.PLATFORM_KILLED,
        Cause.MOVED,
        Cause.INFRA_IMAGE,
        Cause.OUTCOME_UNKNOWN,
    }
)

"""Commands and the trajectory of their sandbox: what is written of them, and what is known of those that are over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from dsec.edge.config import EdgeConfig
from dsec.edge.recorded import RecordedCommand
from dsec.edge.recorder import Recorder
from dsec.edge.requests import HALF_KEY, guest_key_of, hash_of
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import quiet
from dsec.edge.trajectory import REUSABLE, Recorded, Trajectories, check_same
from dsec.errors import DsecError, OutcomeUnknown, SandboxEnded, SandboxLost
from dsec.ports import Operation
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecSpec, ExecStatus

if TYPE_CHECKING:
    from dsec.edge.command import Command


class Recording:
    """Used by `Commands`."""

    def __init__(self, trajectories: Trajectories, config: EdgeConfig) -> None:
        self._trajectories = trajectories
        self._config = config

    def begins(self, sandbox: Sandbox, command: Command, spec: ExecSpec) -> None:
        """It is about to be asked for. Raises `Unavailable`: then it must not be."""
        asked = command.asked
        command.entry = self._trajectories.begins(sandbox.id, spec, asked.user, asked.cwd, command.guest_key)

    def watch(self, command: Command, operation: Operation, settle: Callable[[], object]) -> None:
        """Have all of it recorded; `settle` is called when it ends, whoever reads it or not."""

        command.recorder = Recorder(self._config.trajectory_output_bytes, settle)
        operation.watch(command.recorder)

    def refused(self, sandbox: Sandbox, command: Command, error: BaseException) -> None:
        """It didn't start; after `OutcomeUnknown`, or where this edge is stopped, nobody knows."""
        if isinstance(error, DsecError) and not isinstance(error, OutcomeUnknown):
            self._trajectories.refused(sandbox.id, command.entry, command.guest_key, error)

    def result(self, sandbox: Sandbox, command: Command, status: ExecStatus) -> None:
        """Nobody is told of a result that isn't on record. Raises `Unavailable`."""
        self._trajectories.result(sandbox.id, command.entry, command.guest_key, status, command.recorder)
        command.status = status
        command.recorder = None
        if sandbox.record.spec.sync == "always":
            command.durable = self._trajectories.settled(sandbox.id)
            quiet(command.durable)

    def cut(self, sandbox: Sandbox, command: Command) -> None:
        """It is released while it runs, which ends it whole."""
        status = ExecStatus(exit_code=137, cause=Cause.KILLED, signal=9, message="released while it ran")
        with suppress(DsecError):
            self.result(sandbox, command, status)

    def recall(self, sandbox: Sandbox, command: Command, guest_key: bytes) -> None:
        """What an earlier edge wrote down of a command that the guest still has."""
        found = self._trajectories.find(sandbox.id, guest_key[:HALF_KEY])
        if isinstance(found, Recorded):
            command.status, command.key, command.entry = found.status, found.key, found.seq
        elif found is not None:
            command.entry = found

    def find(self, sandbox: Sandbox, key: str, guest_key: bytes | None = None) -> RecordedCommand | None:
        """The result of a key that its guest doesn't know. Raises `Conflict` where it was another request's. An `exec`
        alone never reached the guest: it may run."""
        if key.startswith((REUSABLE, "~")):
            return None
        key_hash = hash_of(key) if guest_key is None else guest_key[:HALF_KEY]
        found = self._trajectories.find(sandbox.id, key_hash)
        if not isinstance(found, Recorded):
            return None
        if guest_key is not None:
            check_same(found, guest_key)
        return RecordedCommand(found)

    def after_end(
        self, sandbox_id: str, error: SandboxEnded | SandboxLost, key: str | None, spec: ExecSpec | None = None
    ) -> RecordedCommand:
        """The result of a key in a sandbox that has ended, else why there is none. Raises `Conflict`, `OutcomeUnknown`,
        `error`."""
        if key is None or key.startswith((REUSABLE, "~")):
            raise error
        found = self._trajectories.find_ended(sandbox_id, key)
        if isinstance(found, Recorded):
            if spec is not None:
                check_same(found, guest_key_of(spec))
            return RecordedCommand(found)
        if found is None or isinstance(error, SandboxEnded):  # nor is what began then the platform's fault
            raise error
        raise OutcomeUnknown(
            f"the command of the key {key!r} had begun when its sandbox was lost: it may or may not have run",
            remedy="The platform is at fault: repeat the work in a fresh sandbox, or rebuild this one.",
            cause=str(error.details.get("cause", "")),
        ) from error

"""Commands in sandboxes: keys, defaults, attaching, statuses.

Owns the table of a sandbox's commands. Invariants: a key starts at most one command, ever: its result is in the
sandbox's trajectory before anybody sees it, and stays there; a caller that goes away stops nothing; an unkeyed command
is released when its reader has seen the end, or by this edge when the reader went away.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from dsec.edge.command import Command
from dsec.edge.config import EdgeConfig
from dsec.edge.lives import Lives
from dsec.edge.outcome import Asked, met_no_limit, status_of
from dsec.edge.quick import QuickCommand, at_once
from dsec.edge.recorded import RecordedCommand
from dsec.edge.recording import Recording
from dsec.edge.requests import HALF_KEY, Environ, check, environ_of, guest_key_of, hash_of, request_of
from dsec.edge.sandbox import Sandbox, ended_error
from dsec.edge.tasks import Tasks, log, quiet
from dsec.errors import Conflict, DsecError, NotFound, OutcomeUnknown, Unavailable
from dsec.ports import Clock, Usage
from dsec.spec.operations import Chunk, Kind, OpRequest
from dsec.spec.sandbox import ExecSpec, ExecStatus, ProcessInfo

_USAGE_FRESH_S = 1.0


class RunningCommand:
    """A caller's hold on a command: `dsec.edge.client.Execution`."""

    __slots__ = ("_command", "_commands", "_sandbox", "attached")

    def __init__(self, commands: Commands, sandbox: Sandbox, command: Command, attached: bool) -> None:
        self._commands = commands
        self._sandbox = sandbox
        self._command = command
        self.attached = attached

    @property
    def key(self) -> str:
        return self._command.key or f"~{self._command.live().op}"

    @property
    def stdin_offset(self) -> int:
        return self._command.live().stdin_offset

    async def started(self) -> int | None:
        try:
            return await self._command.live().started()
        except (OutcomeUnknown, Unavailable) as error:
            raise await self._commands.explain(self._sandbox, error) from error

    async def resynced(self) -> tuple[int, bool]:
        operation = self._command.live()
        try:
            return await operation.resynced(), operation.end is not None
        except (OutcomeUnknown, Unavailable) as error:
            raise await self._commands.explain(self._sandbox, error) from error

    def events(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[Chunk | ExecStatus, None]:
        return self._commands.events(self._sandbox, self._command, stdout_from, stderr_from)

    async def write_stdin(self, data: bytes, offset: int | None = None) -> int:
        try:
            self._sandbox.rouse()
            taken = await self._command.live().write(data, offset)
            self._commands.count_stdin(len(data))
            return taken
        except (OutcomeUnknown, Unavailable) as error:
            raise await self._commands.explain(self._sandbox, error) from error

    async def close_stdin(self) -> None:
        await self._command.live().close_stdin()


class Commands:
    """Starts and finds commands."""

    def __init__(self, *, lives: Lives, clock: Clock, config: EdgeConfig, tasks: Tasks, recording: Recording) -> None:
        self._lives = lives
        self.recording = recording
        self._clock = clock
        self._config = config
        self._tasks = tasks

    async def exec(self, sandbox: Sandbox, spec: ExecSpec, patient: bool = False) -> RunningCommand | RecordedCommand:
        """See `EdgeClient.exec`."""
        channel = sandbox.running().channel
        check(spec)
        guest_key = None if spec.key is None else guest_key_of(spec)
        if spec.key is not None and guest_key is not None:
            known = self._table(sandbox).get(guest_key[:HALF_KEY])
            if known is not None:
                return await self._again(sandbox, known, spec.key, guest_key)
            recorded = self.recording.find(sandbox, spec.key, guest_key)
            if recorded is not None:
                return recorded
        command, request = self._begin(sandbox, spec, guest_key, patient)
        if channel.congested or spec.pty is not None:  # a terminal may have to be prepared
            await self._start_later(sandbox, command, request)
        else:  # one step, that no cancellation can cut
            await self._start(sandbox, command, request)
        return RunningCommand(self, sandbox, command, attached=False)

    def quick(
        self, sandbox: Sandbox, spec: ExecSpec, release: Sequence[str], told: Callable[[], None]
    ) -> QuickCommand | None:
        """See `QuickEdge.exec_quick`."""
        channel = sandbox.running().channel
        if spec.key is None or spec.pty is not None or spec.stdin or channel.congested:
            return None
        if sandbox.record.spec.sync == "always":
            return None
        for key in release:
            ended = self._find(sandbox, key)
            if ended is not None:
                if ended.starting is not None:
                    return None
                at_once(self._release(sandbox, ended))
        check(spec)
        guest_key = guest_key_of(spec)
        if guest_key[:HALF_KEY] in self._table(sandbox):
            return None
        if self.recording.find(sandbox, spec.key, guest_key) is not None:
            return None
        command, request = self._begin(sandbox, spec, guest_key, patient=True)
        at_once(self._launch(sandbox, command, request))
        return QuickCommand(self._lives, sandbox, command, told)

    def _begin(
        self, sandbox: Sandbox, spec: ExecSpec, guest_key: bytes | None, patient: bool
    ) -> tuple[Command, OpRequest]:
        """A new command, on record, and what is to be asked of the guest."""
        environ = self._environ(sandbox, spec)
        request, asked = request_of(sandbox.record.spec, spec, guest_key, environ, patient=patient)
        command = Command(spec.key or "", guest_key, asked, self._usage(sandbox, fresh_s=_USAGE_FRESH_S))
        command.began = sandbox.active_at = self._clock.monotonic()
        self.recording.begins(sandbox, command, spec)
        if guest_key is not None:
            table = self._table(sandbox)
            self._make_room(sandbox, table)
            table[guest_key[:HALF_KEY]] = command
        return command, request

    async def _start_later(self, sandbox: Sandbox, command: Command, request: OpRequest) -> None:
        command.starting = self._tasks.spawn(self._start(sandbox, command, request))
        quiet(command.starting)
        try:
            await asyncio.shield(command.starting)
        except asyncio.CancelledError:
            if command.guest_key is None:
                command.starting.add_done_callback(lambda _: self._abandon(sandbox, command, (0, 0)))
            raise
        command.starting = None

    async def attach(self, sandbox: Sandbox, key: str) -> RunningCommand | RecordedCommand:
        """See `EdgeClient.attach`."""
        sandbox.running()
        command = self._find(sandbox, key)
        if command is None:
            recorded = self.recording.find(sandbox, key)
            if recorded is not None:
                return recorded
            raise NotFound(
                f"there is no command with the key {key!r} in sandbox {sandbox.id}",
                remedy="It never started; commands without a key are forgotten when they end.",
            )
        if command.starting is not None:
            await asyncio.shield(command.starting)
        if self._dropped(sandbox, command):
            recorded = self.recording.find(sandbox, key)
            if recorded is not None:
                return recorded
        if not command.key and not key.startswith("~"):
            command.key = key  # an earlier edge's: only the hash was known
        return RunningCommand(self, sandbox, command, attached=True)

    async def attach_pid(self, sandbox: Sandbox, pid: int) -> RunningCommand:
        """See `EdgeClient.attach_pid`."""
        sandbox.running()
        for command in (sandbox.commands or {}).values():
            operation = command.operation
            if operation is not None and operation.pid == pid and operation.end is None:
                return RunningCommand(self, sandbox, command, attached=True)
        raise NotFound(
            f"no running command has the pid {pid} in sandbox {sandbox.id}",
            remedy="Only commands that were started through the server can be attached to, while they run.",
        )

    def processes(self, sandbox: Sandbox) -> list[ProcessInfo]:
        """See `EdgeClient.processes`."""
        sandbox.here()
        return [
            ProcessInfo(
                key=command.key or f"~{operation.op}",
                pid=operation.pid,
                argv=list(command.asked.argv),
                started_at=operation.started_at,
                pty=operation.pty,
            )
            for command in (sandbox.commands or {}).values()
            if (operation := command.operation) is not None and operation.pid is not None and operation.end is None
        ]

    async def resize(self, sandbox: Sandbox, key: str, cols: int, rows: int) -> None:
        """See `EdgeClient.resize`."""
        execution = await self.attach(sandbox, key)
        if isinstance(execution, RecordedCommand):
            return
        operation = execution._command.live()
        if operation.end is None:
            await operation.resize(cols, rows)

    async def signal(self, sandbox: Sandbox, key: str, signal: int, scope: int) -> None:
        """See `EdgeClient.signal`."""
        execution = await self.attach(sandbox, key)
        if isinstance(execution, RecordedCommand):
            return
        command = execution._command
        operation = command.live()
        if operation.end is None:
            command.signalled |= 1 << signal
            await operation.signal(signal, scope)

    async def release(self, sandbox: Sandbox, key: str) -> None:
        """See `EdgeClient.release`."""
        command = self._find(sandbox, key)
        if command is None:
            return
        if command.starting is not None:
            await asyncio.wait([command.starting])
        await self._release(sandbox, command)

    async def _release(self, sandbox: Sandbox, command: Command) -> None:
        """One that isn't about to start; in one step."""
        self._drop(sandbox, command)
        if command.operation is not None:
            if command.operation.end is None:
                self.recording.cut(sandbox, command)
            await command.operation.release()

    def count_stdin(self, size: int) -> None:
        """Bytes that a caller sent to a command."""
        self._lives.notes.tally.stdin_bytes += size

    def adopt(self, sandbox: Sandbox) -> None:
        """Take over the commands that an earlier edge started. Those without a key, whose callers are gone, run on;
        while they do, they can be attached to by their pid."""
        for operation in sandbox.here().channel.operations():
            key = operation.key
            if operation.kind is not Kind.EXEC or (key is not None and len(key) != 2 * HALF_KEY):
                continue
            command = Command("", key, Asked(), self._usage(sandbox, fresh_s=_USAGE_FRESH_S))
            command.operation = operation
            if key is not None:
                self.recording.recall(sandbox, command, key)
            if command.status is None:
                self.recording.watch(command, operation, functools.partial(self._settle, sandbox, command))
            if key is not None:
                self._table(sandbox)[key[:HALF_KEY]] = command
            else:
                command.key = f"~{operation.op}"
                self._table(sandbox)[operation.op] = command
                self._abandon(sandbox, command, (-1, -1))

    async def events(
        self, sandbox: Sandbox, command: Command, stdout_from: int, stderr_from: int
    ) -> AsyncGenerator[Chunk | ExecStatus, None]:
        """See `Execution.events`."""
        at = [stdout_from, stderr_from]
        seen = False
        command.reads += 1
        self._lives.use(sandbox)
        try:
            async with aclosing(command.live().read(stdout_from, stderr_from)) as items:
                async for item in items:
                    if type(item) is Chunk:
                        at[item.stderr] = item.offset + len(item.data)
                        yield item
            status = self._settle(sandbox, command)
            if command.durable is not None:
                await asyncio.shield(command.durable)
            if command.guest_key is None:
                seen = True
                if command.reads == 1:  # else the others read on, and the last of them does it
                    self._drop(sandbox, command)
                    await command.live().release()
        except (OutcomeUnknown, Unavailable) as error:
            raise await self.explain(sandbox, error) from error
        finally:
            command.reads -= 1
            self._lives.unuse(sandbox)
            if command.guest_key is None and not seen and not command.reads:
                self._abandon(sandbox, command, (at[0], at[1]))
        yield status  # nothing is left to do: a reader that stops here need not close

    async def explain(self, sandbox: Sandbox, error: OutcomeUnknown | Unavailable) -> DsecError:
        """Why the guest is gone: the channel breaks a moment before the sandbox's end is known."""
        if sandbox.up and isinstance(error, Unavailable):
            return error  # this edge closed the channel; the sandbox goes on
        ending = await self._lives.until_ending(sandbox, 2 * self._config.lost_grace_s)
        return ended_error(sandbox.record) if ending else error

    # --- inside ---

    def _environ(self, sandbox: Sandbox, spec: ExecSpec) -> Environ:
        if spec.env or spec.user is not None:
            return environ_of(sandbox.record.spec, spec, sandbox.network_env)
        found = sandbox.environ
        if found is None or found.sandbox is not sandbox.record.spec or found.network_env is not sandbox.network_env:
            found = sandbox.environ = environ_of(sandbox.record.spec, spec, sandbox.network_env)
        return found

    def _table(self, sandbox: Sandbox) -> dict[bytes | int, Command]:
        if sandbox.commands is None:
            sandbox.commands = {}
        return sandbox.commands

    def _find(self, sandbox: Sandbox, key: str) -> Command | None:
        table = sandbox.commands
        if not table:
            return None
        if key.startswith("~"):
            return _by_number(table, int(key[1:])) if key[1:].isascii() and key[1:].isdigit() else None
        return table.get(hash_of(key))

    async def _again(
        self, sandbox: Sandbox, command: Command, key: str, guest_key: bytes
    ) -> RunningCommand | RecordedCommand:
        if command.guest_key != guest_key:
            raise Conflict(
                f"the key {key!r} was used for a different command",
                remedy="A key goes with one request; use a new one.",
                key_used=True,
            )
        return await self.attach(sandbox, key)

    async def _start(self, sandbox: Sandbox, command: Command, request: OpRequest) -> None:
        try:
            await self._launch(sandbox, command, request)
        except (OutcomeUnknown, Unavailable) as error:
            raise await self.explain(sandbox, error) from error

    async def _launch(self, sandbox: Sandbox, command: Command, request: OpRequest) -> None:
        try:
            operation = await sandbox.running().channel.start(request)
        except BaseException as error:
            self._drop(sandbox, command)
            self.recording.refused(sandbox, command, error)
            raise
        command.operation = operation
        if command.guest_key is None:
            command.key = f"~{operation.op}"
            self._table(sandbox)[operation.op] = command
        self.recording.watch(command, operation, functools.partial(self._settle, sandbox, command))
        self._lives.notes.command_started(sandbox, command.key, command.asked.argv0, operation.op)

    def _settle(self, sandbox: Sandbox, command: Command) -> ExecStatus:
        """The status of a command that has ended: worked out once, the same for every reader."""
        if command.failure is not None:
            raise command.failure
        if command.status is None:
            end = command.live().end
            if end is None:
                raise OutcomeUnknown("the command's output ended without its result")
            try:
                after = command.before if met_no_limit(end) else self._usage(sandbox, fresh_s=0.0)
                status = status_of(end, command.before, after, command.asked, command.signalled)
            except DsecError as error:
                command.failure = error
                self.recording.refused(sandbox, command, error)
                raise
            self.recording.result(sandbox, command, status)
            self._lives.notes.command_ended(sandbox, command.key, status, command.began, self._clock.monotonic())
            return status
        return command.status

    def _usage(self, sandbox: Sandbox, fresh_s: float) -> Usage:
        """The sandbox's counters; a reading of at most `fresh_s` ago will do."""
        now = self._clock.monotonic()
        if sandbox.usage is None or now - sandbox.usage_at > fresh_s or not fresh_s:
            try:
                sandbox.usage = sandbox.here().usage()
            except (OSError, DsecError) as error:  # it is ending: what was read last is the truth that is left
                log.debug("sandbox %s: no counters: %s", sandbox.id, error)
                sandbox.usage = sandbox.usage or Usage()
            sandbox.usage_at = now
        return sandbox.usage

    def _dropped(self, sandbox: Sandbox, command: Command) -> bool:
        """The channel keeps its output no more; its result is on record."""
        operation, guest_key = command.operation, command.guest_key
        if operation is None or guest_key is None or operation.end is None:
            return False
        gone = sandbox.running().channel.find(guest_key) is not operation
        if gone:
            self._settle(sandbox, command)
        return gone

    def _drop(self, sandbox: Sandbox, command: Command) -> None:
        table = sandbox.commands
        if table is None:
            return
        ident = _ident(command)
        if ident is not None and table.get(ident) is command:
            del table[ident]

    def _abandon(self, sandbox: Sandbox, command: Command, at: tuple[int, int]) -> None:
        """Its only reader is gone: read on in its place, so that it isn't stopped by a full window, and forget it at
        its end."""
        operation = command.operation
        if operation is None or not sandbox.up:
            return

        async def drain() -> None:
            try:
                async with aclosing(operation.read(*at)) as items:
                    async for _ in items:
                        pass
            except DsecError as error:
                log.debug("sandbox %s: an abandoned command: %s", sandbox.id, error)
            if not command.reads:
                with suppress(DsecError):
                    self._settle(sandbox, command)
                self._drop(sandbox, command)
                await operation.release()

        self._tasks.spawn(drain())

    def _make_room(self, sandbox: Sandbox, table: dict[bytes | int, Command]) -> None:
        """Forget the oldest results where too many are kept."""
        if len(table) < self._config.max_kept_commands:
            return
        for command in list(table.values()):
            operation = command.operation
            if operation is not None and operation.end is not None and not command.reads:
                self._drop(sandbox, command)
                self._tasks.spawn(operation.release())
                if len(table) < self._config.max_kept_commands:
                    return


def _by_number(table: dict[bytes | int, Command], op: int) -> Command | None:
    """The command with an operation's number: one without a key, or one whose key only an earlier edge knew."""
    found = table.get(op)
    if found is not None:
        return found
    return next((each for each in table.values() if each.operation is not None and each.operation.op == op), None)


def _ident(command: Command) -> bytes | int | None:
    if command.guest_key is not None:
        return command.guest_key[:HALF_KEY]
    return None if command.operation is None else command.operation.op

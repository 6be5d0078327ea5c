"""What the suite's tests share: the factory that an implementer writes, sandboxes that are cleaned up, commands run
to their end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec
import pytest
from msgspec import Struct

from dsec.channel import files
from dsec.errors import DsecError
from dsec.ports import Backend, GuestChannel, Handle, Instance, InstanceEnd, Operation
from dsec.spec.operations import EndKind, ExecFlag, OpEnd, OpRequest, Stage
from dsec.spec.sandbox import SandboxSpec

log = logging.getLogger(__name__)

PATIENCE_S = 180.0
ENV = (b"PATH=/usr/local/bin:/usr/bin:/bin",)


class Feature:
    """Names for `Factory.features`."""

    PROCESSES = "processes"
    """Real processes and a real shell: background jobs, double forks, process groups, /proc."""
    KILL_GUEST = "kill_guest"
    """`Factory.kill_guest` works."""
    FAIL_CREATE = "fail_create"
    """`Factory.fail_next_create` works."""
    DISK_LIMIT = "disk_limit"
    """`disk_bytes` is enforced."""
    CHECK = "check"
    """`Backend.check` finds what can't work before anything is reserved. Without it `create` does."""
    BYTES = "bytes"
    """Arguments and environment may hold any bytes but NUL, not text alone."""
    STAGES = "stages"
    """A start that failed says at which stage and with which errno. Without it only in words."""
    STDIN_OFFSETS = "stdin_offsets"
    """`Operation.write` takes an offset."""
    SOCKET_CHANNEL = "socket_channel"
    """Channels are `dsec.channel.SocketChannel`s of this process."""

    LOCAL = frozenset({CHECK, BYTES, STAGES, STDIN_OFFSETS, SOCKET_CHANNEL})
    """What a backend has whose guests are reached by `SocketChannel`."""


class Factory(Protocol):
    """One host, on which backends (edge incarnations) come and go."""

    features: frozenset[str]
    environment: str

    def make(self) -> Backend:
        """A new incarnation, not opened yet. At most one is open at a time."""
        ...

    async def kill_guest(self, sandbox_id: str) -> None:
        """End pid 1 inside, from outside, as an accident would."""
        ...

    def fail_next_create(self) -> None:
        """Make the next `create` fail in the middle."""
        ...


class Keeper:
    """Holds a sandbox from test to test, for a factory whose sandboxes are dear (`Factory.keeper`, where it has one):
    each test that takes `Sandboxes.one` adopts it."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        """At most one, while no test has it."""
        self.names: frozenset[str] = frozenset()
        """What is in its /tmp when it is new."""

    async def began(self, channel: GuestChannel) -> None:
        """Look at a new one."""
        self.names = frozenset([entry.name for entry in await files.list_dir(channel, "/tmp")])

    async def tidy(self, channel: GuestChannel) -> None:
        """As it was: nothing runs, and nothing is in /tmp."""
        async with asyncio.timeout(PATIENCE_S):
            for operation in list(channel.operations()):
                await operation.release()
            for entry in await files.list_dir(channel, "/tmp"):
                if entry.name not in self.names:
                    await files.remove(channel, f"/tmp/{entry.name}", recursive=True)


class Outcome(Struct, frozen=True):
    """A command's whole result."""

    out: bytes
    err: bytes
    end: OpEnd


class Sandboxes:
    """Makes sandboxes on one backend after the other and destroys all of them in the end."""

    def __init__(self, factory: Factory) -> None:
        self.factory = factory
        self.crowd: int = getattr(factory, "crowd", 20)
        """Sandboxes that are made at the same time; a factory whose sandboxes are dear says fewer."""
        self.usual: dict[str, Any] = getattr(factory, "usual", {})
        """Fields of all specs, for a factory whose sandboxes can't be that small."""
        self.keeper: Keeper | None = getattr(factory, "keeper", None)
        self.backend: Backend = factory.make()
        self.handles: dict[str, Handle] = {}
        self.instances: dict[str, Instance] = {}
        self.ends: dict[str, InstanceEnd] = {}
        """Of those that ended while no edge was there, as the last `next_edge` was told."""
        self._one: str | None = None
        self._idle: dict[str, Instance] = {}
        """The keeper's, which no test has asked for."""

    def spec(self, **changes: Any) -> SandboxSpec:
        """A small sandbox in the factory's environment."""
        small: dict[str, Any] = {
            "environment": self.factory.environment,
            "memory_bytes": 256 << 20,
            "disk_bytes": 512 << 20,
            "pids": 128,
        }
        return SandboxSpec(**(small | self.usual | changes))

    async def create(self, **changes: Any) -> Instance:
        """One that runs."""
        spec = self.spec(**changes)
        self.backend.check(spec)
        sandbox_id = "".join(secrets.choice("0123456789abcdefghijklmnopqrstuv") for _ in range(24))
        handle = self.handles[sandbox_id] = travelled(self.backend.reserve(sandbox_id, spec))
        instance = self.instances[sandbox_id] = await self.backend.create(sandbox_id, spec, handle)
        assert instance.sandbox_id == sandbox_id
        return instance

    async def one(self) -> Instance:
        """For a test that needs a small sandbox and its /tmp, changes nothing else there and leaves no process that no
        operation holds. Within a test it is always the same."""
        if self._one is None and self.keeper is not None and self._idle:
            self.handles |= self.keeper.handles
            self.instances |= self._idle
            (self._one,) = self._idle
            self.keeper.handles, self._idle = {}, {}
        if self._one is None:
            instance = await self.create()
            self._one = instance.sandbox_id
            if self.keeper is not None:
                await self.keeper.began(instance.channel)
        return self.instances[self._one]

    async def refuses(self, error: type[DsecError], **changes: Any) -> None:
        """Such a sandbox can't be made, and nothing of it is."""
        with pytest.raises(error):
            await self.create(**changes)
        assert self.instances == {}
        if Feature.CHECK in self.factory.features:
            assert self.handles == {}

    async def destroy(self, sandbox_id: str) -> None:
        await self.backend.destroy(sandbox_id, self.handles.pop(sandbox_id))
        self.instances.pop(sandbox_id, None)

    async def open(self) -> None:
        """Begin. A kept one that has ended meanwhile is destroyed."""
        kept = self._kept()
        found = await self.backend.open(kept)
        self._idle = {name: each for name, each in found.items() if not isinstance(each, InstanceEnd)}
        for sandbox_id in kept.keys() - self._idle.keys():
            await self.backend.destroy(sandbox_id, self._kept().pop(sandbox_id))

    def _kept(self) -> dict[str, Handle]:
        return self.keeper.handles if self.keeper is not None else {}

    async def next_edge(self, forget: str | None = None) -> None:
        """The edge restarts. `forget`: a sandbox that is no longer on record."""
        await self.backend.close(keep=True)
        self.backend = self.factory.make()
        known = {sandbox_id: handle for sandbox_id, handle in self.handles.items() if sandbox_id != forget}
        found = await self.backend.open(known | self._kept())
        instances = {name: each for name, each in found.items() if not isinstance(each, InstanceEnd)}
        self.ends = {name: each for name, each in found.items() if isinstance(each, InstanceEnd)}
        self.instances = {name: each for name, each in instances.items() if name in self.handles}
        self._idle = {name: each for name, each in instances.items() if name not in self.handles}
        if forget is not None:
            del self.handles[forget]

    async def close(self, *, well: bool) -> None:
        """Nothing is left, but `one`, where it is kept and the test did `well`."""
        if well and self.keeper is not None and self._one in self.instances:
            try:
                await self.keeper.tidy(self.instances[self._one].channel)
                self.keeper.handles[self._one] = self.handles.pop(self._one)
            except (DsecError, TimeoutError):
                log.warning("a sandbox can't be tidied, so it isn't kept", exc_info=True)
        for sandbox_id in list(self.handles):
            await self.destroy(sandbox_id)
        await self.backend.close(keep=bool(self._kept()))

    def channel(self, instance: Instance) -> GuestChannel:
        """Of the incarnation that serves now."""
        return self.instances[instance.sandbox_id].channel


@pytest.fixture
async def sandboxes(factory: Factory, request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    """An open backend and its sandboxes; nothing is left after the test, but what the factory's keeper keeps. After an
    interrupt that is nothing: a guest that was stopped in the middle of something may take its time to be tidied."""
    session = request.session
    failed = session.testsfailed
    found = Sandboxes(factory)
    await found.open()
    try:
        yield found
    finally:
        well = session.testsfailed == failed and session.exitstatus != pytest.ExitCode.INTERRUPTED
        await found.close(well=well)


@pytest.fixture
def backend(sandboxes: Sandboxes) -> Backend:
    """The backend that is open."""
    return sandboxes.backend


def travelled(handle: Handle) -> Handle:
    """A handle as the record gives it back: it has to be JSON."""
    back: Handle = msgspec.json.decode(msgspec.json.encode(handle))
    return back


def needs(factory: Factory, *features: str) -> None:
    """Skip where the backend can't do something."""
    missing = [feature for feature in features if feature not in factory.features]
    if missing:
        pytest.skip(f"this backend has no {', '.join(missing)}")


def request(*argv: str | bytes, **fields: Any) -> OpRequest:
    """An EXEC with a usual PATH; `env` is laid over it."""
    words = tuple(word if isinstance(word, bytes) else word.encode() for word in argv)
    env = ENV + tuple(fields.pop("env", ()))
    return OpRequest(argv=words, env=env, **fields)


def start_failed(factory: Factory, end: OpEnd, stage: Stage, number: int | None = None) -> None:
    """The command could not be started, and says why: at `stage`, with the errno `number` (None: whichever)."""
    assert end.kind is EndKind.START_FAILED
    assert end.message
    if Feature.STAGES in factory.features:
        assert (end.stage, end.code) == (stage, end.code if number is None else number)


async def collect(operation: Operation, out_from: int = 0, err_from: int = 0) -> Outcome:
    """Read to the end, checking that no byte is missing or comes twice."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    at = [out_from, err_from]
    async with asyncio.timeout(PATIENCE_S):
        async for item in operation.read(out_from, err_from):
            if isinstance(item, OpEnd):
                assert item.stdout_bytes == max(at[0], item.stdout_bytes)
                assert at[0] == item.stdout_bytes or out_from > item.stdout_bytes
                return Outcome(b"".join(parts[0]), b"".join(parts[1]), item)
            assert item.offset == at[item.stderr], "a gap or a repetition in the output"
            at[item.stderr] += len(item.data)
            parts[item.stderr].append(item.data)
    raise AssertionError("the output ended without an end")


async def run(channel: GuestChannel, *argv: str | bytes, stdin: bytes | None = None, **fields: Any) -> Outcome:
    """A command to its end; released."""
    if stdin is not None:
        fields["flags"] = fields.get("flags", ExecFlag(0)) | ExecFlag.STDIN
    operation = await channel.start(request(*argv, **fields))
    try:
        if stdin is None:
            return await collect(operation)

        async def feed(data: bytes) -> None:
            await operation.write(data)
            await operation.close_stdin()

        _, outcome = await asyncio.gather(feed(stdin), collect(operation))
        return outcome
    finally:
        await operation.release()


async def shell(channel: GuestChannel, script: str, **fields: Any) -> Outcome:
    """`sh -c`."""
    return await run(channel, "sh", "-c", script, **fields)


def ok(outcome: Outcome) -> bytes:
    """The stdout of a command that did well."""
    assert (outcome.end.kind, outcome.end.code) == (EndKind.EXITED, 0), outcome
    return outcome.out


async def until(condition: Callable[[], bool]) -> None:
    """Wait for somebody else's state."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(0.005)

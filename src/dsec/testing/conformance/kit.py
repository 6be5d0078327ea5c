"""What the suite's tests share: the factory that an implementer writes, sandboxes that are cleaned up, commands run
to their end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec
import pytest
from msgspec import Struct

from dsec.errors import DsecError
from dsec.ports import Backend, GuestChannel, Handle, Instance, InstanceEnd, Operation
from dsec.spec.operations import EndKind, ExecFlag, OpEnd, OpRequest, Stage
from dsec.spec.sandbox import SandboxSpec

PATIENCE_S = 60.0
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
        self.backend: Backend = factory.make()
        self.handles: dict[str, Handle] = {}
        self.instances: dict[str, Instance] = {}
        self.ends: dict[str, InstanceEnd] = {}
        """Of those that ended while no edge was there, as the last `next_edge` was told."""

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

    async def next_edge(self, forget: str | None = None) -> None:
        """The edge restarts. `forget`: a sandbox that is no longer on record."""
        await self.backend.close(keep=True)
        self.backend = self.factory.make()
        known = {sandbox_id: handle for sandbox_id, handle in self.handles.items() if sandbox_id != forget}
        found = await self.backend.open(known)
        self.instances = {name: each for name, each in found.items() if not isinstance(each, InstanceEnd)}
        self.ends = {name: each for name, each in found.items() if isinstance(each, InstanceEnd)}
        if forget is not None:
            del self.handles[forget]

    def channel(self, instance: Instance) -> GuestChannel:
        """Of the incarnation that serves now."""
        return self.instances[instance.sandbox_id].channel


@pytest.fixture
async def sandboxes(factory: Factory) -> AsyncIterator[Sandboxes]:
    """An open backend and its sandboxes; nothing is left after the test."""
    found = Sandboxes(factory)
    await found.backend.open({})
    try:
        yield found
    finally:
        for sandbox_id in list(found.handles):
            await found.destroy(sandbox_id)
        await found.backend.close(keep=False)


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

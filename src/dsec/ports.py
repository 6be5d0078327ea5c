"""The protocols between the layers: whoever implements one of these can be plugged in at `dsec.app`.

A backend makes and ends sandboxes and hands out their `GuestChannel`; commands and files are the edge's business and
the same for all backends, because the guest is. `dsec.testing` has the conformance suite that every implementation
passes.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from msgspec import Struct

from dsec.spec.causes import Cause
from dsec.spec.functions import FunctionBatch, FunctionResult
from dsec.spec.operations import Chunk, Kind, OpEnd, OpRequest
from dsec.spec.sandbox import SandboxSpec
from dsec.wire.looks import Look


class Clock(Protocol):
    """Time, injected so that tests and the simulator own it."""

    def now(self) -> float:
        """Wall clock, seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never jump."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait on the monotonic clock."""
        ...


class Tap(Protocol):
    """Told of all that passes between an operation and its caller, once and in order, however many read."""

    def output(self, stderr: bool, offset: int, data: bytes) -> None: ...

    def stdin(self, data: memoryview) -> None: ...

    def failed(self) -> None:
        """It goes on without being told of, or not at all: the channel is lost, or it was released."""
        ...

    def ended(self) -> None:
        """Its end is known (`Operation.end`); no reader has seen it yet."""
        ...


class Operation(Protocol):
    """One operation in a guest. It lives on when the reader, the edge or the caller goes away."""

    @property
    def op(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def kind(self) -> Kind:
        """What it does; known after a resync too (an edge that takes over must abort a half-sent WRITE, but let a
        command go on)."""
        ...

    @property
    def pid(self) -> int | None:
        """Inside the sandbox; None until it started."""
        ...

    @property
    def end(self) -> OpEnd | None:
        """How it ended, or None while it runs."""
        ...

    def watch(self, tap: Tap) -> None:
        """Tell `tap` of everything, at once of what is there already (of output that is still kept)."""
        ...

    async def started(self) -> int | None:
        """Wait until it runs or has ended: the pid, or None where it never ran. Raises `OutcomeUnknown` where the
        guest died first."""
        ...

    async def resynced(self) -> int:
        """Wait until all that it had at a resync is here again; how many bytes of stdout are. Raises as `read`."""
        ...

    def read(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[Chunk | OpEnd, None]:
        """Output from the given offsets on (below 0: from the first byte that is still kept), then the end, always
        last. Any number of readers, each from the start if it likes: nothing that a reader has yet to see is dropped
        before `release`. Close it (`aclose`) when done early.

        Raises `OutcomeUnknown` where the guest died first.
        """
        ...

    @property
    def stdin_offset(self) -> int:
        """Bytes of stdin taken so far: by `write` (what a cancelled one got rid of, too), or before a resync as the
        guest reports it."""
        ...

    async def write(self, data: bytes, offset: int | None = None) -> int:
        """Send to stdin, waiting while the process doesn't read; returns the new `stdin_offset`. Data for a closed
        stdin is dropped. Writers take turns. `offset`: where `data` begins in the whole of stdin; what was sent
        already is dropped (None: at the end).

        Raises `InvalidRequest` where `offset` leaves a gap, `OutcomeUnknown` where the guest died.
        """
        ...

    async def close_stdin(self) -> None:
        """No more stdin. On a terminal: types its end-of-file character."""
        ...

    @property
    def pty(self) -> bool:
        """It runs on a terminal."""
        ...

    @property
    def started_at(self) -> float:
        """Wall clock; after a resync as the guest counts."""
        ...

    async def resize(self, cols: int, rows: int) -> None:
        """The size of its terminal, 0..65535 (0: as it is; the guest bounds it). Raises `InvalidRequest` where it has
        none. Nothing where it has ended."""
        ...

    async def signal(self, signal: int, scope: int = 0) -> None:
        """`scope` 0: the leader, 1: its process group, 2: everything that it started (SIGKILL only)."""
        ...

    async def release(self) -> None:
        """Forget it, in the guest too; a running one is ended whole. Idempotent; one step that nothing cancels."""
        ...


def is_under_way(operation: Operation) -> bool:
    """It has not ended, and is somebody's: not the edge's own."""
    return operation.end is None and operation.kind not in (Kind.WAY_OUT, Kind.LOOK)


class GuestChannel(Protocol):
    """The edge's end of the channel into one sandbox."""

    @property
    def congested(self) -> bool:
        """`start` may have to wait; where it is False, `start` gets to its end without a turn of the event loop."""
        ...

    async def start(self, request: OpRequest) -> Operation:
        """Begin an operation; returns once the request is on its way. A failed start is an `OpEnd` of kind
        START_FAILED.

        Raises `OutcomeUnknown` where the channel is lost, `QuotaExceeded` where too many operations are live.
        """
        ...

    def find(self, key: bytes) -> Operation | None:
        """The operation that was started under this idempotency key, if it isn't released."""
        ...

    def operations(self) -> Sequence[Operation]: ...

    async def ping(self) -> float:
        """Round trip in seconds."""
        ...

    def hold(self, since_ns: int) -> None:
        """Timeouts inside stand still since then (CLOCK_MONOTONIC), over later channels too; 0: they go on."""
        ...

    def lost(self) -> Awaitable[str]:
        """Resolves with the reason when the guest's end closed or broke the protocol; not by `close`. May be awaited
        more than once."""
        ...

    async def close(self) -> None:
        """Let go of the channel. The guest and its operations go on."""
        ...


class Usage(Struct, frozen=True, kw_only=True):
    """Counters of a sandbox since it began, cheap to read: what the edge compares before and after a command."""

    cpu_us: int = 0
    throttled_us: int = 0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    oom_kills: int = 0
    pids: int = 0
    pids_refused: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    image_failures: int = 0
    """Reads of its environment's files that failed because the store did; grows while the node's disk has failed."""


class InstanceEnd(Struct, frozen=True):
    """Why a running instance is gone, as the backend saw it."""

    cause: Cause
    message: str = ""


class Instance(Protocol):
    """A running sandbox of some backend."""

    @property
    def sandbox_id(self) -> str: ...
    @property
    def channel(self) -> GuestChannel: ...

    def ended(self) -> Awaitable[InstanceEnd]:
        """Resolves when it is gone by itself: pid 1 ended, the zygote or the VMM died. May be awaited more than
        once."""
        ...

    def usage(self) -> Usage: ...


class PagedOut(Struct, frozen=True):
    """What a pause gave back: memory of the sandbox's programs before and after, and what it takes compressed (0: not
    known)."""

    before_bytes: int
    after_bytes: int
    compressed_bytes: int = 0


@runtime_checkable
class WatchedHost(Protocol):
    """What an `Instance` may be besides: one whose files and processes the host's kernel knows, so that they can be
    watched from outside."""

    @property
    def pid(self) -> int:
        """The host's number of its first process."""
        ...


@runtime_checkable
class TellingHost(Protocol):
    """What an `Instance` may be besides: one whose own kernel can be asked what its programs do. It is a claim: whoever
    is root inside can forge it, or have nothing said."""

    async def look(self, wanted: Sequence[bytes], seen: Callable[[Look | str], None]) -> None:
        """From now on `seen` is told of what is wanted (native/common/wire.h, LOOKING OUT), or in words why something
        may have been missed; on the event loop. Raises `Unsupported` where it can't, `Unavailable`."""
        ...

    async def end_look(self) -> None:
        """Hear nothing any more. Idempotent."""
        ...


@runtime_checkable
class PausableHost(Protocol):
    """What an `Instance` may be besides: one that can stand still."""

    @property
    def frozen(self) -> bool: ...

    def freeze(self, frozen: bool) -> None:
        """Stop everything inside, or let it go on; within milliseconds. No timeout of a command passes meanwhile. A
        frozen one can be destroyed. Raises OSError."""
        ...

    async def page_out(self) -> PagedOut:
        """Give the memory of a frozen one back, as far as the host has room for it elsewhere; stops when it goes on.
        What it needs again comes back by itself. Raises OSError."""
        ...


@runtime_checkable
class NetworkHost(Protocol):
    """What an `Instance` may be besides: one whose programs can be served a network by name. It has no interface but
    `lo`; what its programs connect to, at any address and port but its own loopback, arrives here instead."""

    async def serve_network(
        self, connected: Callable[[socket.socket, str, int], None], query: Callable[[bytes], bytes | None]
    ) -> None:
        """From now on hand over what arrives: `connected(connection, address, port)` for each TCP connection, where
        its program believes to be connected to `address`:`port` (the callee owns the non-blocking socket); `query` for
        each DNS query (a UDP payload to port 53 of any address), which returns the answer or None for silence. Both
        are called on the event loop and must not block.

        Idempotent in effect: a second call replaces the callbacks. Until the first one no address but loopback can be
        reached at all. After an edge's restart the new one calls it again; connections that came in between wait.
        Raises `Unsupported` where the host can't (the reason says what is missing), `Unavailable`.
        """
        ...

    async def end_network(self) -> None:
        """Hand over nothing any more: new connections are refused. Those handed over are their owner's to close."""
        ...


Handle = dict[str, Any]
"""Where a backend finds what it made, as JSON: written to the record before anything is made."""


class Backend(Protocol):
    """Makes and ends sandboxes of one kind on one node."""

    name: ClassVar[str]
    api_version: ClassVar[int]
    """1. The edge refuses a backend of another major version."""

    async def open(self, known: dict[str, Handle]) -> Mapping[str, Instance | InstanceEnd]:
        """Begin to serve. `known`: the handles of all sandboxes on record. What still runs is adopted and returned, and
        why the others ended, where that is known; everything of this backend's that isn't in `known`, or doesn't run
        any more, is removed from the host."""
        ...

    @property
    def epoch(self) -> int:
        """Changes when sandboxes of an earlier life can't exist any more (a new zygote, a boot). 24 bits."""
        ...

    def check(self, spec: SandboxSpec) -> None:
        """Raise `Unsupported`, `InvalidRequest` or `EnvironmentNotFound` for what can't work here. No I/O."""
        ...

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        """Choose names for everything that `create` is going to make. Makes nothing; no I/O. `tenant`: a small number
        of the project; sandboxes of different ones share no user id of the host. `capture`: it begins with what was
        kept by this name (`CaptureHost`, `ForkHost`)."""
        ...

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> Instance:
        """Make it; returns when its guest answers. On failure nothing is left, and `CreateFailed` says at which
        step."""
        ...

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        """End it and remove every trace. Idempotent; works on half-made ones."""
        ...

    async def close(self, *, keep: bool) -> None:
        """Stop serving. `keep`: sandboxes go on for the next edge incarnation; else everything is removed, mounts and
        all."""
        ...


@runtime_checkable
class PatientBackend(Protocol):
    """What a `Backend` may be besides: one that may take longer to make a sandbox than others do."""

    def create_timeout_s(self, spec: SandboxSpec) -> float:
        """When making this one has failed."""
        ...


@runtime_checkable
class EnvironmentHost(Protocol):
    """What a `Backend` may be besides: one whose environments belong to projects and say how commands run in them."""

    def resolve(self, spec: SandboxSpec, project: str) -> SandboxSpec:
        """The spec with what its environment and layers say filled in. What comes out is what `check`, `reserve` and
        `create` get, and what callers are shown. Raises `EnvironmentNotFound`, `NotFound`, `InvalidRequest`."""
        ...

    def knows(self, spec: SandboxSpec, project: str) -> bool:
        """Whether all that `resolve` needs is on this node. Cheap."""
        ...

    async def learn(self, spec: SandboxSpec, project: str) -> None:
        """Find out from the shared store what isn't known; what isn't there either `resolve` then misses. Raises
        `Unavailable`, `LayerCorrupt`."""
        ...


class QuickCall(Protocol):
    """A function call that runs: `FunctionHost.begin`."""

    def let_go(self) -> None:
        """Nobody wants its result: end it. Idempotent."""
        ...


class FunctionHost(Protocol):
    """Runs function calls. They have no state: nothing of one is left when its result is there, or nobody wants it."""

    def stream(self, project: str, batch: FunctionBatch, at_once: int = 0) -> AsyncIterator[FunctionResult]:
        """A result a call, its `value` as msgpack (`msgspec.Raw`). Closing it ends what still runs. `at_once`: no more
        than so many run at a time (0: as many as have room). Raises, before the first result, `EnvironmentNotFound`,
        `InvalidRequest`, `Unsupported`, `CreateFailed`, `QuotaExceeded`."""
        ...

    def begin(self, project: str, batch: FunctionBatch, told: Callable[[FunctionResult], None]) -> QuickCall | None:
        """A batch of one call, begun in this step: `told` is called once, later, unless it is let go before. None where
        it can't begin at once: `stream` takes it. Raises OSError, `EnvironmentNotFound`, `InvalidRequest`."""
        ...


class Captured(Struct, frozen=True):
    """The files that a sandbox had written at one moment."""

    name: str
    upper: Path
    """An overlay's upper directory, nobody else's: it may be changed."""
    id_base: int
    """The host's number of the root inside."""
    seq: int = 0
    """The last entry of its trajectory then, which the files are all that came of (set by the edge). 0: something was
    under way."""


@runtime_checkable
class CaptureHost(Protocol):
    """What a `Backend` may be besides: one whose sandboxes' files can be kept as they are at one moment, for others to
    begin with, or to be made a layer."""

    async def capture(self, sandbox_id: str, handle: Handle) -> Captured:
        """Keep them until `drop`; the sandbox stands still for milliseconds, a paused one isn't resumed. Raises
        `Unavailable`."""
        ...

    async def drop(self, name: str) -> None:
        """Idempotent. What is still there when the backend opens is dropped."""
        ...


@runtime_checkable
class ForkHost(Protocol):
    """What a `CaptureHost` may be besides: one whose sandboxes can be copied with all that runs in them."""

    async def split(self, sandbox_id: str, handle: Handle) -> str:
        """Keep memory and disk as they are until `drop`, as a name for `reserve`; the sandbox stands still for some
        tens of milliseconds, a paused one isn't resumed. What is made of it is somebody else from the begin. Raises
        `Unavailable`, `Unsupported`."""
        ...

    async def drop(self, name: str) -> None:
        """As in `CaptureHost`."""
        ...


class BlobInfo(Struct, frozen=True):
    """An object of a store."""

    key: str
    size: int
    modified_at: float
    """Wall clock of the store, seconds."""


class BlobStore(Protocol):
    """Objects shared by all nodes: a directory on a (distributed) file system, or a bucket. `dsec.store.format` says
    what lies where.

    Keys are relative paths of letters, digits and `._-@+=%` with `/` between. An object appears whole or not at all, to
    every reader at once, whoever else writes it. Nothing here is verified: who reads by a digest compares. All calls
    raise `Unavailable` where the store can't be reached, is full or fails, after retries of their own.
    """

    async def put(self, key: str, data: bytes | Path) -> None:
        """Make or replace it, of bytes or of a file's content. Durable on return."""
        ...

    async def put_if_absent(
        self, key: str, data: bytes | Path, told: Callable[[int], None] = lambda done: None
    ) -> bool:
        """Make it; False where it exists already, even by a writer at the same time. Durable on return. `told`: of the
        bytes that went so far, now and then, by any thread."""
        ...

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        """A range, fewer bytes only where the object ends there. Raises `NotFound`."""
        ...

    async def get_each(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        """The first bytes, up to `most`, of several small objects, for the price of one call where that can be; None
        where there is none."""
        ...

    def file(self, key: str) -> Path | None:
        """The file that is the object, for who reads it by itself; it may be missing. None: only `get` has it."""
        ...

    async def size(self, key: str) -> int | None:
        """Its size, or None where it doesn't exist."""
        ...

    def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        """All objects whose keys begin with `prefix` (which ends with `/`), in any order."""
        ...

    async def delete(self, key: str) -> None:
        """Idempotent."""
        ...

    async def close(self) -> None: ...

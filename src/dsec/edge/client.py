"""What the layers above ask of an edge: `EdgeClient`, in process on one machine.

Owns the protocol and its value types. The API layer codes against this file alone; `dsec.edge.node.Edge` implements
it. Invariants for whoever calls:

- Cancelling a call never tears state: a creation, a deletion or a command that has begun goes on without its caller.
- No method takes a request's word for who it is: call `authenticate` first, then `authorize` for each sandbox named in
  the request.
- Paths are bytes (Linux names have no encoding). Times are seconds; wall-clock times are seconds since the epoch.
- Any error is a `DsecError`; each method names those that it raises on top of `SandboxNotFound`, `SandboxEnded` (the
  record's cause in
  `details["cause"]`), `Unavailable` (still starting, or the edge is stopping) and `OutcomeUnknown`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from dsec.edge.kept import BatchItem, Kept
from dsec.edge.observed import Observed
from dsec.edge.screened import Screened
from dsec.errors import ErrorBody
from dsec.ports import Usage
from dsec.spec.causes import Cause
from dsec.spec.network import KeyPolicy, Network, NetworkInfo
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import (
    ExecSpec,
    ExecStatus,
    FileEvent,
    FileInfo,
    ProcessInfo,
    SandboxInfo,
    SandboxSpec,
    State,
)
from dsec.spec.trajectory import RebuildRequest, Rebuilt


class Principal(Struct, frozen=True):
    """Who makes a request: a project by its API key, or one sandbox by its token."""

    project: str
    sandbox_id: str | None = None
    """Set for a sandbox token, which reaches this sandbox alone and may not create."""
    label: str = ""
    policy: KeyPolicy | None = None
    """Of its key; None: the node's default."""
    at_once: int = 0
    """So many of its calls, or of a judge's programs, may run at a time for this request; 0: as many as have room."""


class Created(Struct, frozen=True):
    """The answer to `create`."""

    sandbox: SandboxInfo
    """With `token` where this call made it (or waited for the call that did)."""
    existed: bool = False
    """True where a sandbox of this name, or of this idempotency key, was there already."""


class DeleteItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One result of `delete_many`; no `error`: nothing of it is left."""

    id: str
    error: ErrorBody | None = None


class Page(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One page of `list_sandboxes`."""

    sandboxes: list[SandboxInfo]
    next: str | None = None
    """Pass as `after` for the next page; None: this was the last."""


class ApiKey(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An API key on record; the key itself is not kept."""

    id: str
    """First characters of the hash: names the key without revealing it."""
    project: str
    label: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None
    policy: KeyPolicy | None = None
    """What it may grant; None: the node's default."""


class NodeInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Node facts and counts."""

    edge: int
    backends: dict[str, int]
    """Name -> epoch."""
    live: int
    starting: int
    queued: int
    ending: int
    max_live: int
    max_starting: int
    memory_committed_bytes: int
    memory_capacity_bytes: int
    """Commitments up to here are admitted (the node's memory times the overcommit)."""
    disk_free_bytes: int
    started_at: float
    created_total: int = 0
    """Since this edge began."""
    failed_total: int = 0
    stuck: int = 0
    """Sandboxes whose removal failed and is being tried again."""
    features: list[str] = []
    """What its kernel has that another's may not, for `require_features`; `kvm`: its machines run by it."""


class Execution(Protocol):
    """One command in a sandbox. It goes on when its readers go away."""

    @property
    def key(self) -> str:
        """Names it in `attach`, `signal` and `release`. The caller's, or `~N` where the caller gave none; such a
        command is forgotten once a reader has seen its end, or at its end when its last reader went away; output that
        was read cannot be read again."""
        ...

    @property
    def attached(self) -> bool:
        """True where the key was known, so that this is an earlier request's command."""
        ...

    async def started(self) -> int | None:
        """Wait until it runs or has ended; its pid inside, or None where it could not be started (the status says why).

        Raises `OutcomeUnknown` where the sandbox is gone first.
        """
        ...

    async def resynced(self) -> tuple[int, bool]:
        """Wait until the guest has sent again what it had when this edge came, however long that takes: so many bytes
        of stdout are here by now, and whether the command has ended.

        Raises as `events`.
        """
        ...

    def events(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncIterator[Chunk | ExecStatus]:
        """Output from the given byte offsets on (below 0: from the first byte that is still kept; of a command without
        a key only the last part may be), then the status, always last. Close the iterator (`aclose`) when done
        early.

        Raises `OutcomeUnknown` where the guest died under the command, `SandboxEnded` where the sandbox was ended on
        purpose.
        """
        ...

    @property
    def stdin_offset(self) -> int:
        """Bytes of stdin taken so far, by whichever request sent them. Survives the edge."""
        ...

    async def write_stdin(self, data: bytes, offset: int | None = None) -> int:
        """Send to stdin, waiting while the process doesn't read; returns the new `stdin_offset`. Dropped where stdin is
        closed or the command has ended. `offset`: where `data` begins in the whole of stdin; what was taken already is
        dropped, so that a client which lost its connection can send again (None: at the end). Writers take turns.

        Raises `InvalidRequest` where `offset` leaves a gap."""
        ...

    async def close_stdin(self) -> None: ...


class Quick(Protocol):
    """A hold on a command that most likely ends at once: `QuickEdge.exec_quick`."""

    @property
    def key(self) -> str: ...
    @property
    def pid(self) -> int | None:
        """Inside; None where it could not be started, or it isn't known yet."""
        ...

    @property
    def status(self) -> ExecStatus | None:
        """Its result, once that is known and on record."""
        ...

    @property
    def quick(self) -> bool:
        """False once there is nothing to wait for here: let go of it, and ask `EdgeClient.exec` once more."""
        ...

    def output(self) -> tuple[bytes, bytes] | None:
        """stdout and stderr; None where they are not all here: as for `quick`."""
        ...

    def let_go(self) -> None:
        """The command goes on, or has ended; nobody is told of it here any more. Idempotent."""
        ...


@runtime_checkable
class QuickEdge(Protocol):
    """What an `EdgeClient` may be besides: one that runs in this process."""

    def exec_quick(
        self, sandbox_id: str, spec: ExecSpec, release: Sequence[str], told: Callable[[], None]
    ) -> Quick | None:
        """Release the keys, then start a command that has a key, for a caller who wants its result alone; in one step.
        `told` is called when something happens to it. None where it isn't fresh or may not be quick: `exec` takes it.

        Raises as `exec`; then that says why it can't be started.
        """
        ...


class FileWatch(Protocol):
    """Events of a watched directory, from the moment that `EdgeClient.watch` returned on. Ends after the `remove` of
    the directory itself (path ""). Close it when done early.

    `anext` raises `QuotaExceeded` where the tree got more directories than a watch can follow, and what
    `EdgeClient.watch` raises.
    """

    def __aiter__(self) -> AsyncIterator[FileEvent]: ...
    async def __anext__(self) -> FileEvent: ...
    async def aclose(self) -> None:
        """Idempotent."""
        ...


class PortStream(Protocol):
    """A connection to a port (or unix socket) inside, both directions at once. Close it in the end. One reader and one
    writer at a time. Goes with the edge."""

    async def read(self) -> bytes:
        """Some bytes; b"" when the other side has ended its direction. Raises `PortClosed` where the connection was
        reset."""
        ...

    async def write(self, data: bytes) -> None:
        """Send, waiting while the other side doesn't read. Dropped where it doesn't take any more."""
        ...

    async def close_write(self) -> None:
        """End our direction; reading goes on. Idempotent."""
        ...

    async def close(self) -> None:
        """End both. Idempotent."""
        ...


class EdgeClient(Observed, Kept, Screened, Protocol):
    """Sandboxes, commands and files of one node."""

    # --- who --------------------------------------------------------------------------------------------------------

    def authenticate(self, bearer: str) -> Principal:
        """Whose API key or sandbox token this is (constant time; at most a look-up in the local database). Raises
        `Unauthenticated`."""
        ...

    def authorize(self, principal: Principal, sandbox_id: str) -> None:
        """Raises `SandboxNotFound` where the sandbox is another project's (so that ids can't be probed) or unknown,
        `PermissionDenied` where the principal is the token of another sandbox."""
        ...

    def access_token(self, sandbox_id: str) -> str:
        """A token that reaches this sandbox alone, as the one that `create` gave: always the same, so that it can be
        told again to a caller who has the right to the sandbox. Raises `SandboxNotFound`."""
        ...

    def traffic_token(self, sandbox_id: str) -> str:
        """A token that admits to this sandbox's ports and to no call: always the same. Raises `SandboxNotFound`."""
        ...

    def check_grants(self, principal: Principal, network: Network | None) -> None:
        """Whether the principal may give a sandbox this network. Raises `PermissionDenied`, `InvalidRequest`,
        `Unsupported`."""
        ...

    async def create_key(
        self, project: str, label: str = "", policy: KeyPolicy | None = None, *, by: Principal | None = None
    ) -> str:
        """A new API key of a project; this is the only time that it is seen. `policy`: what it may grant (None: as
        `by`, the principal who makes it, or the node's default). Raises `InvalidRequest`, `PermissionDenied` (more
        than `by` may grant itself)."""
        ...

    async def revoke_key(self, key_id: str) -> None:
        """`key_id`: from `list_keys`. Idempotent. Raises `NotFound`."""
        ...

    def list_keys(self, project: str | None = None) -> list[ApiKey]: ...

    # --- sandboxes --------------------------------------------------------------------------------------------------

    async def create(
        self, spec: SandboxSpec, *, project: str, deadline_s: float | None = None, key: str | None = None
    ) -> Created:
        """Make a sandbox; returns when it runs. Where `spec.name` names a live one of this run (or project), returns
        that.

        `deadline_s`: how long to wait for capacity and creation (None: the node's default). `key`: idempotency key;
        the same key and spec again returns the same sandbox, even an ended one.

        Raises `Unsupported`, `InvalidRequest`, `EnvironmentNotFound`, `Conflict` (other spec under the same name or
        key; `details` has `fields`), `QuotaExceeded` (can never fit this node), `AdmissionTimeout`, `CreateFailed`.
        """
        ...

    def create_many(
        self, specs: Sequence[SandboxSpec], *, project: str, deadline_s: float | None = None, key: str | None = None
    ) -> AsyncIterator[BatchItem]:
        """Make them all; an item each, in the order they are ready, an error per item. Closing the iterator stops
        nothing.

        `key`: the same key and specs again returns the same sandboxes. Raises `Conflict` where the key was used for
        other specs,
        `InvalidRequest` where there are none or too many.
        """
        ...

    async def rebuild(self, request: RebuildRequest, principal: Principal) -> Rebuilt:
        """Make a sandbox again, under another id: from the environment that its trajectory begins with, by doing again
        what its callers did; keys have their results there too. Says where the outcomes first differ. Raises
        `Conflict` where the trajectory doesn't hold or lacks what is needed, `PermissionDenied` where the principal
        can't grant what it reached, and as `create`."""
        ...

    def get(self, sandbox_id: str) -> SandboxInfo: ...

    def find_named(self, project: str, run: str | None, name: str) -> SandboxInfo:
        """The live sandbox of this name. Raises `SandboxNotFound`."""
        ...

    async def list_sandboxes(
        self,
        project: str,
        *,
        states: Sequence[State] = (),
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """Sandboxes of a project in the order of their ids (oldest first within one epoch of the node). No `states`:
        all but ended ones. `limit`: 1..1000, else `InvalidRequest`."""
        ...

    async def renew(self, sandbox_id: str, ttl_s: float | None) -> SandboxInfo:
        """It now ends `ttl_s` from now (None: never)."""
        ...

    async def delete(self, sandbox_id: str, cause: Cause = Cause.DELETED, message: str = "") -> SandboxInfo:
        """End it; returns when nothing of it is left. Again, or on an ended one: the same answer. `cause`: `deleted`,
        `shutdown`,
        `lease_lapsed` or `platform_killed`, else `InvalidRequest`."""
        ...

    async def delete_many(
        self, sandbox_ids: Sequence[str], *, project: str, cause: Cause = Cause.DELETED
    ) -> list[DeleteItem]:
        """End several, paced; results in the order given, other projects' and unknown ones as `sandbox_not_found`."""
        ...

    def usage(self, sandbox_id: str) -> Usage:
        """Its counters now."""
        ...

    def node(self) -> NodeInfo: ...

    # --- network ----------------------------------------------------------------------------------------------------

    def network(self, sandbox_id: str) -> NetworkInfo:
        """What it may reach now, and what it did."""
        ...

    async def set_network(self, sandbox_id: str, network: Network, *, merge: bool = False) -> NetworkInfo:
        """Another policy, at once: connections that it doesn't allow are cut. On record when this returns. `merge`:
        laid over the one it has. Raises `InvalidRequest`, `Unsupported`."""
        ...

    # --- commands ---------------------------------------------------------------------------------------------------

    async def exec(self, sandbox_id: str, spec: ExecSpec, *, patient: bool = False) -> Execution:
        """Start a command, or attach to the one of the same key, or give its result as it is on record: also after its
        release and after the sandbox's end. `patient`: its result is what counts, that it started
        may be known a moment later, which is cheaper.

        Raises `InvalidRequest`, `Conflict` (the key was used for a different request), `QuotaExceeded` (too many
        operations).
        """
        ...

    async def attach(self, sandbox_id: str, key: str) -> Execution:
        """The command of a key, or its result, as for `exec`. Raises `NotFound`."""
        ...

    async def attach_pid(self, sandbox_id: str, pid: int) -> Execution:
        """The running command of this pid inside, also one that an earlier edge started. Raises
        `NotFound`."""
        ...

    def processes(self, sandbox_id: str) -> list[ProcessInfo]:
        """The running commands that this edge can attach to, oldest first."""
        ...

    async def resize(self, sandbox_id: str, key: str, cols: int, rows: int) -> None:
        """The size of a command's terminal (see `PtySize`). Nothing where it has ended. Raises `InvalidRequest` where
        it has no terminal, `NotFound`."""
        ...

    async def signal(self, sandbox_id: str, key: str, signal: int, scope: str = "leader") -> None:
        """`scope`: "leader", "group", or "all" (SIGKILL only: everything that it started). No error where it has ended
        already.

        Raises `InvalidRequest`, `NotFound`.
        """
        ...

    async def release(self, sandbox_id: str, key: str) -> None:
        """Free what the guest keeps of the command; its result stays on record. A running one is ended whole.
        Idempotent."""
        ...

    # --- files ------------------------------------------------------------------------------------------------------
    # `user`: who does it inside (None: the sandbox's default user). All raise `FileMissing`, `FileError` (errno and
    # path in
    # `details`), `PermissionDenied`, `InvalidRequest`.

    def read_file(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """Content in chunks, with back-pressure. An error about the file comes before the first chunk."""
        ...

    async def write_file(
        self,
        sandbox_id: str,
        path: bytes,
        data: AsyncIterable[bytes],
        *,
        user: str | None = None,
        mode: int | None = None,
        parents: bool = False,
        append: bool = False,
        exclusive: bool = False,
    ) -> int:
        """Write a file atomically (unless `append`); returns the bytes written. Where `data` raises, or the caller is
        cancelled, the file is as it was. `mode`: permission bits of a new file (None: 0644)."""
        ...

    async def stat_file(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, follow: bool = False
    ) -> FileInfo: ...

    async def list_files(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, depth: int = 1
    ) -> list[FileInfo]:
        """Entries below a directory, names relative to it."""
        ...

    async def move_file(
        self, sandbox_id: str, path: bytes, to: bytes, *, user: str | None = None, exclusive: bool = False
    ) -> None: ...

    async def make_directory(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, mode: int | None = None, parents: bool = False
    ) -> None: ...

    async def remove_file(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, recursive: bool = False
    ) -> None: ...

    async def watch(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, recursive: bool = False
    ) -> FileWatch:
        """Watch a directory; returns when nothing that happens from now on is missed. Raises `QuotaExceeded` where the
        tree has more directories, or the sandbox more watches, than it may, else as the other file calls."""
        ...

    # --- ports ------------------------------------------------------------------------------------------------------

    async def connect(self, sandbox_id: str, port: int | bytes) -> PortStream:
        """Connect to a TCP port on the loopback inside, or to the unix socket of a path. Raises `PortClosed` where
        nothing listens there (or doesn't answer within 10 s), `InvalidRequest`, `QuotaExceeded`."""
        ...

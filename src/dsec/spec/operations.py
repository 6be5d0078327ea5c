"""What the edge asks of a guest and hears back, as values: the Python face of native/common/wire.h."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from msgspec import Struct


class Kind(IntEnum):
    """What an operation does."""

    EXEC = 0
    READ = 1
    WRITE = 2
    STAT = 3
    LIST = 4
    MOVE = 5
    REMOVE = 6
    MKDIR = 7
    WATCH = 8
    CONNECT = 9
    WAY_OUT = 10
    """The edge's own: no caller's, and nothing that keeps a sandbox busy."""
    LOOK = 11
    """The same."""


class ExecFlag(IntFlag):
    STDIN = 1
    KILL_LEFTOVERS = 2
    MERGE = 4
    PTY = 8
    PATIENT = 16


class FileFlag(IntFlag):
    PARENTS = 1
    RECURSIVE = 2
    FOLLOW = 4
    EXCLUSIVE = 8
    APPEND = 16


class EndKind(IntEnum):
    """How an operation ended, as the guest saw it."""

    EXITED = 0
    SIGNALED = 1
    START_FAILED = 2
    TIMEOUT = 3
    OUTPUT_LIMIT = 4
    KILLED = 5


class Stage(IntEnum):
    """Where a start failed."""

    NONE = 0
    USER = 1
    CWD = 2
    EXEC = 3
    FORK = 4
    CGROUP = 5
    FILE = 6
    REQUEST = 7
    TERMINAL = 8
    CONNECT = 9
    WAY_OUT = 10
    LOOK = 11


class OpRequest(Struct, frozen=True, kw_only=True):
    """One operation for a guest. Strings are bytes: Linux names have no encoding."""

    kind: Kind = Kind.EXEC
    argv: tuple[bytes, ...] = ()
    env: tuple[bytes, ...] = ()
    cwd: bytes | None = None
    user: bytes | None = None
    timeout_ms: int | None = None
    output_cap: int | None = None
    key: bytes | None = None
    flags: ExecFlag = ExecFlag(0)
    path: bytes | None = None
    path2: bytes | None = None
    mode: int | None = None
    offset: int | None = None
    length: int | None = None
    depth: int | None = None
    file_flags: FileFlag = FileFlag(0)
    open_files: int | None = None
    pty_size: int | None = None
    """Columns << 16 | rows, with ExecFlag.PTY."""
    port: int | None = None


class OpEnd(Struct, frozen=True, kw_only=True):
    """The guest's EXIT: `code` is an exit code, a signal or an errno, by `kind`."""

    kind: EndKind
    code: int = 0
    stage: Stage = Stage.NONE
    message: str = ""
    truncated: bool = False
    cpu_us: int = 0
    wall_us: int = 0
    max_rss_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    dropped_bytes: int = 0


class Chunk(Struct, frozen=True):
    """Output of an operation: `data` starts at byte `offset` of its stream."""

    stderr: bool
    offset: int
    data: bytes

"""What a caller asks for and what it gets back: the one set of types for SDK, wire, records and API schema.

Owns: `SandboxSpec`, `ExecSpec`, `ExecResult`, `SandboxInfo`, `FileInfo`, and their defaults (published as a table in
docs/SPECIFICATION.md; a test compares). Values are frozen; units come last in a name; unknown fields are refused.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from dsec.spec.causes import Cause
from dsec.spec.network import Network
from dsec.spec.tripwires import Rule, SetName

MIB = 1 << 20
GIB = 1 << 30

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/@:+-]{0,199}$(?!\n)"
Name = Annotated[str, Meta(pattern=NAME_PATTERN, description="letters, digits and ._/@:+- , at most 200")]
Seconds = Annotated[float, Meta(gt=0, le=366 * 86400.0)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Key = Annotated[str, Meta(min_length=1, max_length=120)]
Feature = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$(?!\n)")]


class State(StrEnum):
    """A sandbox's life; the transitions are the table in dsec.lifecycle."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    ENDING = "ending"
    ENDED = "ended"


class PausedBy(StrEnum):
    """Who paused a sandbox. Any request resumes one, but what a tripwire paused only who looked at it."""

    CALLER = "caller"
    TTL = "ttl"
    LEASE = "lease"
    TRIPWIRE = "tripwire"


class Paused(Struct, frozen=True, omit_defaults=True):
    """Since when a sandbox stands still, and why."""

    at: float
    by: PausedBy = PausedBy.CALLER
    rule: str = ""
    """Of the tripwire."""


class SandboxSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sandbox to create.

    Fields whose feature is not built yet (`gpus`, other backends) are refused with
    `unsupported` when they are set, never ignored.
    """

    environment: Name
    backend: Literal["container", "microvm", "vm", "fncall"] = "container"
    cpus: Annotated[float, Meta(gt=0, le=4096)] = 1.0
    memory_bytes: Annotated[int, Meta(ge=16 * MIB, le=1 << 46)] = 1 * GIB
    disk_bytes: Annotated[int, Meta(ge=1 * MIB, le=1 << 46)] = 4 * GIB
    pids: Annotated[int, Meta(ge=4, le=1 << 20)] = 512
    open_files: Annotated[int, Meta(ge=16, le=1 << 20)] = 4096
    output_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 64 * MIB
    """Default cap of one command's output, both streams together; beyond it the command is ended (`output_limit`)."""
    ttl_s: Seconds | None = 4 * 3600.0
    """The sandbox ends this long after it was created; None: never."""
    on_ttl: Literal["end", "pause"] = "end"
    """What a TTL does that passes, also the idle one: a paused sandbox waits, without a deadline, for the next request,
    which gives it a whole `ttl_s` again."""
    idle_ttl_s: Seconds | None = None
    """Ends after this long without a request or running command. Off: a sandbox that waits for a model never expires by
    itself."""
    command_timeout_s: Seconds | None = 3600.0
    """Default wall time of one command, then it is ended whole (`command_timeout`)."""
    layers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=400)] = []
    """Layers above the environment's, by name or digest, top first. In answers: all layers, as digests."""
    env: dict[str, str] = {}
    """Laid over the environment's."""
    user: Annotated[str, Meta(max_length=100)] = ""
    """Empty: the environment's, else root."""
    workdir: str = ""
    """Empty: the environment's, else `/`."""
    hostname: Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$(?!\n)")] | None = None
    no_new_privs: bool = False
    labels: dict[str, str] = {}
    run: Name | None = None
    name: Key | None = None
    """A key of the caller's, unique within its run (or its project): creating it again returns the sandbox that is
    there."""
    cpu_class: Literal["latency", "batch"] | None = None
    """`batch`: it runs on what no other sandbox wants of the CPUs. `latency` is as without."""
    sync: Literal["batch", "always"] = "batch"
    """When entries of its trajectory are on disk, for when the machine itself dies: within 50 ms, or `always` before
    the answer."""
    network: Network | None = None
    """What it may reach, by named permission (docs/NETWORK.md); absent: nothing."""
    gpus: int | None = None
    require_kvm: bool = False
    """Of virtual machines: refuse a node that would only imitate the CPU (`SandboxInfo.accel`)."""
    require_features: Annotated[list[Feature], Meta(max_length=32)] = []
    """What the node's kernel has to have, as `NodeInfo.features` names it; a cluster chooses a node that has it all."""
    tripwires: Annotated[list[SetName | Rule], Meta(max_length=64)] = []
    """What is to be noticed from outside: names of rule sets and rules of one's own (docs/TRIPWIRES.md)."""
    public_ports: Annotated[list[Port], Meta(max_length=64)] | bool = False
    """Ports that the port proxy serves to whoever knows the host name: all, none, or these. The others take a token."""


class PortAccess(Struct, frozen=True, kw_only=True):
    """How a sandbox's ports are reached by host name: `{port}-{id}.{domain}`."""

    domain: str
    """With a port where it isn't the scheme's own."""
    token: str
    """Admits to the sandbox's ports and to nothing else: the header X-Dsec-Token, or once `?dsec_token=` in a
    browser."""
    public: list[int] | bool = False
    """Ports that need no token, as in `SandboxSpec.public_ports`."""


class PtySize(Struct, frozen=True, forbid_unknown_fields=True):
    """The size of a terminal in characters. 0 means 80 columns, 24 rows (in a resize: as it is); more than 4,096 means
    4,096."""

    cols: Annotated[int, Meta(ge=0, le=65535)] = 80
    rows: Annotated[int, Meta(ge=0, le=65535)] = 24


class ExecSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One command. Nothing is passed through a shell; say `["sh", "-c", ...]` where one is wanted."""

    argv: Annotated[list[str], Meta(min_length=1)]
    env: dict[str, str] = {}
    """Laid over the sandbox's own."""
    cwd: str | None = None
    user: str | None = None
    stdin: bool = False
    """Keep stdin open for data; else it is /dev/null."""
    command_timeout_s: Seconds | None = None
    output_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    merge_stderr: bool = False
    pty: PtySize | None = None
    """Run on a terminal of its own (TERM: xterm-256color unless `env` says another): stdin is open and is what is
    typed, all output is stdout, the command leads its session. Its background processes lose the terminal when it
    exits."""
    kill_leftovers: bool = False
    """When the command exits, end the background processes that it left too."""
    key: Key | None = None
    """Idempotency key: the same key again attaches to the command or returns its result; it never runs twice."""


class ExecStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a command ended, without its output."""

    exit_code: int
    """0..255; 128 + signal when it was ended by a signal; 127 / 126 for a start that failed, as shells say it."""
    cause: Cause
    infra: bool = False
    signal: int | None = None
    message: str = ""
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    dropped_bytes: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    throttled_s: float = 0.0
    max_rss_bytes: int = 0


class SandboxInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sandbox as the server sees it."""

    id: str
    state: State
    spec: SandboxSpec
    created_at: float
    """Seconds since the epoch, as all times here."""
    expires_at: float | None = None
    """While it is paused: when it would, had it gone on since `paused.at`."""
    paused: Paused | None = None
    ended_at: float | None = None
    cause: Cause | None = None
    infra: bool = False
    message: str = ""
    create_ms: float | None = None
    """From admission to a guest that answers."""
    queue_ms: float = 0.0
    accel: str = ""
    """What runs a virtual machine's code: `kvm`, or `tcg` (an imitation, many times slower)."""
    token: str | None = None
    """Grants access to this sandbox alone; returned by create only."""


class FileInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One directory entry. Names are bytes on Linux: where one isn't UTF-8, `name` is a view with replacement
    characters and `name_b64` holds its bytes."""

    name: str
    type: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
    size: int
    mode: int
    uid: int
    gid: int
    nlink: int
    mtime: float
    target: str | None = None
    name_b64: str | None = None


class ProcessInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One running command of a sandbox."""

    key: str
    """Names it in the other calls; `~N` where its caller gave none, or an earlier edge knew it."""
    pid: int
    """Inside the sandbox."""
    argv: list[str] = []
    """Empty where an earlier edge started it."""
    started_at: float = 0.0
    pty: bool = False


class FileEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened below a watched directory. Paths are relative to it; empty: it itself. Names that aren't UTF-8 as
    in `FileInfo`."""

    kind: Literal["create", "write", "remove", "rename", "chmod", "overflow"]
    """`create`: also moved in from elsewhere; `remove`: also moved out; `chmod`: mode, owner or times; `overflow`:
    events were lost, look again."""
    path: str = ""
    from_path: str | None = None
    """Before a `rename`."""
    directory: bool = False
    path_b64: str | None = None
    from_path_b64: str | None = None


_ENV_NAME = re.compile(r"[^=\0]+")


def invalid_exec(spec: ExecSpec) -> str | None:
    """Why the kernel could never run this, or None: what the type alone doesn't say (NUL bytes, sizes)."""
    argv = spec.argv
    if not spec.env and spec.cwd is None and spec.user is None and argv[0]:  # most commands: no list is made of it
        text = "\0".join(argv)
        if len(text) < 16 << 10 and text.count("\0") == len(argv) - 1 and text.isascii():
            return None
    strings = [*spec.argv, *(f"{k}={v}" for k, v in spec.env.items())]
    if any("\0" in s for s in (*strings, spec.cwd or "", spec.user or "")):
        return "argv, env, cwd and user cannot hold NUL bytes"
    if "" in (spec.cwd, spec.user):
        return "cwd and user cannot be empty; leave them out for the sandbox's own"
    if not spec.argv[0]:
        return "argv[0] is empty"
    if not all(_ENV_NAME.fullmatch(k) for k in spec.env):
        return "an environment variable's name is empty or holds '='"
    sizes = [len(s.encode("utf-8", "surrogateescape")) + 1 for s in strings]
    if max(sizes) > 128 * 1024:
        return "one argument or variable is over 128 KiB, the kernel's limit"
    if sum(sizes) > 1536 * 1024:
        return "argv and env together are over 1.5 MiB; write large data to a file instead"
    return None

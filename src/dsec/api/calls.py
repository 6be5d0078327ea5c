"""What the OpenAPI document says of the native calls that are served raw; Litestar describes the others.

Owns `Call`, in which E2B's and SWE-ReX's calls (`dsec.api.e2b.calls`, `dsec.api.swerex_calls`) are described too, and
the types of arguments. A test sends each of them what these types allow and what they don't.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from dsec.api.batch import BatchRequest, Deleted, DeleteRequest, ExecBatch, ExecResult, PauseRequest, PauseResults
from dsec.api.exchange import MAX_INT
from dsec.api.exec import Processes, ReleaseRequest, SignalRequest, StdinTaken
from dsec.api.files import Listing, Written
from dsec.api.sessions import MAX_LOG_BYTES, SessionList
from dsec.api.streams import WatchItem
from dsec.edge.kept import BatchItem
from dsec.edge.observed import Readiness
from dsec.spec.causes import Cause
from dsec.spec.events import SandboxEvent
from dsec.spec.functions import FunctionBatch, FunctionResult
from dsec.spec.grading import Verdict, VerifySpec
from dsec.spec.judging import JudgeLine, JudgeSpec
from dsec.spec.sandbox import ExecSpec, FileInfo, Key, PtySize, SandboxInfo, SandboxSpec
from dsec.spec.sessions import (
    SessionCommand,
    SessionInfo,
    SessionInput,
    SessionInterrupt,
    SessionResult,
    SessionSpec,
)
from dsec.spec.snapshots import SnapshotInfo, SnapshotRequest
from dsec.spec.trajectory import Entry, RebuildRequest, Rebuilt
from dsec.wire.exec_stream import MEDIA_TYPE

JSON, OCTETS, NDJSON, FORM = (
    "application/json",
    "application/octet-stream",
    "application/x-ndjson",
    "multipart/form-data",
)


class Call(Struct, frozen=True, kw_only=True):
    """One raw call."""

    method: str
    path: str
    summary: str
    query: tuple[str, ...] = ()
    """Names in `ARGUMENTS`."""
    arguments: dict[str, Any] = {}
    """Further ones of the query, by their types."""
    required: tuple[str, ...] = ("path", "to")
    """Arguments of the query that must be there."""
    headers: dict[str, Any] = {}
    takes: tuple[tuple[str, Any], ...] = ()
    """Media type and JSON type (None: bytes; a dict: a schema)."""
    optional: bool = False
    """The body may be left out."""
    example: Any = None
    """Of a JSON body."""
    gives: tuple[str, Any] | None = None
    """None: no content."""
    statuses: tuple[int, ...] = ()
    """Of success; empty: 200, or 204 where there is no content."""
    security: tuple[str, ...] | None = None
    """Schemes, one of which is needed; None: the document's; empty: none."""
    family: str = "dsec"
    """Whose form errors have."""

    def asked(self) -> dict[str, Any]:
        """All arguments of the query, with their types."""
        return {name: ARGUMENTS[name] for name in self.query} | self.arguments


Offset = Annotated[int, Meta(ge=0, le=MAX_INT)]
_Path = Annotated[str, Meta(pattern="^/", examples=["/tmp", "/tmp/new"])]
ARGUMENTS: dict[str, Any] = {
    "after": Offset,
    "append": bool,
    "cause": Cause,
    "deadline_s": Annotated[float, Meta(gt=0, le=86400)],
    "depth": Annotated[int, Meta(ge=1, le=1000)],
    "eof": bool,
    "exclusive": bool,
    "follow": bool,
    "hold_ms": Offset,
    "key": Key,
    "length": Offset,
    "limit": Annotated[int, Meta(ge=1, le=MAX_LOG_BYTES)],
    "mode": Annotated[str, Meta(pattern=r"^[0-7]{1,4}$(?!\n)")],
    "offset": Offset,
    "parents": bool,
    "path": _Path,
    "recursive": bool,
    "stderr_from": Offset,
    "stdout_from": Offset,
    "to": _Path,
    "user": Annotated[str, Meta(min_length=1, max_length=100)],
}

METRICS = "text/plain"
_ONE = "/v1/sandboxes/{sandbox_id}"
_FRAMES = (MEDIA_TYPE, None)
CALLS = (
    Call(
        method="post",
        path="/v1/sandboxes",
        summary="Create a sandbox, or return the one of this name or key",
        query=("deadline_s", "key"),
        takes=((JSON, SandboxSpec),),
        gives=(JSON, SandboxInfo),
        statuses=(200, 201),
    ),
    Call(method="get", path=_ONE, summary="One sandbox, also for a day after its end", gives=(JSON, SandboxInfo)),
    Call(
        method="delete",
        path=_ONE,
        summary="End a sandbox; again: the same answer",
        query=("cause",),
        gives=(JSON, SandboxInfo),
    ),
    Call(
        method="post",
        path="/v1/sandboxes:batch",
        summary="Create many sandboxes; a line an item, as it is ready",
        query=("deadline_s", "key"),
        takes=((JSON, BatchRequest),),
        gives=(NDJSON, BatchItem),
    ),
    Call(
        method="post",
        path="/v1/sandboxes:delete",
        summary="End many sandboxes",
        query=("cause",),
        takes=((JSON, DeleteRequest),),
        gives=(JSON, Deleted),
    ),
    Call(
        method="post",
        path="/v1/sandboxes:pause",
        summary="Pause many sandboxes: by ids, or all of a run and with labels",
        takes=((JSON, PauseRequest),),
        example={"run": "grpo-42"},
        gives=(JSON, PauseResults),
    ),
    Call(
        method="post",
        path="/v1/sandboxes:resume",
        summary="Let many sandboxes go on: by ids, or all of a run and with labels",
        takes=((JSON, PauseRequest),),
        example={"run": "grpo-42"},
        gives=(JSON, PauseResults),
    ),
    Call(
        method="post",
        path="/v1/exec:batch",
        summary="Run a command in each of many sandboxes; a line a command, as it ends; bytes are base64",
        takes=((JSON, ExecBatch),),
        gives=(NDJSON, ExecResult),
    ),
    Call(
        method="post",
        path=f"{_ONE}/verify",
        summary="Judge what was changed, in fresh sandboxes that the agent never touched; bytes are base64",
        takes=((JSON, VerifySpec),),
        gives=(JSON, Verdict),
    ),
    Call(
        method="post",
        path="/v1/judge",
        summary="Judge a program by test cases; a line a case as it ends, the verdict last",
        takes=((JSON, JudgeSpec),),
        gives=(NDJSON, JudgeLine),
    ),
    Call(
        method="post",
        path="/v1/functions",
        summary="Call a function many times; a result a line as they come. Takes msgpack too: docs/FUNCTIONS.md",
        takes=((JSON, FunctionBatch),),
        gives=(NDJSON, FunctionResult),
    ),
    Call(
        method="get",
        path="/v1/named/{run}/{name}",
        summary="The live sandbox of a name (run `-`: none); `/` in them is %2F",
        gives=(JSON, SandboxInfo),
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec",
        summary="Run a command, or attach to the one of the same key; frames: see ServerFrames",
        query=("hold_ms",),
        takes=((JSON, ExecSpec), _FRAMES),
        example={"argv": ["echo", "hello"], "key": "k1"},
        gives=_FRAMES,
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec:release",
        summary="Forget commands and their output",
        takes=((JSON, ReleaseRequest),),
    ),
    Call(
        method="get",
        path=f"{_ONE}/exec/{{key}}",
        summary="Attach to a command again, from byte offsets of its streams on",
        query=("stdout_from", "stderr_from", "hold_ms"),
        gives=_FRAMES,
    ),
    Call(method="delete", path=f"{_ONE}/exec/{{key}}", summary="Forget a command; a running one is ended whole"),
    Call(
        method="post",
        path=f"{_ONE}/exec/{{key}}/stdin",
        summary="Send stdin; bytes before `offset` + what was taken already are dropped; `eof` closes it",
        query=("offset", "eof"),
        takes=((OCTETS, None),),
        optional=True,
        gives=(JSON, StdinTaken),
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec/{{key}}/signal",
        summary="Signal a command",
        takes=((JSON, SignalRequest),),
        optional=True,
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec/{{key}}/resize",
        summary="The size of a command's terminal",
        takes=((JSON, PtySize),),
    ),
    Call(method="get", path=f"{_ONE}/exec", summary="The running commands", gives=(JSON, Processes)),
    Call(
        method="post",
        path=f"{_ONE}/sessions",
        summary="Open a shell session, or find the one of this name",
        takes=((JSON, SessionSpec),),
        example={"name": "work"},
        optional=True,
        gives=(JSON, SessionInfo),
        statuses=(200, 201),
    ),
    Call(method="get", path=f"{_ONE}/sessions", summary="Sessions used so far", gives=(JSON, SessionList)),
    Call(method="get", path=f"{_ONE}/sessions/{{name}}", summary="One session", gives=(JSON, SessionInfo)),
    Call(method="delete", path=f"{_ONE}/sessions/{{name}}", summary="End a session and forget its log"),
    Call(
        method="post",
        path=f"{_ONE}/sessions/{{name}}/run",
        summary="Run a command in a session's shell and wait for its end",
        takes=((JSON, SessionCommand),),
        example={"command": "echo hello"},
        gives=(JSON, SessionResult),
    ),
    Call(
        method="post",
        path=f"{_ONE}/sessions/{{name}}/input",
        summary="Type something for the program in the foreground",
        takes=((JSON, SessionInput),),
    ),
    Call(
        method="post",
        path=f"{_ONE}/sessions/{{name}}/interrupt",
        summary="Stop the command that runs: ^C, then SIGKILL",
        takes=((JSON, SessionInterrupt),),
        optional=True,
        gives=(JSON, SessionInfo),
    ),
    Call(
        method="get",
        path=f"{_ONE}/sessions/{{name}}/log",
        summary="A session's output from an offset on; `x-dsec-next-offset` says where to go on",
        query=("offset", "limit"),
        gives=(OCTETS, None),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files",
        summary="Read a file",
        query=("path", "user", "offset", "length"),
        gives=(OCTETS, None),
    ),
    Call(
        method="put",
        path=f"{_ONE}/files",
        summary="Write a file, atomically unless `append`; `mode` is octal",
        query=("path", "user", "mode", "parents", "append", "exclusive"),
        takes=((OCTETS, None),),
        optional=True,
        gives=(JSON, Written),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files/stat",
        summary="About a file",
        query=("path", "user", "follow"),
        gives=(JSON, FileInfo),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files/list",
        summary="Entries below a directory",
        query=("path", "user", "depth"),
        gives=(JSON, Listing),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files/watch",
        summary="What happens in a directory, a line an event, from the answer's beginning until the directory's end",
        query=("path", "user", "recursive"),
        gives=(NDJSON, WatchItem),
    ),
    Call(
        method="post",
        path=f"{_ONE}/snapshot",
        summary="Make an environment of what a sandbox has written; says what was removed and what was kept",
        takes=((JSON, SnapshotRequest),),
        example={"name": "solved@1"},
        gives=(JSON, SnapshotInfo),
        statuses=(201,),
    ),
    Call(
        method="get",
        path=f"{_ONE}/events",
        summary="What happened to a sandbox, a line an event above the number `after`; `follow`: until it has ended",
        query=("follow", "after"),
        gives=(NDJSON, SandboxEvent),
    ),
    Call(
        method="get",
        path=f"{_ONE}/trajectory",
        summary="What was done to a sandbox and what came of it, a line an entry, hash-chained, above `after`",
        query=("follow", "after"),
        gives=(NDJSON, Entry),
    ),
    Call(
        method="post",
        path="/v1/sandboxes:rebuild",
        summary="Make a sandbox again from its trajectory; says where outcomes first differ",
        takes=((JSON, RebuildRequest),),
        gives=(JSON, Rebuilt),
    ),
    Call(
        method="get",
        path="/readyz",
        summary="Whether sandboxes can be made now; 503: not",
        gives=(JSON, Readiness),
        statuses=(200, 503),
        security=(),
    ),
    Call(
        method="get",
        path="/metrics",
        summary="Counters and histograms of the node, for Prometheus",
        gives=(METRICS, None),
    ),
    Call(method="post", path=f"{_ONE}/files/move", summary="Rename a file", query=("path", "to", "user", "exclusive")),
    Call(
        method="post", path=f"{_ONE}/files/mkdir", summary="Make a directory", query=("path", "user", "mode", "parents")
    ),
    Call(method="post", path=f"{_ONE}/files/remove", summary="Remove a file", query=("path", "user", "recursive")),
)

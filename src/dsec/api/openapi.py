"""The OpenAPI document: Litestar's part for the control routes, and the same types for the calls that are served raw.

Owns the descriptions of the raw calls; a test compares them with the routes that answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Litestar
from msgspec import Struct

from dsec.api.batch import BatchRequest, Deleted, DeleteRequest, ExecBatch, ExecResult
from dsec.api.exec import Processes, ReleaseRequest, SignalRequest, Started, StdinTaken
from dsec.api.files import Listing, Written
from dsec.api.sessions import SessionList
from dsec.api.streams import WatchItem
from dsec.edge.client import BatchItem
from dsec.edge.observed import Readiness
from dsec.errors import ErrorBody
from dsec.spec.events import SandboxEvent
from dsec.spec.sandbox import ExecSpec, ExecStatus, FileInfo, PtySize, SandboxInfo
from dsec.spec.sessions import (
    SessionCommand,
    SessionInfo,
    SessionInput,
    SessionInterrupt,
    SessionResult,
    SessionSpec,
)
from dsec.wire.exec_stream import MEDIA_TYPE

_JSON, _OCTETS, _NDJSON = "application/json", "application/octet-stream", "application/x-ndjson"
_REF = "#/components/schemas/{name}"


class Call(Struct, frozen=True, kw_only=True):
    """One raw call."""

    method: str
    path: str
    summary: str
    query: tuple[str, ...] = ()
    takes: tuple[tuple[str, type | None], ...] = ()
    """Media type and JSON type (None: bytes)."""
    gives: tuple[str, type | None] | None = None
    """None: 204."""


_ONE = "/v1/sandboxes/{sandbox_id}"
_FRAMES = (MEDIA_TYPE, None)
CALLS = (
    Call(
        method="post",
        path="/v1/sandboxes:batch",
        summary="Create many sandboxes; a line an item, as it is ready",
        query=("deadline_s", "key"),
        takes=((_JSON, BatchRequest),),
        gives=(_NDJSON, BatchItem),
    ),
    Call(
        method="post",
        path="/v1/sandboxes:delete",
        summary="End many sandboxes",
        query=("cause",),
        takes=((_JSON, DeleteRequest),),
        gives=(_JSON, Deleted),
    ),
    Call(
        method="post",
        path="/v1/exec:batch",
        summary="Run a command in each of many sandboxes; a line a command, as it ends; bytes are base64",
        takes=((_JSON, ExecBatch),),
        gives=(_NDJSON, ExecResult),
    ),
    Call(
        method="get",
        path="/v1/named/{run}/{name}",
        summary="The live sandbox of a name (run `-`: none); `/` in them is %2F",
        gives=(_JSON, SandboxInfo),
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec",
        summary="Run a command, or attach to the one of the same key; frames: see ServerFrames",
        query=("hold_ms",),
        takes=((_JSON, ExecSpec), _FRAMES),
        gives=_FRAMES,
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec:release",
        summary="Forget commands and their output",
        takes=((_JSON, ReleaseRequest),),
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
        takes=((_OCTETS, None),),
        gives=(_JSON, StdinTaken),
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec/{{key}}/signal",
        summary="Signal a command",
        takes=((_JSON, SignalRequest),),
    ),
    Call(
        method="post",
        path=f"{_ONE}/exec/{{key}}/resize",
        summary="The size of a command's terminal",
        takes=((_JSON, PtySize),),
    ),
    Call(method="get", path=f"{_ONE}/exec", summary="The running commands", gives=(_JSON, Processes)),
    Call(
        method="post",
        path=f"{_ONE}/sessions",
        summary="Open a shell session, or find the one of this name",
        takes=((_JSON, SessionSpec),),
        gives=(_JSON, SessionInfo),
    ),
    Call(method="get", path=f"{_ONE}/sessions", summary="Sessions used so far", gives=(_JSON, SessionList)),
    Call(method="get", path=f"{_ONE}/sessions/{{name}}", summary="One session", gives=(_JSON, SessionInfo)),
    Call(method="delete", path=f"{_ONE}/sessions/{{name}}", summary="End a session and forget its log"),
    Call(
        method="post",
        path=f"{_ONE}/sessions/{{name}}/run",
        summary="Run a command in a session's shell and wait for its end",
        takes=((_JSON, SessionCommand),),
        gives=(_JSON, SessionResult),
    ),
    Call(
        method="post",
        path=f"{_ONE}/sessions/{{name}}/input",
        summary="Type something for the program in the foreground",
        takes=((_JSON, SessionInput),),
    ),
    Call(
        method="post",
        path=f"{_ONE}/sessions/{{name}}/interrupt",
        summary="Stop the command that runs: ^C, then SIGKILL",
        takes=((_JSON, SessionInterrupt),),
        gives=(_JSON, SessionInfo),
    ),
    Call(
        method="get",
        path=f"{_ONE}/sessions/{{name}}/log",
        summary="A session's output from an offset on; `x-dsec-next-offset` says where to go on",
        query=("offset", "limit"),
        gives=(_OCTETS, None),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files",
        summary="Read a file",
        query=("path", "user", "offset", "length"),
        gives=(_OCTETS, None),
    ),
    Call(
        method="put",
        path=f"{_ONE}/files",
        summary="Write a file, atomically unless `append`; `mode` is octal",
        query=("path", "user", "mode", "parents", "append", "exclusive"),
        takes=((_OCTETS, None),),
        gives=(_JSON, Written),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files/stat",
        summary="About a file",
        query=("path", "user", "follow"),
        gives=(_JSON, FileInfo),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files/list",
        summary="Entries below a directory",
        query=("path", "user", "depth"),
        gives=(_JSON, Listing),
    ),
    Call(
        method="get",
        path=f"{_ONE}/files/watch",
        summary="What happens in a directory, a line an event, from the answer's beginning until the directory's end",
        query=("path", "user", "recursive"),
        gives=(_NDJSON, WatchItem),
    ),
    Call(
        method="get",
        path=f"{_ONE}/events",
        summary="What happened to a sandbox, a line an event above the number `after`; `follow`: until it has ended",
        query=("follow", "after"),
        gives=(_NDJSON, SandboxEvent),
    ),
    Call(
        method="get",
        path="/readyz",
        summary="Whether sandboxes can be made now; 503: not",
        gives=(_JSON, Readiness),
    ),
    Call(method="post", path=f"{_ONE}/files/move", summary="Rename a file", query=("path", "to", "user", "exclusive")),
    Call(
        method="post", path=f"{_ONE}/files/mkdir", summary="Make a directory", query=("path", "user", "mode", "parents")
    ),
    Call(method="post", path=f"{_ONE}/files/remove", summary="Remove a file", query=("path", "user", "recursive")),
)


def document(control: Litestar) -> dict[str, Any]:
    """The whole document."""
    result: dict[str, Any] = control.openapi_schema.to_schema()
    types = {kind for call in CALLS for _, kind in (*call.takes, *([call.gives] if call.gives else []))}
    named = sorted((kind for kind in types | {ErrorBody, Started, ExecStatus} if kind is not None), key=str)
    _, components = msgspec.json.schema_components(named, ref_template=_REF)
    schemas = result.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in components.items():
        schemas.setdefault(name, schema)
    schemas["ServerFrames"] = {
        "description": "u8 kind, u32 little-endian length, payload. From the server: 0 Started (JSON), 1 stdout, "
        "2 stderr, then one of 3 ExecStatus (JSON), 4 ErrorBody (JSON). From the client: 0 ExecSpec (JSON), 1 stdin, "
        "2 stdin end.",
        "type": "string",
        "format": "binary",
    }
    result["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    result["security"] = [{"bearer": []}]
    error = {"description": "Any error", "content": {_JSON: {"schema": _ref(ErrorBody)}}}
    for call in CALLS:
        result["paths"].setdefault(call.path, {})[call.method] = _operation(call)
    for path in result["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict) and "responses" in operation:
                operation["responses"]["default"] = error
    return result


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _body(media: str, kind: type | None) -> dict[str, Any]:
    if kind is not None:
        return {media: {"schema": _ref(kind)}}
    if media == MEDIA_TYPE:
        return {media: {"schema": {"$ref": _REF.format(name="ServerFrames")}}}
    return {media: {"schema": {"type": "string", "format": "binary"}}}


def _operation(call: Call) -> dict[str, Any]:
    inside = [part[1:-1] for part in call.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in inside]
    parameters += [
        {"name": name, "in": "query", "required": name in ("path", "to"), "schema": {"type": "string"}}
        for name in call.query
    ]
    operation: dict[str, Any] = {"summary": call.summary, "parameters": parameters, "responses": {}}
    if call.takes:
        content: dict[str, Any] = {}
        for media, kind in call.takes:
            content |= _body(media, kind)
        operation["requestBody"] = {"required": True, "content": content}
    if call.gives is None:
        operation["responses"]["204"] = {"description": "Done"}
    else:
        operation["responses"]["200"] = {"description": "The answer", "content": _body(*call.gives)}
    return operation

"""What the OpenAPI document says of E2B's calls: its REST paths, the plain files and the unary RPCs of its data plane.

The streams of the data plane (`process.Process/Start` and the like) are left out: envelopes are no form that OpenAPI
has. `docs/E2B.md` has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from dsec.api.calls import FORM, JSON, OCTETS, Call, Offset
from dsec.api.e2b import filesystem, models, network, process, snapshots, templates, watchers
from dsec.api.exchange import MAX_INT

_TARGET = {"E2b-Sandbox-Id": Annotated[str, Meta(min_length=1)], "E2b-Sandbox-Port": Literal["49983"]}
_ONE = "/sandboxes/{sandbox_id}"
_FILES = "/templates/{template}/files/{digest}"
_KEY = ("apiKey", "bearer")
_TOKEN = ("accessToken", "apiKey")
_Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
_Limit = Annotated[int, Meta(ge=1, le=100)]
_Moment = Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]
_LIST: dict[str, Any] = {
    "metadata": str,
    "state": Annotated[str, Meta(pattern=r"^(running|paused)(,(running|paused))*$(?!\n)")],
    "order": Literal["asc", "desc"],
    "startedAfter": _Instant,
    "template": str,
    "nextToken": str,
    "limit": _Limit,
}
_FILE = {
    "username": str,
    "signature": str,
    "signature_expiration": _Moment,
}
_UPLOAD = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "string", "format": "binary"}},
}


def _rest(method: str, path: str, summary: str, **more: Any) -> Call:
    return Call(method=method, path=path, summary=f"E2B: {summary}", family="e2b", security=_KEY, **more)


def _rpc(name: str, summary: str, takes: type, gives: Any, example: Any = None) -> Call:
    return Call(
        method="post",
        path=f"/{name}",
        summary=f"E2B: {summary}",
        family="rpc",
        security=_TOKEN,
        headers=_TARGET,
        takes=((JSON, takes),),
        optional=True,
        example=example,
        gives=(JSON, gives),
    )


def _creation(path: str) -> Call:
    return _rest(
        "post",
        path,
        "create a sandbox",
        takes=((JSON, models.NewSandbox),),
        gives=(JSON, models.Opened),
        statuses=(201,),
        headers={"Idempotency-Key": Annotated[str, Meta(max_length=120)]},
    )


def _connection(path: str) -> Call:
    return _rest(
        "post",
        path,
        "a running sandbox's token again, and a later end",
        takes=((JSON, models.Connect),),
        optional=True,
        gives=(JSON, models.Opened),
    )


CALLS = (
    _creation("/sandboxes"),
    _creation("/v2/sandboxes"),
    _rest("get", "/sandboxes", "running sandboxes", arguments=_LIST, gives=(JSON, list[models.Listed])),
    _rest("get", "/v2/sandboxes", "running sandboxes", arguments=_LIST, gives=(JSON, list[models.Listed])),
    _rest("get", _ONE, "one sandbox", gives=(JSON, models.Detailed)),
    _rest("delete", _ONE, "end a sandbox"),
    _connection(f"{_ONE}/connect"),
    _connection(f"/v2{_ONE}/connect"),
    _connection(f"{_ONE}/resume"),
    _rest(
        "put",
        f"{_ONE}/network",
        "replace what a sandbox may reach",
        takes=((JSON, network.NetworkUpdate),),
        optional=True,
    ),
    _rest("post", f"{_ONE}/pause", "freeze a sandbox; 409: it is paused"),
    _rest(
        "post",
        f"{_ONE}/fork",
        "children that begin with a sandbox's files",
        takes=((JSON, models.Fork),),
        optional=True,
        gives=(JSON, list[models.Forked]),
        statuses=(201,),
    ),
    _rest(
        "post",
        f"{_ONE}/snapshots",
        "a sandbox's files as a template",
        takes=((JSON, snapshots.TakeSnapshot),),
        optional=True,
        gives=(JSON, snapshots.Snapshot),
        statuses=(201,),
    ),
    _rest(
        "get",
        "/snapshots",
        "the project's snapshots",
        arguments={"sandboxID": str, "name": str, "limit": _Limit, "nextToken": str},
        gives=(JSON, list[snapshots.Snapshot]),
    ),
    _rest("post", f"{_ONE}/timeout", "a sandbox's end, from now", takes=((JSON, models.SetTimeout),)),
    _rest(
        "get",
        f"{_ONE}/metrics",
        "what a sandbox uses",
        arguments={"start": _Moment, "end": _Moment},
        gives=(JSON, list[models.Sample]),
    ),
    _rest("get", "/templates/aliases/{name}", "whether there is a template", gives=(JSON, models.TemplateAlias)),
    _rest(
        "post",
        "/v3/templates",
        "begin a template's build",
        takes=((JSON, templates.NewTemplate),),
        example={"name": "built"},
        gives=(JSON, templates.Requested),
        statuses=(202,),
    ),
    _rest("delete", "/templates/{template}", "forget a template, all its tags"),
    _rest(
        "get",
        _FILES,
        "where an archive of a build's files is to be put",
        gives=(JSON, templates.FileLink),
        statuses=(201,),
    ),
    Call(
        method="put",
        path=_FILES,
        summary="E2B: an archive of a build's files; a ticket stands in for the key",
        family="e2b",
        security=(),
        arguments={"ticket": Annotated[str, Meta(min_length=1)]},
        required=("ticket",),
        takes=((OCTETS, None),),
        gives=(JSON, process.Nothing),
    ),
    _rest(
        "post",
        "/v2/templates/{template}/builds/{build}",
        "start a template's build",
        takes=((JSON, templates.StartBuild),),
        example={"fromTemplate": "base", "steps": [{"type": "RUN", "args": ["true"]}]},
        gives=(JSON, process.Nothing),
        statuses=(202,),
    ),
    _rest(
        "get",
        "/templates/{template}/builds/{build}/status",
        "how a template's build goes",
        arguments={"logsOffset": Offset, "limit": _Limit, "level": str},
        gives=(JSON, templates.BuildStatus),
    ),
    Call(
        method="get",
        path="/health",
        summary="E2B: whether a sandbox runs",
        family="envd",
        security=_TOKEN,
        headers=_TARGET,
    ),
    Call(
        method="get",
        path="/files",
        summary="E2B: read a file; a signature stands in for the token",
        family="envd",
        security=_TOKEN,
        headers=_TARGET,
        arguments={"path": Annotated[str, Meta(min_length=1, examples=["/tmp/a"])], **_FILE},
        gives=(OCTETS, None),
    ),
    Call(
        method="post",
        path="/files",
        summary="E2B: write a file, or those of a form",
        family="envd",
        security=_TOKEN,
        headers=_TARGET,
        arguments={"path": str, **_FILE},
        required=(),
        takes=((FORM, _UPLOAD), (OCTETS, None)),
        gives=(JSON, list[models.WrittenFile]),
    ),
    _rpc("process.Process/List", "running commands", process.Nothing, process.Running),
    _rpc("process.Process/SendInput", "stdin for a command", process.InputRequest, process.Nothing),
    _rpc("process.Process/SendSignal", "signal a command", process.ProcessSignal, process.Nothing),
    _rpc("process.Process/CloseStdin", "the end of stdin", process.SelectRequest, process.Nothing),
    _rpc("process.Process/Update", "the size of a terminal", process.UpdateRequest, process.Nothing),
    _rpc("filesystem.Filesystem/Stat", "about a file", filesystem.PathRequest, filesystem.Found, {"path": "/tmp"}),
    _rpc(
        "filesystem.Filesystem/ListDir",
        "entries of a directory",
        filesystem.ListRequest,
        filesystem.Entries,
        {"path": "/etc", "depth": 1},
    ),
    _rpc(
        "filesystem.Filesystem/MakeDir", "make a directory", filesystem.PathRequest, filesystem.Found, {"path": "/tmp"}
    ),
    _rpc(
        "filesystem.Filesystem/Move",
        "rename a file",
        filesystem.MoveRequest,
        filesystem.Found,
        {"source": "/tmp/a", "destination": "/tmp/b"},
    ),
    _rpc(
        "filesystem.Filesystem/Remove",
        "remove a file or a tree",
        filesystem.PathRequest,
        process.Nothing,
        {"path": "/tmp/a"},
    ),
    _rpc(
        "filesystem.Filesystem/CreateWatcher",
        "watch a directory",
        watchers.WatchRequest,
        watchers.WatcherRequest,
        {"path": "/tmp"},
    ),
    _rpc("filesystem.Filesystem/GetWatcherEvents", "what was seen", watchers.WatcherRequest, watchers.Seen),
    _rpc("filesystem.Filesystem/RemoveWatcher", "stop watching", watchers.WatcherRequest, process.Nothing),
)

"""What the OpenAPI document says of SWE-ReX's routes, below `/swerex/{sandbox_id}`. They answer at the root too, where
the key is a sandbox's own token; `docs/SESSIONS.md` says more."""

from __future__ import annotations

from typing import Any

from dsec.api import swerex_wire as wire
from dsec.api.calls import FORM, JSON, Call
from dsec.api.swerex_files import NO, YES

_UPLOAD = {
    "type": "object",
    "required": ["file", "target_path"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "target_path": {"type": "string", "minLength": 1},
        "unzip": {"type": "string", "enum": [*YES, *NO]},
    },
}


def _call(name: str, summary: str, takes: Any, gives: type, *, media: str = JSON, example: Any = None) -> Call:
    return Call(
        method="get" if name == "is_alive" else "post",
        path=f"/swerex/{{sandbox_id}}/{name}",
        summary=f"SWE-ReX: {summary}",
        family="swerex",
        security=("apiKey", "bearer"),
        takes=((media, takes),) if takes is not None else (),
        example=example,
        gives=(JSON, gives),
    )


CALLS = (
    _call("is_alive", "whether the sandbox runs", None, wire.Alive),
    _call("create_session", "a shell session", wire.CreateSession, wire.SessionCreated, example={"session": "s"}),
    _call(
        "run_in_session",
        "a command in a session, or an interrupt",
        wire.Action,
        wire.Observation,
        example={"command": "echo hello", "session": "s"},
    ),
    _call("close_session", "end a session", wire.CloseSession, wire.Closed),
    _call("execute", "a command", wire.Command, wire.CommandDone, example={"command": "echo hello", "shell": True}),
    _call("read_file", "a file as text", wire.ReadFile, wire.FileContent, example={"path": "/etc/passwd"}),
    _call(
        "write_file",
        "write text to a file",
        wire.WriteFile,
        wire.Empty,
        example={"path": "/tmp/hello", "content": "hello"},
    ),
    _call("upload", "a file, or a tree as a zip", _UPLOAD, wire.Empty, media=FORM),
    _call("close", "end all sessions", None, wire.Empty),
)

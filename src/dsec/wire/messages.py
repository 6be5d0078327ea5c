"""The payloads with an inside, without I/O: requests, OPSTATE, EXIT. Both directions, so that a guest in Python can
speak too.

Owns: which fields a request may carry, how often, and the layout of EXIT. Everything that a guest sends is checked:
`ProtocolError` for what wire.h doesn't allow.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from msgspec import Struct

from dsec.spec.operations import EndKind, ExecFlag, FileFlag, Kind, OpEnd, OpRequest, Stage
from dsec.wire.frames import FIELD, MAX_KEY, NUMBER, ProtocolError, Tag, decode_fields, encode_fields, field_int

EXIT_LAYOUT = struct.Struct("<BBBBiQQQQQQQ")
EXIT_TRUNCATED = 1
MAX_NUMBER = (1 << 63) - 1
"""Of counters and offsets: what fits a signed 64-bit number everywhere they travel to."""
MAX_MESSAGE = 500
"""Characters kept of a message from inside."""

_TEXT_TAGS = {Tag.CWD: "cwd", Tag.USER: "user", Tag.KEY: "key", Tag.PATH: "path", Tag.PATH2: "path2"}
_INT_TAGS = {
    Tag.TIMEOUT_MS: "timeout_ms",
    Tag.OUTPUT_CAP: "output_cap",
    Tag.MODE: "mode",
    Tag.OFFSET: "offset",
    Tag.LENGTH: "length",
    Tag.DEPTH: "depth",
    Tag.NOFILE: "open_files",
    Tag.PTY_SIZE: "pty_size",
    Tag.PORT: "port",
}
_KIND, _ARGV, _ENV = int(Tag.KIND), int(Tag.ARGV), int(Tag.ENV)
_TEXTS = [(int(tag), name) for tag, name in _TEXT_TAGS.items()]
_INTS = [(int(tag), name) for tag, name in _INT_TAGS.items()]
_STATE_TAGS = {
    Tag.PID: "pid",
    Tag.STDIN_OFFSET: "stdin_offset",
    Tag.STDOUT_BASE: "stdout_base",
    Tag.STDOUT_END: "stdout_end",
    Tag.STDERR_BASE: "stderr_base",
    Tag.STDERR_END: "stderr_end",
    Tag.PTY_SIZE: "pty_size",
    Tag.AGE_MS: "age_ms",
}


def encode_request(request: OpRequest) -> bytes:
    """The fields of a START. Raises ValueError for a key that is too long; `split_request` for a long request."""
    if request.key is not None and not 1 <= len(request.key) <= MAX_KEY:
        raise ValueError(f"a key of {len(request.key)} bytes; 1 to {MAX_KEY}")
    pack, number = FIELD.pack, NUMBER.pack  # every command comes through here
    parts = [number(_KIND, 0, 8, request.kind)]
    for value in request.argv:
        parts += (pack(_ARGV, 0, len(value)), value)
    for value in request.env:
        parts += (pack(_ENV, 0, len(value)), value)
    for tag, name in _TEXTS:
        if (text := getattr(request, name)) is not None:
            parts += (pack(tag, 0, len(text)), text)
    for tag, name in _INTS:
        if (integer := getattr(request, name)) is not None:
            parts.append(number(tag, 0, 8, integer))
    if request.flags:
        parts.append(number(Tag.FLAGS, 0, 8, request.flags))
    if request.file_flags:
        parts.append(number(Tag.FILE_FLAGS, 0, 8, request.file_flags))
    return b"".join(parts)


def decode_request(payload: bytes) -> OpRequest:
    """The reverse of `encode_request`. Raises `ProtocolError`."""
    values: dict[str, Any] = {}
    argv: list[bytes] = []
    env: list[bytes] = []
    for tag, value in decode_fields(payload):
        name = _TEXT_TAGS.get(tag) or _INT_TAGS.get(tag) or tag.name
        if tag is Tag.ARGV:
            argv.append(value)
            continue
        if tag is Tag.ENV:
            env.append(value)
            continue
        if name in values:
            raise ProtocolError(f"field {tag.name} twice")
        if tag in _TEXT_TAGS:
            values[name] = value
        elif tag in _INT_TAGS or tag in (Tag.KIND, Tag.FLAGS, Tag.FILE_FLAGS):
            values[name] = field_int(tag, value)
        else:
            raise ProtocolError(f"field {tag.name} in a request")
    if Tag.KIND.name not in values:
        raise ProtocolError("a request without a kind")
    if "key" in values and not 1 <= len(values["key"]) <= MAX_KEY:
        raise ProtocolError(f"a key of {len(values['key'])} bytes")
    try:
        kind = Kind(values.pop(Tag.KIND.name))
    except ValueError:
        raise ProtocolError("unknown kind of operation") from None
    flags, file_flags = values.pop(Tag.FLAGS.name, 0), values.pop(Tag.FILE_FLAGS.name, 0)
    if flags & ~_ALL_EXEC_FLAGS or file_flags & ~_ALL_FILE_FLAGS:
        raise ProtocolError("unknown flags in a request")
    return OpRequest(
        kind=kind, argv=tuple(argv), env=tuple(env), flags=ExecFlag(flags), file_flags=FileFlag(file_flags), **values
    )


_ALL_EXEC_FLAGS = sum(flag for flag in ExecFlag)
_ALL_FILE_FLAGS = sum(flag for flag in FileFlag)


class OpState(Struct, frozen=True, kw_only=True):
    """What a guest says of an operation at a resync. `state`: 0 starting, 1 running, 2 ended (its EXIT follows)."""

    kind: Kind
    state: int
    key: bytes | None = None
    pid: int = 0
    stdin_offset: int = 0
    stdout_base: int = 0
    stdout_end: int = 0
    stderr_base: int = 0
    stderr_end: int = 0
    pty_size: int = 0
    """Of its terminal: columns << 16 | rows; 0: it has none."""
    age_ms: int = 0


def encode_opstate(state: OpState) -> bytes:
    """The payload of an OPSTATE."""
    fields: list[tuple[Tag, int | bytes]] = [(Tag.KIND, state.kind), (Tag.STATE, state.state)]
    if state.key is not None:
        fields.append((Tag.KEY, state.key))
    fields += [(tag, number) for tag, name in _STATE_TAGS.items() if (number := getattr(state, name))]
    return encode_fields(fields)


def decode_opstate(payload: bytes) -> OpState:
    """The reverse of `encode_opstate`. Raises `ProtocolError`."""
    seen: dict[Tag, bytes] = {}
    for tag, value in decode_fields(payload):
        if tag in seen or (tag not in _STATE_TAGS and tag not in (Tag.KIND, Tag.STATE, Tag.KEY)):
            raise ProtocolError(f"field {tag.name} in an operation's state, or there twice")
        seen[tag] = value
    key = seen.pop(Tag.KEY, None)
    if key is not None and not 1 <= len(key) <= MAX_KEY:
        raise ProtocolError(f"a key of {len(key)} bytes")
    numbers = {tag: field_int(tag, value) for tag, value in seen.items()}
    if Tag.KIND not in numbers or Tag.STATE not in numbers or numbers[Tag.STATE] > 2:
        raise ProtocolError("an operation's state without its kind, or an unknown state")
    if max(numbers.values()) > MAX_NUMBER:
        raise ProtocolError("a number in an operation's state is absurd")
    try:
        kind = Kind(numbers.pop(Tag.KIND))
    except ValueError:
        raise ProtocolError("unknown kind of operation") from None
    state = numbers.pop(Tag.STATE)
    found = OpState(kind=kind, state=state, key=key, **{_STATE_TAGS[tag]: number for tag, number in numbers.items()})
    if found.stdout_base > found.stdout_end or found.stderr_base > found.stderr_end:
        raise ProtocolError("an operation's output ends before it begins")
    return found


def encode_exit(end: OpEnd) -> bytes:
    """The payload of an EXIT; the message doesn't travel."""
    return EXIT_LAYOUT.pack(
        end.kind,
        end.stage,
        EXIT_TRUNCATED if end.truncated else 0,
        0,
        end.code,
        end.cpu_us,
        end.wall_us,
        end.max_rss_bytes,
        end.stdout_bytes,
        end.stderr_bytes,
        end.dropped_bytes,
        0,
    )


def decode_exit(payload: bytes) -> OpEnd:
    """How an operation ended. Raises `ProtocolError` for codes that no process can have."""
    end, stage, flags, zero, code, *numbers, reserved = EXIT_LAYOUT.unpack(payload)
    if zero or reserved or flags & ~EXIT_TRUNCATED or max(numbers) > MAX_NUMBER:
        raise ProtocolError("a malformed EXIT")
    try:
        kind, where = EndKind(end), Stage(stage)
    except ValueError:
        raise ProtocolError(f"an EXIT of kind {end} at stage {stage}") from None
    low, high = _CODES.get(kind, (0, 0))
    if not low <= code <= high:
        raise ProtocolError(f"an EXIT of kind {kind.name} with code {code}")
    cpu_us, wall_us, max_rss, stdout_end, stderr_end, dropped = numbers
    return OpEnd(
        kind=kind,
        code=code,
        stage=where,
        message=start_failure(where, code) if kind is EndKind.START_FAILED else "",
        truncated=bool(flags & EXIT_TRUNCATED),
        cpu_us=cpu_us,
        wall_us=wall_us,
        max_rss_bytes=max_rss,
        stdout_bytes=stdout_end,
        stderr_bytes=stderr_end,
        dropped_bytes=dropped,
    )


_CODES = {EndKind.EXITED: (0, 255), EndKind.SIGNALED: (1, 64), EndKind.START_FAILED: (1, 4095)}

_STAGES = {
    Stage.USER: "cannot become the user",
    Stage.CWD: "cannot enter the working directory",
    Stage.EXEC: "cannot execute",
    Stage.FORK: "cannot make a process",
    Stage.CGROUP: "cannot make the command's cgroup",
    Stage.FILE: "the file call failed",
    Stage.REQUEST: "the guest refused the request",
    Stage.TERMINAL: "cannot make a terminal",
    Stage.CONNECT: "cannot connect",
    Stage.WAY_OUT: "the kernel inside cannot lead its programs out",
    Stage.LOOK: "the kernel inside cannot tell what its programs do",
}


def start_failure(stage: Stage, code: int) -> str:
    """A failed start in words."""
    what = _STAGES.get(stage, "cannot start")
    return f"{what}: {os.strerror(code)}"

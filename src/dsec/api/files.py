"""Files over HTTP, streamed both ways with bounded memory. All arguments are in the query, percent-encoded bytes.

Invariants: an error about a file is the answer's status as long as nothing of it was sent, afterwards the answer is
cut; a cut upload leaves the file as it was (unless it appends).
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec
from msgspec import Struct

from dsec.api.exchange import Exchange
from dsec.edge.client import EdgeClient
from dsec.errors import InvalidRequest
from dsec.spec.sandbox import FileInfo

_OCTETS = b"application/octet-stream"


class Written(Struct, frozen=True):
    """Answer to a write."""

    bytes: int


class Listing(Struct, frozen=True):
    """Answer to a list call."""

    entries: list[FileInfo]


async def read(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET .../files"""
    x.check_query("path", "user", "offset", "length")
    offset, length = x.natural("offset") or 0, x.natural("length")
    content = cast(
        "AsyncGenerator[bytes]",
        edge.read_file(sandbox_id, path_of(x), user=x.text("user"), offset=offset, length=length),
    )
    async with aclosing(content):
        first = await anext(content, b"")
        await x.begin(200, _OCTETS)
        if first:
            await x.more(first)
        async for chunk in content:
            await x.more(chunk)
        await x.finish()


async def write(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """PUT .../files"""
    x.check_query("path", "user", "mode", "parents", "append", "exclusive")
    written = await edge.write_file(
        sandbox_id,
        path_of(x),
        x.chunks(),
        user=x.text("user"),
        mode=_mode(x),
        parents=x.value("parents", bool, False),
        append=x.value("append", bool, False),
        exclusive=x.value("exclusive", bool, False),
    )
    await x.answer(200, Written(written))


async def stat(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET .../files/stat"""
    x.check_query("path", "user", "follow")
    info = await edge.stat_file(sandbox_id, path_of(x), user=x.text("user"), follow=x.value("follow", bool, False))
    await x.answer(200, _as_json(info))


async def listing(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET .../files/list"""
    x.check_query("path", "user", "depth")
    depth = x.value("depth", int, 1)
    if not 1 <= depth <= 1000:
        raise InvalidRequest("depth is 1..1000")
    entries = await edge.list_files(sandbox_id, path_of(x), user=x.text("user"), depth=depth)
    await x.answer(200, Listing([_as_json(entry) for entry in entries]))


async def move(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """POST .../files/move"""
    x.check_query("path", "to", "user", "exclusive")
    await edge.move_file(
        sandbox_id, path_of(x), path_of(x, "to"), user=x.text("user"), exclusive=x.value("exclusive", bool, False)
    )
    await x.empty()


async def mkdir(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """POST .../files/mkdir"""
    x.check_query("path", "user", "mode", "parents")
    await edge.make_directory(
        sandbox_id, path_of(x), user=x.text("user"), mode=_mode(x), parents=x.value("parents", bool, False)
    )
    await x.empty()


async def remove(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """POST .../files/remove"""
    x.check_query("path", "user", "recursive")
    await edge.remove_file(sandbox_id, path_of(x), user=x.text("user"), recursive=x.value("recursive", bool, False))
    await x.empty()


def path_of(x: Exchange, name: str = "path") -> bytes:
    path = x.raw(name)
    if not path:
        raise InvalidRequest(f"argument {name!r} is missing", remedy="paths go into the query, percent-encoded")
    if b"\0" in path:
        raise InvalidRequest(f"argument {name!r} holds a NUL byte")
    return path


def _mode(x: Exchange) -> int | None:
    """Octal, as everywhere else."""
    text = x.text("mode")
    if text is None:
        return None
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"argument 'mode' is octal, 0 to 7777, not {text!r}")
    return mode


def _as_json(info: FileInfo) -> FileInfo:
    """JSON holds no surrogate escapes: such names travel as base64 beside a readable one."""
    name, target = info.name, info.target
    if name.isascii() and (target is None or target.isascii()):
        return info
    readable = _readable(name)
    if readable != name:
        info = msgspec.structs.replace(
            info, name=readable, name_b64=base64.b64encode(os.fsencode(name)).decode("ascii")
        )
    if target is not None:
        info = msgspec.structs.replace(info, target=_readable(target))
    return info


def _readable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

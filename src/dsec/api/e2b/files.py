"""`/files` as E2B's client calls it: one file down; one file, or many in a form, up. Streamed both ways.

Invariants: an upload appears whole or not at all, each file for itself; a body is decompressed piece by piece, so that
a small one can't fill memory.
"""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import quote_from_bytes

from multipart import (  # type: ignore[import-untyped]
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)

from dsec.api.e2b.call import Call
from dsec.api.e2b.errors import not_yet
from dsec.api.e2b.models import WrittenFile
from dsec.api.e2b.users import Users
from dsec.api.exchange import Exchange
from dsec.edge.client import EdgeClient
from dsec.errors import InvalidRequest

_OCTETS = b"application/octet-stream"
_PIECE = 256 << 10
_ARGUMENTS = ("path", "username", "signature", "signature_expiration")
MAX_FILES = 100_000


async def download(edge: EdgeClient, users: Users, sandbox_id: str, call: Call) -> None:
    """GET /files?path[&username]"""
    x = call.x
    _check(x)
    path, user = await users.path(sandbox_id, _path(x), _user(call))
    content = cast("AsyncGenerator[bytes]", edge.read_file(sandbox_id, path, user=user))
    async with aclosing(content):
        first = await anext(content, b"")
        await x.begin(200, _OCTETS, (b"content-disposition", b"inline; filename*=UTF-8''" + _name(path)))
        if first:
            await x.more(first)
        async for chunk in content:
            await x.more(chunk)
        await x.finish()


async def upload(edge: EdgeClient, users: Users, sandbox_id: str, call: Call) -> None:
    """POST /files[?path][&username]: a form with one or many files, or one file's bytes."""
    x = call.x
    _check(x)
    if any(name.startswith(b"x-metadata-") for name in call.headers):
        raise not_yet("metadata on files (X-Metadata-*)", "Write without metadata.")
    written: list[WrittenFile] = []

    async def write(path: str, data: AsyncIterator[bytes]) -> None:
        raw, user = await users.path(sandbox_id, path, _user(call))
        await edge.write_file(sandbox_id, raw, data, user=user, parents=True)
        shown = raw.decode("utf-8", "replace")
        written.append(WrittenFile(posixpath.basename(shown), shown))

    body = _decompressed(call)
    if x.content_type == b"multipart/form-data":
        path = x.text("path")
        async with aclosing(_segments(call, body)) as segments:
            async for segment, data in segments:
                if segment.name != "file":
                    continue
                target = path or segment.filename
                if not target:
                    raise InvalidRequest("a file of the form has no name, and no path was given")
                if path and written:
                    raise InvalidRequest("several files for one path", remedy="Leave the path out.")
                if len(written) >= MAX_FILES:
                    raise InvalidRequest(f"more than {MAX_FILES} files in one request")
                await write(target, data)
        if not written:
            raise InvalidRequest("the form holds no field `file`")
    else:
        await write(_path(x), body)
    await x.answer(200, written)


def _name(path: bytes) -> bytes:
    return quote_from_bytes(posixpath.basename(path), safe="").encode()


def _check(x: Exchange) -> None:
    x.check_query(*_ARGUMENTS)
    x.value("signature_expiration", int, 0)


def _user(call: Call) -> str | None:
    return call.x.text("username") or call.user()


def _path(x: Exchange) -> str:
    path = x.text("path")
    if not path:
        raise InvalidRequest("argument 'path' is missing")
    return path


async def _decompressed(call: Call) -> AsyncGenerator[bytes]:
    """The body, without its compression. Raises `InvalidRequest`."""
    encoding = call.header(b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        async for data in call.x.chunks():
            yield data
        return
    if encoding != "gzip":
        raise InvalidRequest(f"the body's encoding {encoding!r} is not taken", remedy="Send gzip, or no encoding.")
    stream = zlib.decompressobj(wbits=31)
    try:
        async for data in call.x.chunks():
            waiting = data
            while waiting:
                piece = stream.decompress(waiting, _PIECE)
                if piece:
                    yield piece
                waiting = stream.unconsumed_tail
                if stream.eof and stream.unused_data:  # another member follows, as in files that were joined
                    waiting = stream.unused_data
                    stream = zlib.decompressobj(wbits=31)
        while piece := stream.decompress(b"", _PIECE):
            yield piece
    except zlib.error as error:
        raise InvalidRequest(f"the body is not gzip: {error}") from None
    if not stream.eof:
        raise InvalidRequest("the gzip body was cut short")


async def _segments(
    call: Call, body: AsyncIterator[bytes]
) -> AsyncGenerator[tuple[MultipartSegment, AsyncIterator[bytes]]]:
    """The fields of a form in their order, each with its content, which is to be read before the next one."""
    options = parse_options_header(call.header(b"content-type"))[1]
    try:
        parser = PushMultipartParser(options.get("boundary") or "", max_segment_count=MAX_FILES + 64)
        events = _events(parser, body)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, MultipartSegment):
                    data = _content(events)
                    yield event, data
                    async for _ in data:  # what its reader left
                        pass
    except MultipartError as error:
        raise InvalidRequest(f"the form is broken: {error}") from None


async def _events(parser: PushMultipartParser, body: AsyncIterator[bytes]) -> AsyncGenerator[Any]:
    async for data in body:
        for event in parser.parse(data):
            yield event
    parser.close()


async def _content(events: AsyncIterator[Any]) -> AsyncGenerator[bytes]:
    try:
        async for event in events:
            if event is None:
                return
            yield bytes(event)
    except MultipartError as error:  # within a write: it is to fail as the request does
        raise InvalidRequest(f"the form is broken: {error}") from None

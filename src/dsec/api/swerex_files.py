"""Files as SWE-ReX's client asks for them: text read and written whole, files and zipped trees uploaded.

Invariants: an upload is spooled outside of the sandbox's memory and within bounds; the entries of a zip are unpacked
one piece at a time, below the target only.
"""

from __future__ import annotations

import asyncio
import codecs
import posixpath
import tempfile
import zipfile
import zlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import IO, Any, cast

from multipart import (  # type: ignore[import-untyped]
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)

from dsec.api.exchange import Exchange
from dsec.api.swerex_wire import Empty, FileContent, ReadFile, SwerexError, WriteFile
from dsec.edge.client import EdgeClient
from dsec.errors import DsecError, FileMissing, InvalidRequest, TooLarge

MAX_READ_BYTES = 64 << 20
MAX_UPLOAD_BYTES = 8 << 30
MAX_ENTRIES = 200_000
YES, NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_MEMORY_BYTES = 4 << 20
_PIECE = 256 << 10
_FIELD_BYTES = 8192


def absolute(edge: EdgeClient, sandbox_id: str, path: str) -> bytes:
    """A path of the client's: a relative one begins in the sandbox's working directory."""
    if "\0" in path or not path:
        raise InvalidRequest("a path is not empty and holds no NUL byte")
    return posixpath.join(edge.get(sandbox_id).spec.workdir, path).encode("utf-8", "surrogateescape")


async def read_file(edge: EdgeClient, sandbox_id: str, request: ReadFile) -> FileContent:
    """POST /read_file"""
    try:
        codec = codecs.lookup(request.encoding or "utf-8")
        codecs.lookup_error(request.errors or "strict")
    except (LookupError, ValueError) as error:  # a name with a NUL byte, or one that has no bytes
        raise SwerexError("builtins.LookupError", str(error)) from None
    if not codec._is_text_encoding:
        raise SwerexError("builtins.LookupError", f"{request.encoding!r} is not a text encoding")
    content = bytearray()
    chunks = cast("AsyncGenerator[bytes]", edge.read_file(sandbox_id, absolute(edge, sandbox_id, request.path)))
    async with aclosing(chunks):
        async for chunk in chunks:
            content += chunk
            if len(content) > MAX_READ_BYTES:
                raise TooLarge(
                    f"{request.path} is larger than {MAX_READ_BYTES} bytes", remedy="Read it through the native API."
                )
    try:
        text = codec.decode(bytes(content), request.errors or "strict")[0]
    except UnicodeError as error:
        raise SwerexError("builtins.ValueError", str(error)) from None
    return FileContent(text.replace("\r\n", "\n").replace("\r", "\n"))


async def write_file(edge: EdgeClient, sandbox_id: str, request: WriteFile) -> Empty:
    """POST /write_file"""
    data = request.content.encode("utf-8", "surrogateescape")

    async def pieces() -> AsyncGenerator[bytes]:
        for at in range(0, len(data), _PIECE):
            yield data[at : at + _PIECE]

    await edge.write_file(sandbox_id, absolute(edge, sandbox_id, request.path), pieces(), parents=True)
    return Empty()


async def upload(edge: EdgeClient, sandbox_id: str, x: Exchange) -> Empty:
    """POST /upload: a form with `file`, `target_path` and `unzip`."""
    with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as spool:
        fields, name = await _form(x, cast("IO[bytes]", spool))
        target = fields.get("target_path")
        if not target or name is None:
            raise InvalidRequest("the form needs the fields `file` and `target_path`")
        path = absolute(edge, sandbox_id, target)
        spool.seek(0)
        unzip = fields.get("unzip", "false").lower()
        if unzip not in YES + NO:
            raise InvalidRequest("the field `unzip` is true or false")
        if unzip in YES:
            await _unzip(edge, sandbox_id, path, cast("IO[bytes]", spool))
        else:
            if await _is_directory(edge, sandbox_id, path):
                path = posixpath.join(path, posixpath.basename(name).encode("utf-8", "surrogateescape"))
            await edge.write_file(sandbox_id, path, _pieces(cast("IO[bytes]", spool)), parents=True)
    return Empty()


async def _form(x: Exchange, spool: IO[bytes]) -> tuple[dict[str, str], str | None]:
    """The fields of the form; the file's bytes go to `spool`. Also the file's name."""
    content_type = next((value for name, value in x.scope["headers"] if name == b"content-type"), b"")
    options = parse_options_header(content_type.decode("latin-1"))[1]
    fields: dict[str, bytearray] = {}
    name: str | None = None
    size = 0
    segment: Any = None
    try:
        parser = PushMultipartParser(options.get("boundary") or "", max_segment_count=16)
        async for data in x.chunks():
            for event in parser.parse(data):
                if isinstance(event, MultipartSegment):
                    segment = event
                    if segment.name == "file":
                        name = segment.filename or "file"
                    else:
                        fields[segment.name] = bytearray()
                elif event is None:
                    segment = None
                elif segment.name == "file":
                    size += len(event)
                    if size > MAX_UPLOAD_BYTES:
                        raise TooLarge(f"an upload of more than {MAX_UPLOAD_BYTES} bytes")
                    spool.write(event)
                else:
                    fields[segment.name] += event
                    if len(fields[segment.name]) > _FIELD_BYTES:
                        raise TooLarge(f"the field {segment.name!r} is larger than {_FIELD_BYTES} bytes")
        parser.close()
    except MultipartError as error:
        raise InvalidRequest(f"the form is broken: {error}") from None
    return {name: bytes(value).decode("utf-8", "surrogateescape") for name, value in fields.items()}, name


async def _is_directory(edge: EdgeClient, sandbox_id: str, path: bytes) -> bool:
    try:
        return (await edge.stat_file(sandbox_id, path, follow=True)).type == "directory"
    except FileMissing:
        return False


async def _unzip(edge: EdgeClient, sandbox_id: str, target: bytes, spool: IO[bytes]) -> None:
    try:
        archive = zipfile.ZipFile(spool)
        entries = archive.infolist()
        if len(entries) > MAX_ENTRIES:
            raise TooLarge(f"a zip of more than {MAX_ENTRIES} entries")
        await edge.make_directory(sandbox_id, target, parents=True)
        for entry in entries:
            parts = [part for part in entry.filename.split("/") if part not in ("", ".", "..")]
            path = posixpath.join(target, "/".join(parts).encode("utf-8", "surrogateescape"))
            if entry.is_dir():
                await edge.make_directory(sandbox_id, path, parents=True)
            elif parts:
                mode = entry.external_attr >> 16 & 0o777
                with archive.open(entry) as content:
                    await edge.write_file(sandbox_id, path, _pieces(content), parents=True, mode=mode or None)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, DsecError):
            raise
        raise InvalidRequest(f"the zip is broken: {error}") from None


async def _pieces(content: IO[bytes]) -> AsyncGenerator[bytes]:
    for piece in _read(content):
        yield piece
        await asyncio.sleep(0)


def _read(content: IO[bytes]) -> Iterator[bytes]:
    while piece := content.read(_PIECE):
        yield piece

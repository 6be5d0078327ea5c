"""`cp`: files and trees into a sandbox and out of it.

A tree goes as one tar stream, which the `tar` of the sandbox's own packs or unpacks: one command whatever the number of
files. Where the sandbox has none, files go one by one, many at a time. What comes out of a sandbox is hostile: all of
it passes through `dsec.cli.unpack`. A single large file goes in pieces, so that a copy that was cut goes on where it
stood.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

import click
from msgspec import Struct

from dsec import AsyncClient, AsyncCommand, AsyncSandbox, Cause, CommandResult, FileInfo
from dsec.cli import signals
from dsec.cli.copy_files import file_in, file_out, tree_in_by_file, tree_out_by_file
from dsec.cli.output import EXIT_PARTIAL, EXIT_PLATFORM, json_option, note, write_json
from dsec.cli.progress import Progress
from dsec.cli.tarstream import CHUNK, BadArchive, pack, shown, walk
from dsec.cli.unpack import Unpacker
from dsec.errors import DsecError, FileMissing, InvalidRequest

_REMOTE = re.compile(r"([a-z0-9]{16,40}):(.*)", re.DOTALL)
_COMMAND_TIMEOUT_S = 86400.0
_OUTPUT_BYTES = 1 << 40
_MAX_SAID = 16 << 10
_MARK = b".dsec-part"
"""Ends the name of a file beside a tree that is being copied: by it the same command with --resume knows where to go
on."""


class Place(Struct, frozen=True):
    """One side of a copy: in a sandbox, or here (`sandbox_id` None)."""

    sandbox_id: str | None
    path: bytes

    @classmethod
    def of(cls, text: str) -> Place:
        """`ID:path`, else a local path; `./a:b` is always local."""
        found = _REMOTE.fullmatch(text)
        if found is None:
            return cls(None, os.fsencode(text))
        return cls(found[1], b"/" + os.fsencode(found[2]).lstrip(b"/"))

    @property
    def last(self) -> bytes:
        """Its last name; empty for `/`."""
        return os.path.basename(self.bare)

    @property
    def bare(self) -> bytes:
        """Without slashes, or the `/.` that asks for a directory's content, at its end."""
        path = self.path
        while path.endswith((b"/", b"/.")) and len(path) > 1:
            path = path[:-1] if path.endswith(b"/") else path[:-2]
        return path or b"/"

    @property
    def content_only(self) -> bool:
        """It ends in `/.`."""
        return self.path.endswith(b"/.") or self.path == b"."


class Options(Struct, frozen=True):
    """How to copy."""

    user: str | None
    resume: bool


@click.command("cp")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("destination", metavar="DESTINATION")
@click.option("--resume", is_flag=True, help="Leave what is there already with the same size and time.")
@click.option("--user", "-u", help="Who reads or writes inside.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no summary.")
@json_option
def copy(sources: tuple[str, ...], destination: str, resume: bool, user: str | None, quiet: bool, as_json: bool) -> int:
    """Copy files and trees into a sandbox or out of it: one side is ID:PATH.

    A directory is copied with all that is in it, links kept as links, modes kept. It becomes DESTINATION, or goes into
    DESTINATION where that is a directory. `DIR/.` is the content of DIR.
    """
    places, target = [Place.of(each) for each in sources], Place.of(destination)
    remote = {place.sandbox_id for place in places}
    if len(remote) != 1 or (target.sandbox_id is None) == (None in remote):
        raise click.UsageError("one side is ID:PATH of a sandbox, the other is here")
    progress = Progress(quiet=quiet or as_json)
    options = Options(user, resume)

    async def work() -> None:
        async with AsyncClient() as client:
            sandbox = await client.connect(target.sandbox_id or places[0].sandbox_id or "")
            progress.begin()
            if target.sandbox_id is not None:
                await _all_in(sandbox, places, target, options, progress)
            else:
                await _all_out(sandbox, places, target, options, progress)

    try:
        signals.run(work())
    except BadArchive as error:
        progress.end()
        note(f"the sandbox sent something else than files: {error}")
        return EXIT_PLATFORM
    finally:
        progress.end()
    if as_json:
        found: dict[str, Any] = {
            "files": progress.files, "bytes": progress.bytes, "seconds": round(progress.seconds, 3),
            "left_out": progress.notes,
        }  # fmt: skip
        write_json(found)
    elif not quiet:
        note(progress.summary())
    return EXIT_PARTIAL if progress.notes else 0


# --- into a sandbox ---


async def _all_in(
    sandbox: AsyncSandbox, sources: list[Place], target: Place, options: Options, progress: Progress
) -> None:
    is_directory = await _is_directory(sandbox, target.bare, options)
    if not is_directory and (len(sources) > 1 or target.path.endswith(b"/")):
        raise InvalidRequest(f"{shown(target.path)} is no directory in the sandbox", remedy="make it first")
    unfinished = is_directory and options.resume and await sandbox.files.exists(target.bare + _MARK, user=options.user)
    for source in sources:
        try:
            status = os.stat(source.bare)
        except OSError as error:
            raise InvalidRequest(f"{shown(source.path)}: {error.strerror}") from None
        inside = is_directory and not (source.content_only or unfinished)
        if inside and not source.last:
            raise InvalidRequest("`/` has no name: say what it is to be called")
        path = target.bare.rstrip(b"/") + b"/" + source.last if inside else target.bare
        if stat.S_ISDIR(status.st_mode):
            await _tree_in(sandbox, source.bare, path, options, progress)
        elif stat.S_ISREG(status.st_mode):
            progress.total_bytes = (progress.total_bytes or 0) + status.st_size
            await file_in(sandbox, source.bare, path, options.user, progress)
        else:
            raise InvalidRequest(f"{shown(source.path)} is neither a file nor a directory")


async def _tree_in(sandbox: AsyncSandbox, source: bytes, path: bytes, options: Options, progress: Progress) -> None:
    existed = await _is_directory(sandbox, path, options)
    await sandbox.files.mkdir(path, parents=True, user=options.user)
    await sandbox.files.write(path + _MARK, b"", user=options.user)
    there: dict[bytes, FileInfo] = {}
    if options.resume and existed:
        listed = await sandbox.files.list(path, depth=1000, user=options.user)
        there = {b"./" + os.fsencode(each.name): each for each in listed}

    def skip(name: bytes, status: os.stat_result) -> bool:
        if name == b".":
            return existed  # its mode is its owner's affair
        found = there.get(name)
        return found is not None and stat.S_ISREG(status.st_mode) and same(found, status)

    if progress.live:
        progress.total_bytes = (progress.total_bytes or 0) + await asyncio.to_thread(_size_of, source, skip)
    before = progress.files, progress.bytes
    command = await _start(sandbox, ["tar", "-xpof", "-", "-C", os.fsdecode(path)], options, stdin=True)
    chunks = pack(_counting(walk(source, b".", progress.note, skip), progress), progress.note)
    sending = asyncio.ensure_future(_send(command, chunks, progress))
    result, said = await _ended(command, sending)
    await _forget(command)
    if result.cause is Cause.START_FAILED:
        progress.files, progress.bytes = before
        await tree_in_by_file(sandbox, walk(source, b".", progress.note, skip), path, options.user, progress)
    else:
        _explain(result, said, progress)
    await sandbox.files.remove(path + _MARK, user=options.user)


def _silent(_: str) -> None:
    """What is said elsewhere."""


def _size_of(source: bytes, skip: Any) -> int:
    return sum(each.status.st_size for each in walk(source, b".", _silent, skip) if stat.S_ISREG(each.status.st_mode))


def _counting(entries: Iterator[Any], progress: Progress) -> Iterator[Any]:
    for entry in entries:
        yield entry
        if stat.S_ISREG(entry.status.st_mode):
            progress.file()


async def _send(command: AsyncCommand, chunks: Iterator[memoryview], progress: Progress) -> None:
    """The next piece is read while one is on its way."""
    nothing = memoryview(b"")
    reading = asyncio.ensure_future(asyncio.to_thread(next, chunks, nothing))
    try:
        while data := await asyncio.shield(reading):
            reading = asyncio.ensure_future(asyncio.to_thread(next, chunks, nothing))
            await command.write_stdin(data)
            progress.add(len(data))
        await command.close_stdin()
    finally:
        await asyncio.wait([reading])  # it counts files: whoever counts anew must not have it beside


# --- out of a sandbox ---


async def _all_out(
    sandbox: AsyncSandbox, sources: list[Place], target: Place, options: Options, progress: Progress
) -> None:
    is_directory = os.path.isdir(target.bare)
    if not is_directory and (len(sources) > 1 or target.path.endswith(b"/")):
        raise InvalidRequest(f"{shown(target.path)} is no directory", remedy="make it first")
    unfinished = is_directory and options.resume and os.path.lexists(target.bare + _MARK)
    for source in sources:
        info = await sandbox.files.stat(source.bare, follow=True, user=options.user)
        inside = is_directory and not (source.content_only or unfinished)
        if inside and not source.last:
            raise InvalidRequest("`/` has no name: say what it is to be called")
        path = os.path.join(target.bare, source.last) if inside else target.bare
        if info.type == "directory":
            await _tree_out(sandbox, source.bare, path, options, progress)
        elif info.type == "file":
            progress.total_bytes = (progress.total_bytes or 0) + info.size
            await file_out(sandbox, source.bare, info, path, options.user, progress)
        else:
            raise InvalidRequest(f"{shown(source.path)} is neither a file nor a directory")


async def _tree_out(sandbox: AsyncSandbox, source: bytes, path: bytes, options: Options, progress: Progress) -> None:
    existed = os.path.isdir(path)
    os.makedirs(path, exist_ok=True)
    mark = path + _MARK
    os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    unpacker = Unpacker(path, progress.note, progress.file, root_too=not existed)
    try:
        if options.resume:
            await tree_out_by_file(sandbox, source, path, unpacker, options.user, progress)
            os.unlink(mark)
            return
        command = await _start(sandbox, ["tar", "-cf", "-", "-C", os.fsdecode(source), "."], options)
        measuring = asyncio.ensure_future(_measure(sandbox, source, options, progress))
        try:
            result, said = await _received(command, unpacker, progress)
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
        await _forget(command)
        if result.cause is Cause.START_FAILED:
            await tree_out_by_file(sandbox, source, path, unpacker, options.user, progress)
        else:
            _explain(result, said, progress)
            await asyncio.to_thread(unpacker.finish)
        os.unlink(mark)
    finally:
        unpacker.close()


async def _measure(sandbox: AsyncSandbox, source: bytes, options: Options, progress: Progress) -> None:
    """How much is to be expected, as the sandbox says: for the time that is left, and nothing else."""
    if not progress.live:
        return
    result = await sandbox.commands.run(["du", "-sk", os.fsdecode(source)], user=options.user)
    first = result.stdout.split("\t")[0]
    if result.exit_code == 0 and first.isascii() and first.isdigit() and len(first) < 13:
        progress.total_bytes = int(first) << 10


async def _received(command: AsyncCommand, unpacker: Unpacker, progress: Progress) -> tuple[CommandResult, str]:
    """Unpack what it writes, while more of it comes."""
    said = bytearray()
    parts: list[bytes] = []
    size = 0
    feeding: asyncio.Future[None] | None = None
    try:
        async for output in command:
            if output.stderr:
                said += output.data[: _MAX_SAID - len(said)]
                continue
            parts.append(output.data)
            size += len(output.data)
            if size >= CHUNK:
                if feeding is not None:
                    await feeding
                feeding = asyncio.ensure_future(asyncio.to_thread(unpacker.feed, b"".join(parts)))
                progress.add(size)
                parts, size = [], 0
        if feeding is not None:
            await feeding
        await asyncio.to_thread(unpacker.feed, b"".join(parts))
        progress.add(size)
        return await command.wait(), bytes(said).decode("utf-8", "replace")
    except BaseException:
        await asyncio.shield(command.kill())
        if feeding is not None and not feeding.done():
            await asyncio.wait([feeding])
        raise


# --- both ---


async def _start(sandbox: AsyncSandbox, argv: list[str], options: Options, *, stdin: bool = False) -> AsyncCommand:
    return await sandbox.commands.start(
        argv,
        user=options.user,
        cwd="/",
        stdin=stdin,
        env={"LC_ALL": "C", "TAR_OPTIONS": "--blocking-factor=512"},  # of GNU's: fewer, larger reads of the pipe
        command_timeout_s=_COMMAND_TIMEOUT_S,
        output_bytes=_OUTPUT_BYTES,
    )


async def _ended(command: AsyncCommand, sending: asyncio.Future[None]) -> tuple[CommandResult, str]:
    """Read to the end while something is sent; who ends early is sent nothing more."""
    said = bytearray()

    async def read() -> CommandResult:
        async for output in command:
            said.extend(output.data[: _MAX_SAID - len(said)])
        return await command.wait()

    reading = asyncio.ensure_future(read())
    try:
        both: list[asyncio.Future[Any]] = [reading, sending]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            await sending  # raises what went wrong here
        return await reading, bytes(said).decode("utf-8", "replace")
    except BaseException:
        await asyncio.shield(command.kill())
        raise
    finally:
        for task in (reading, sending):
            task.cancel()
        await asyncio.gather(reading, sending, return_exceptions=True)


async def _forget(command: AsyncCommand) -> None:
    """Its output need not be kept for anyone."""
    with contextlib.suppress(DsecError):
        await command.release()


def _explain(result: CommandResult, said: str, progress: Progress) -> None:
    if result.exit_code == 0:
        return
    for line in said.splitlines()[:20]:
        progress.note(f"tar in the sandbox: {shown(line.encode())}")
    if result.cause is not Cause.EXITED or not said.strip():
        progress.note(f"tar in the sandbox: {result.cause}, exit code {result.exit_code} {result.message}")


async def _is_directory(sandbox: AsyncSandbox, path: bytes, options: Options) -> bool:
    try:
        return (await sandbox.files.stat(path, follow=True, user=options.user)).type == "directory"
    except FileMissing:
        return False


def same(info: FileInfo, status: os.stat_result) -> bool:
    """As far as size and time (in seconds) say."""
    return info.type == "file" and info.size == status.st_size and int(info.mtime) == int(status.st_mtime)


COMMANDS: tuple[click.Command, ...] = (copy,)

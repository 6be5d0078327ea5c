"""Templates: machines that wait, saved, for clones to go on from; kept in memory and on disk.

On disk `<root>/<key>/` holds `memory` and `disk` (sparse), `state` and `template.json`; the least recently used go. In
use a template is two sealed memfds, which nothing can write to, shrink or grow, and a disk beside those of machines: no
clone can harm another, and what happens to the files harms none. The launcher holds the descriptors too, so that clones
of the next server share the same memory. A key covers all that went into a template; one whose inputs changed is
not found any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Set
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.errors import Unavailable
from dsec.kernel.private_pages import whole
from dsec.vmm.disks import copy_data, copy_file
from dsec.vmm.kept import held_bytes
from dsec.vmm.machine import Machines

log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Template(Struct, frozen=True):
    """One that clones can be made of."""

    key: str
    memory: int
    """A sealed memfd."""
    state: int
    disk: Path
    """What a clone's disk begins as a copy of; nothing writes to it."""
    machine: str = ""
    """QEMU's name of its kind, where a backend has more than one."""
    own: int = -1
    """A sealed memfd whose data lies over `memory`'s: of a moment."""
    screen: int = -1
    """What its screen shows, of a moment that has one: its state doesn't say."""

    @property
    def files(self) -> list[int]:
        """Its descriptors."""
        return [self.memory, self.state, *(each for each in (self.own, self.screen) if each >= 0)]

    def has_disk(self, size: int) -> bool:
        """Whether it is there, and whole."""
        try:
            return self.disk.stat().st_size == size
        except OSError:
            return False

    def open_memory(self) -> int:
        """A descriptor of all its memory in one file; blocks."""
        return os.dup(self.memory) if self.own < 0 else whole(self.memory, self.own)

    def open_state(self) -> int:
        """A descriptor of its own for one reader."""
        return os.open(f"/proc/self/fd/{self.state}", os.O_RDONLY | os.O_CLOEXEC)


class Size(Struct, frozen=True):
    """Of a template's parts."""

    memory_bytes: int
    disk_bytes: int


class _Note(Struct, frozen=True):
    size: Size
    state_bytes: int
    machine: str
    boot_s: float
    created_at: float


Make = Callable[[int, int], Awaitable[float]]
"""`make(memory, state)`: bring a machine up, save it into these, and leave its disk as the template's. How long it took
until it was ready, in seconds."""


class TemplateCache:
    """All templates of one kind of machine."""

    def __init__(self, root: Path, machines: Machines, *, keep: int, keep_open: int) -> None:
        """`keep`: how many are kept on disk; `keep_open`: in memory."""
        self.root = root
        self._machines = machines
        self._keep = keep
        self._keep_open = keep_open
        self._open: dict[str, Template] = {}
        self._making: dict[str, asyncio.Task[Template]] = {}
        self._doubted: set[str] = set()
        self.boots_s: list[float] = []
        """How long those that were made here took."""

    async def get(self, key: str, size: Size, make: Make, machine: str = "") -> Template:
        """The template; made, or read from disk, where it isn't there. `machine`: as in `Template`. Raises as `make`,
        OSError."""
        found = self._open.pop(key, None)
        if found is not None:
            self._open[key] = found  # the last used is the last to go
            if found.has_disk(size.disk_bytes):
                return found
            log.warning("a template's disk was removed or cut: it is made again")
            await self.discard(found)
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.create_task(self._make(key, size, make, machine), name="template")
            making.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(making)

    def opened(self, key: str) -> Template | None:
        """One that is in memory."""
        return self._open.get(key)

    async def adopt(self, held: frozenset[str], others: Set[str] = frozenset()) -> None:
        """What the launcher holds for an earlier server. `others`: whose disks stay."""
        launcher = self._machines.launcher
        for key in held - others:
            note = await asyncio.to_thread(self._note, key)
            if launcher is not None and note is not None and self.disk(key).exists():
                memory, state = await launcher.take(key)
                self._put(Template(key, memory, state, self.disk(key), note.machine))
        self._machines.disks.drop_templates(self._open.keys() | others)

    async def hold_all(self) -> None:
        """Hand what is open to a new launcher."""
        launcher = self._machines.launcher
        for template in list(self._open.values()):
            if launcher is not None:
                await launcher.hold(template.key, [template.memory, template.state])

    async def doubt(self, template: Template) -> None:
        """A clone of it failed; the second in a row is its own fault, and it is made again."""
        if template.key in self._doubted:
            log.warning("clones of a template fail: it is made again")
            await self.discard(template)
        else:
            self._doubted.add(template.key)

    def trust(self, template: Template) -> None:
        """A clone of it goes on."""
        self._doubted.discard(template.key)

    async def discard(self, template: Template) -> None:
        """Here and on disk; clones that live go on."""
        self._doubted.discard(template.key)
        if self._open.get(template.key) is not template:
            return  # it has been made again meanwhile
        await self._let_go(template.key)
        template.disk.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self.root / template.key, True)

    async def close(self) -> None:
        """Let go of all; clones and the launcher keep theirs."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        while self._open:
            self._close(next(iter(self._open)))

    def disk(self, key: str) -> Path:
        """Where the disk is that clones begin with."""
        return self._machines.disks.template_path(key)

    def _put(self, template: Template) -> None:
        self._open[template.key] = template
        self._machines.kept.put(template.key, held_bytes(template.memory, template.state))

    def _close(self, key: str) -> None:
        template = self._open.pop(key)
        self._machines.kept.drop(key)
        os.close(template.memory)
        os.close(template.state)

    async def _let_go(self, key: str) -> None:
        self._close(key)
        if self._machines.launcher is not None:
            with contextlib.suppress(Unavailable):
                await self._machines.launcher.drop(key)

    # --- making ---

    async def _make(self, key: str, size: Size, make: Make, machine: str) -> Template:
        template = await asyncio.to_thread(self._load, key, size)
        if template is None:
            template = await self._make_new(key, size, make, machine)
        self._put(template)
        if self._machines.launcher is not None:
            with contextlib.suppress(Unavailable):
                await self._machines.launcher.hold(key, [template.memory, template.state])
        while len(self._open) > self._keep_open:
            await self._let_go(next(iter(self._open)))
        return template

    async def _make_new(self, key: str, size: Size, make: Make, machine: str) -> Template:
        with contextlib.ExitStack() as undo:
            memory, state = (_memfd(name, undo) for name in ("memory", "state"))
            os.ftruncate(memory, size.memory_bytes)
            ready_s = await make(memory, state)
            for fd in (memory, state):
                seal(fd)
            note = _Note(size, os.fstat(state).st_size, machine, ready_s, time.time())
            await asyncio.to_thread(self._save, key, memory, state, note)
            undo.pop_all()
        self.boots_s.append(ready_s)
        return Template(key, memory, state, self.disk(key), machine)

    # --- on disk ---

    def _save(self, key: str, memory: int, state: int, note: _Note) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = sorted(self.root.glob("*/template.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[: max(0, len(kept) - self._keep + 1)]:
            shutil.rmtree(path.parent, ignore_errors=True)
        temporary = self.root / f".tmp-{secrets.token_hex(8)}"
        temporary.mkdir(mode=0o700)
        try:
            for name, fd in (("memory", memory), ("state", state)):
                with open(temporary / name, "xb") as file:
                    copy_data(fd, file.fileno())
            with open(temporary / "disk", "xb") as file:
                copy_file(self.disk(key), file.fileno())
            (temporary / "template.json").write_bytes(msgspec.json.encode(note))
            temporary.rename(self.root / key)
        except OSError as error:  # it serves from memory; the next server makes it again
            log.warning("a template can't be kept on disk: %s", error)
            shutil.rmtree(temporary, ignore_errors=True)

    def _note(self, key: str) -> _Note | None:
        try:
            return msgspec.json.decode((self.root / key / "template.json").read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError):
            return None

    def _load(self, key: str, size: Size) -> Template | None:
        """None where it isn't there, or was cut short."""
        directory = self.root / key
        with contextlib.ExitStack() as undo:
            note = self._note(key)
            try:
                if note is None:
                    raise ValueError("no note")
                found = [_memfd(name, undo) for name in ("memory", "state")]
                for name, fd in zip(("memory", "state"), found, strict=True):
                    with open(directory / name, "rb") as file:
                        copy_data(file.fileno(), fd)
                    seal(fd)
                sizes = Size(os.fstat(found[0]).st_size, (directory / "disk").stat().st_size)
                if sizes != size or note.size != size or os.fstat(found[1]).st_size != note.state_bytes:
                    raise ValueError("cut short")
                self._machines.disks.bring(directory / "disk", key)
                os.utime(directory / "template.json")
            except (OSError, ValueError):
                if directory.exists():
                    log.warning("a template on disk is of no use, and goes: %s", key)
                    shutil.rmtree(directory, ignore_errors=True)
                return None
            undo.pop_all()
            return Template(key, found[0], found[1], self.disk(key), note.machine)


def seal(fd: int) -> None:
    """Nobody can write to this memfd any more, or shrink or enlarge it."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _memfd(name: str, undo: contextlib.ExitStack) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, fd)
    return fd

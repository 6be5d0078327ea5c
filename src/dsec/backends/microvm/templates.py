"""Templates: machines that have booted and wait, saved, for clones to go on from.

A template is made on first use of a kernel, a guest, a VMM and a shape (memory, virtual CPUs, layers); its key covers
all of them, so one whose inputs changed is simply not found any more. On disk `<state>/vm/templates/<key>/` holds
`memory` and `disk` (sparse), `state` and `template.json`; the least recently used go. In use it is two sealed memfds,
which nothing can write to, shrink or grow, and a disk beside those of machines: no clone can harm another, and what
happens to the files harms none. The launcher
holds the descriptors too, so that clones of the next server share the same memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.backends.microvm import initramfs
from dsec.errors import CreateFailed, NotFound, Unavailable
from dsec.store.kernels import Kernel, KernelStore
from dsec.store.layers import LayerStore
from dsec.vmm.disks import copy_data, copy_file
from dsec.vmm.driver import Shape, Start
from dsec.vmm.first_words import wait_ready, warm
from dsec.vmm.machine import Machine, Machines
from dsec.vmm.template_cache import Template, seal

log = logging.getLogger(__name__)

VERSION = 2
BOOT_S = 120.0
KEEP = 16
"""Templates on disk."""
KEEP_OPEN = 8
"""Templates in memory."""


class Note(Struct, frozen=True):
    """`template.json`."""

    shape: Shape
    kernel: str
    machine: str
    boot_s: float
    created_at: float
    state_bytes: int


class Templates:
    """All templates of a node."""

    def __init__(self, root: Path, machines: Machines, kernels: KernelStore, layers: LayerStore, guest: Path) -> None:
        """`guest`: the compiled program; its directory's name is its version."""
        self.root = root
        self._machines = machines
        self._kernels = kernels
        self._layers = layers
        self.guest = guest
        self._open: dict[str, Template] = {}
        self._making: dict[str, asyncio.Task[Template]] = {}
        self._doubted: set[str] = set()
        self.boots_s: list[float] = []
        """How long the machines that were booted here took, from the start of the VMM until they were ready."""

    async def get(self, shape: Shape) -> Template:
        """The template of this shape; made, or read from disk, where it isn't there. Raises `NotFound` without a
        kernel, `CreateFailed`, `Unavailable`."""
        kernel = self._kernels.best(built=self._machines.driver.built_kernel)
        key = self.key(kernel, shape)
        found = self._open.pop(key, None)
        if found is not None:
            self._open[key] = found  # the last used is the last to go
            if _has(found.disk, shape.disk_bytes):
                return found
            log.warning("a template's disk was removed or cut: it is made again")
            await self.discard(found)
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.create_task(self._make(key, kernel, shape), name="template")
            making.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(making)

    def opened(self, shape: Shape) -> Template | None:
        """The template of this shape, where it is in memory."""
        return self._open.get(self.key(self._kernels.best(built=self._machines.driver.built_kernel), shape))

    def key(self, kernel: Kernel, shape: Shape) -> str:
        """Names a template by all that goes into it."""
        parts = (VERSION, kernel.digest, self.guest.parent.name, self._machines.driver.fingerprint, shape)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]

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
        self._forget(template.key)
        template.disk.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self.root / template.key, True)
        if self._machines.launcher is not None:
            with contextlib.suppress(Unavailable):
                await self._machines.launcher.drop(template.key)

    async def adopt(self, held: frozenset[str]) -> None:
        """What the launcher holds for an earlier server."""
        launcher = self._machines.launcher
        for key in held:
            note = await asyncio.to_thread(self._note, key)
            if launcher is None or note is None:
                continue
            if self._disk(key).exists():
                memory, state = await launcher.take(key)
                self._open[key] = Template(key, memory, state, self._disk(key), note.machine)
        self._machines.disks.drop_templates(self._open.keys())

    async def hold_all(self) -> None:
        """Hand what is open to a new launcher."""
        launcher = self._machines.launcher
        for template in list(self._open.values()):
            if launcher is not None:
                await launcher.hold(template.key, [template.memory, template.state])

    async def close(self) -> None:
        """Let go of all; clones and the launcher keep theirs."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        while self._open:
            self._forget(next(iter(self._open)))

    def _disk(self, key: str) -> Path:
        return self._machines.disks.template_path(key)

    def _forget(self, key: str) -> None:
        template = self._open.pop(key)
        os.close(template.memory)
        os.close(template.state)

    # --- making ---

    async def _make(self, key: str, kernel: Kernel, shape: Shape) -> Template:
        template = await asyncio.to_thread(self._load, key)
        if template is None:
            template = await self._boot(key, kernel, shape)
        self._open[key] = template
        launcher = self._machines.launcher
        if launcher is not None:
            with contextlib.suppress(Unavailable):
                await launcher.hold(key, [template.memory, template.state])
        while len(self._open) > KEEP_OPEN:
            oldest = next(iter(self._open))
            self._forget(oldest)
            if launcher is not None:
                with contextlib.suppress(Unavailable):
                    await launcher.drop(oldest)
        return template

    async def _boot(self, key: str, kernel: Kernel, shape: Shape) -> Template:
        log.info("booting a template: kernel %s, %d MiB, %d layers", kernel.release, shape.memory_bytes >> 20,
                 len(shape.layers))  # fmt: skip
        memory = os.memfd_create("template", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        state = os.memfd_create("state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        begun = time.monotonic()
        try:
            os.ftruncate(memory, shape.memory_bytes)
            boot_s = await self._run(key, kernel, shape, memory, state)
            for fd in (memory, state):
                seal(fd)
            note = Note(shape, kernel.digest, kernel.machine, boot_s, time.time(), os.fstat(state).st_size)
            await asyncio.to_thread(self._save, key, memory, state, note)
        except BaseException:
            os.close(memory)
            os.close(state)
            raise
        log.info("the template was ready after %.1f s, and saved in %.1f s", boot_s, time.monotonic() - begun - boot_s)
        self.boots_s.append(boot_s)
        return Template(key, memory, state, self._disk(key), kernel.machine)

    async def _run(self, key: str, kernel: Kernel, shape: Shape, memory: int, state: int) -> float:
        """Boot, and save: `memory` and `state` are written. Seconds that the boot took."""
        machines = self._machines
        name = f"t{secrets.token_hex(8)}"
        groups = machines.group_shape(shape.memory_bytes, shape.vcpus)
        reservation = machines.pool.reserve(groups)
        machine: Machine | None = None
        begun = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                image, first = (stack.enter_context(closing(fd)) for fd in self.boot_files(kernel))
                machine = await machines.start(
                    name,
                    reservation,
                    groups,
                    disk=lambda: machines.disks.make(name, shape.disk_bytes),
                    disk_bytes=shape.disk_bytes,
                    layers=shape.layers,
                    make=lambda channel, control, disk, layers: machines.driver.command(
                        Start(
                            shape=shape,
                            machine=kernel.machine,
                            channel=channel,
                            control=control,
                            memory=memory,
                            disk=disk,
                            layers=layers,
                            kernel=image,
                            initramfs=first,
                        )
                    ),
                )
            boot_s = await self._wait_and_save(machine, state, self._hot(shape.layers), begun)
            await asyncio.to_thread(machines.disks.keep, name, key)
            return boot_s
        finally:
            await asyncio.shield(machines.end(name, reservation, machine))

    async def _wait_and_save(self, machine: Machine, state: int, hot: Sequence[str], begun: float) -> float:
        ended = asyncio.ensure_future(machine.control.ended())
        ready = asyncio.ensure_future(first_word(machine))
        try:
            async with asyncio.timeout(BOOT_S):
                await asyncio.wait(
                    (ready, ended, self._machines.exited(machine.name)), return_when=asyncio.FIRST_COMPLETED
                )
            if not ready.done():
                said = ended.result().console if ended.done() else self._machines.exited(machine.name).result().said
                raise CreateFailed(f"a virtual machine could not boot: {said.strip()[-1000:]}")
            sock = await ready
            boot_s = time.monotonic() - begun
            async with asyncio.timeout(BOOT_S):
                await warm(sock, hot)
            await machine.control.save(state)
            return boot_s
        except TimeoutError:
            raise CreateFailed(f"a virtual machine did not boot in {BOOT_S:g} s") from None
        finally:
            ready.cancel()
            ended.cancel()
            for found in await asyncio.gather(ready, ended, return_exceptions=True):
                if isinstance(found, socket.socket):
                    found.close()

    def _hot(self, layers: Sequence[str]) -> list[str]:
        """Files that most sandboxes read, of all layers."""
        found: list[str] = []
        for digest in layers:
            with contextlib.suppress(NotFound):
                found += (f"/{path}" for path in self._layers.meta(digest).hot if path != "/")
        return found

    def boot_files(self, kernel: Kernel) -> tuple[int, int]:
        """Descriptors of a kernel and the first file system with our guest; the caller's."""
        directory = self._kernels.path(kernel)
        modules = {name: (directory / "modules" / name).read_bytes() for name in kernel.modules}
        first = os.memfd_create("initramfs", os.MFD_CLOEXEC)
        with open(first, "wb", closefd=False) as file:
            file.write(initramfs.make(self.guest.read_bytes(), modules))
        return os.open(directory / "kernel", os.O_RDONLY | os.O_CLOEXEC), first

    # --- on disk ---

    def _note(self, key: str) -> Note | None:
        try:
            return msgspec.json.decode((self.root / key / "template.json").read_bytes(), type=Note)
        except (OSError, msgspec.MsgspecError):
            return None

    def _save(self, key: str, memory: int, state: int, note: Note) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = sorted(self.root.glob("*/template.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[: max(0, len(kept) - KEEP + 1)]:
            shutil.rmtree(path.parent, ignore_errors=True)
        temporary = self.root / f".tmp-{secrets.token_hex(8)}"
        temporary.mkdir(mode=0o700)
        try:
            for name, fd in (("memory", memory), ("state", state)):
                with open(temporary / name, "xb") as file:
                    copy_data(fd, file.fileno())
            with open(temporary / "disk", "xb") as file:
                copy_file(self._disk(key), file.fileno())
            (temporary / "template.json").write_bytes(msgspec.json.encode(note))
            temporary.rename(self.root / key)
        except OSError as error:  # it serves from memory; the next server boots again
            log.warning("a template can't be kept on disk: %s", error)
            shutil.rmtree(temporary, ignore_errors=True)

    def _load(self, key: str) -> Template | None:
        """None where it isn't there, or was cut short."""
        note = self._note(key)
        if note is None:
            return None
        directory = self.root / key
        with contextlib.ExitStack() as undo:
            found = []
            for name in ("memory", "state"):
                fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                try:
                    with open(directory / name, "rb") as file:
                        copy_data(file.fileno(), fd)
                except OSError:
                    return None
                seal(fd)
                found.append(fd)
            whole = (
                os.fstat(found[0]).st_size == note.shape.memory_bytes and os.fstat(found[1]).st_size == note.state_bytes
            )
            if not whole or not self._load_disk(key, note.shape.disk_bytes):
                shutil.rmtree(directory, ignore_errors=True)
                return None
            with contextlib.suppress(OSError):
                os.utime(directory / "template.json")
            undo.pop_all()
            return Template(key, found[0], found[1], self._disk(key), note.machine)

    def _load_disk(self, key: str, size: int) -> bool:
        """Have the disk among the machines'. False where it was cut short."""
        try:
            if self.root.joinpath(key, "disk").stat().st_size != size:
                return False
            self._machines.disks.bring(self.root / key / "disk", key)
        except OSError:
            return False
        return True


async def first_word(machine: Machine) -> socket.socket:
    """Connected, and the guest has said READY. As `wait_ready`."""
    sock = await machine.port()
    try:
        await wait_ready(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _has(disk: Path, size: int) -> bool:
    try:
        return disk.stat().st_size == size
    except OSError:
        return False


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)

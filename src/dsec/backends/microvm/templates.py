"""Templates of microVMs: what boots them, and what a template is the template of.

A template is made on first use of a kernel, a guest, a VMM and a shape (memory, virtual CPUs, layers); its key covers
all of them. How templates are kept is `vmm.template_cache`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from dsec.backends.microvm import initramfs
from dsec.errors import CreateFailed, NotFound
from dsec.store.kernels import Kernel, KernelStore
from dsec.store.layers import LayerStore
from dsec.vmm.driver import Shape, Start
from dsec.vmm.first_words import wait_ready, warm
from dsec.vmm.machine import Machine, Machines
from dsec.vmm.template_cache import Size, Template, TemplateCache

log = logging.getLogger(__name__)

VERSION = 3
BOOT_S = 120.0
KEEP = 16
"""Templates on disk."""
KEEP_OPEN = 8
"""Templates in memory."""


class Templates(TemplateCache):
    """All templates of a node."""

    def __init__(self, root: Path, machines: Machines, kernels: KernelStore, layers: LayerStore, guest: Path) -> None:
        """`guest`: the compiled program; its directory's name is its version."""
        super().__init__(root, machines, keep=KEEP, keep_open=KEEP_OPEN)
        self._kernels = kernels
        self._layers = layers
        self.guest = guest

    async def of(self, shape: Shape) -> Template:
        """The template of this shape; made, or read from disk, where it isn't there. Raises `NotFound` without a
        kernel, `CreateFailed`, `Unavailable`, OSError."""
        kernel = self._kernel()
        key = self.key(kernel, shape)
        size = Size(shape.memory_bytes, shape.disk_bytes)
        return await self.get(key, size, partial(self._boot, key, kernel, shape), kernel.machine)

    def opened_of(self, shape: Shape) -> Template | None:
        """The same, where it is in memory."""
        return self.opened(self.key(self._kernel(), shape))

    def _kernel(self) -> Kernel:
        return self._kernels.best(built=self._machines.driver.built_kernel)

    def key(self, kernel: Kernel, shape: Shape) -> str:
        """Names a template by all that goes into it."""
        parts = (VERSION, kernel.digest, self.guest.parent.name, self._machines.driver.fingerprint, shape)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]

    async def _boot(self, key: str, kernel: Kernel, shape: Shape, memory: int, state: int) -> float:
        """As `template_cache.Make`."""
        log.info("booting a template: kernel %s, %d MiB, %d layers", kernel.release, shape.memory_bytes >> 20,
                 len(shape.layers))  # fmt: skip
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


async def first_word(machine: Machine) -> socket.socket:
    """Connected, and the guest has said READY. As `wait_ready`."""
    sock = await machine.port()
    try:
        await wait_ready(sock)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)

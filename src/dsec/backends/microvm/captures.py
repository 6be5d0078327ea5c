"""The files that a machine has written, as a directory of the host's: for snapshots, and for who judges them.

A machine's disk is only whole when its kernel has written down what it holds in memory. So a copy of the machine goes
on (`moments`), alone, without a channel to anybody, is told to write everything to its own disk and shut down, and
that disk is read without the kernel (`store.ext4_files`). The machine itself stands still for the copy, and no longer.
What a copy does is what its machine could have done, so it is trusted as little: it has a time limit, and its disk is
hostile.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from dsec.backends.microvm.node import VmNode
from dsec.errors import Unavailable
from dsec.ports import Captured, Handle
from dsec.store.ext4_files import take_out
from dsec.vmm.driver import Shape
from dsec.vmm.first_words import halt
from dsec.vmm.instance import MachineInstance
from dsec.vmm.machine import Machine
from dsec.vmm.moments import Moment, Moments

ID_BASE = 1 << 20
"""What the root of a machine is in a capture."""
WRITE_S = 60.0
"""For a copy to write everything to its disk."""
AT_ONCE = 2
_PANIC = "Kernel panic"


class Captures:
    """All captures of a node."""

    def __init__(self, node: VmNode, moments: Moments) -> None:
        self._node = node
        self._moments = moments
        self._room = asyncio.Semaphore(AT_ONCE)

    async def take(self, instance: MachineInstance, handle: Handle, layers: tuple[str, ...]) -> Captured:
        """Until `drop`. Raises `Unavailable`, `InvalidRequest` (its disk isn't sound), `TooLarge`."""
        async with self._room:
            name = await self._moments.take(instance, handle)
            try:
                moment = self._moments.get(name)
                shape = Shape(handle["vcpus"], handle["memory_bytes"], handle["disk_bytes"], layers)
                return await self._written(name, shape, handle["cpus"], moment)
            except BaseException:
                await asyncio.shield(self.drop(name))
                raise
            finally:
                self._moments.drop(name)

    async def _written(self, name: str, shape: Shape, cpus: float, moment: Moment) -> Captured:
        node, own = self._node, f"v{secrets.token_hex(8)}"
        reservation = node.pool.reserve(node.machines.group_shape(shape.memory_bytes, cpus))
        machine: Machine | None = None
        try:
            machine = await node.go_on_from(own, reservation, shape, cpus, moment.template)
            await self._shut_down(machine, moment)
            volume = node.host.volume
            upper = await asyncio.to_thread(volume.make_capture, name, shape.disk_bytes)
            taking = asyncio.to_thread(take_out, node.disks.path(own), b"upper", upper, id_base=ID_BASE)
            await asyncio.shield(asyncio.ensure_future(taking))
            return Captured(name, upper, ID_BASE)
        except OSError as error:
            raise Unavailable(f"the machine's files can't be kept: {error.strerror}") from error
        finally:
            await asyncio.shield(node.machines.end(own, reservation, machine))

    async def _shut_down(self, machine: Machine, moment: Moment) -> None:
        sock = machine.connect()
        ended = asyncio.ensure_future(machine.control.ended())
        exited = self._node.machines.exited(machine.name)
        try:
            async with asyncio.timeout(WRITE_S):
                await machine.control.resume()
                await halt(sock, moment.token)
                await asyncio.wait((ended, exited), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise Unavailable(
                f"the machine's kernel didn't write its files down within {WRITE_S:g} s",
                remedy="Try again; if it stays so, root inside has made it so.",
            ) from None
        finally:
            sock.close()
            if not ended.done():
                ended.cancel()
        if not ended.done() or ended.cancelled() or _PANIC in ended.result().console:
            raise Unavailable("the machine's kernel failed while it wrote its files down", remedy="Try again.")

    async def drop(self, name: str) -> None:
        """Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(self._node.host.volume.drop_capture, name)

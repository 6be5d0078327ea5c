"""Network namespaces for a cluster's processes: one each, joined by veths to a bridge in another one.

The host's own namespace has no part in it. They have no names: each is there as long as somebody holds it open or a
process is in it, so that a test that is killed leaves none.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _made() -> int:
    """A new namespace, held open."""

    def make() -> int:
        _call("unshare", CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


class Space:
    """One of them."""

    def __init__(self, descriptor: int, address: str, port: str) -> None:
        self.descriptor = descriptor
        self.address = address
        self.port = port
        """Its end of the veth at the bridge."""

    def command(self, *arguments: str) -> list[str]:
        """To run something in it; `descriptor` has to be passed on."""
        return ["nsenter", f"--net=/proc/self/fd/{self.descriptor}", *arguments]

    def run(self, *arguments: str) -> None:
        done = subprocess.run(
            self.command(*arguments), pass_fds=[self.descriptor], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (arguments, done.stderr)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, is in it."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", self.descriptor, CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, CLONE_NEWNET)
            os.close(before)


class Spaces:
    """The bridge and all that hang on it."""

    def __init__(self) -> None:
        self._all: list[Space] = []
        self._bridge = Space(_made(), "", "")
        self._bridge.run("ip", "link", "add", "bridge", "type", "bridge")
        self._bridge.run("ip", "link", "set", "bridge", "up")

    def add(self) -> Space:
        number = len(self._all) + 1
        space = Space(_made(), f"10.77.0.{number}", f"v{number}")
        self._all.append(space)
        there = f"/proc/{os.getpid()}/fd/{space.descriptor}"
        self._bridge.run("ip", "link", "add", space.port, "type", "veth", "peer", "name", "eth0", "netns", there)
        self._bridge.run("ip", "link", "set", space.port, "master", "bridge", "up")
        for words in (
            f"addr add {space.address}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
        ):
            space.run("ip", *words.split())
        return space

    def cut(self, space: Space, whole: bool = False) -> None:
        """Off the others; `whole`: no more."""
        self._bridge.run("ip", "link", "set", space.port, "up" if whole else "down")

    def isolate(self, space: Space, others: list[Space], whole: bool = False) -> None:
        """Off these alone: what goes there or comes from there is dropped, by routes that lead nowhere; `whole`: no
        more."""
        for other in others:
            for here, there in ((space, other), (other, space)):
                here.run("ip", "route", "del" if whole else "add", "blackhole", f"{there.address}/32")

    def close(self) -> None:
        """They go when the last process in them has ended."""
        for space in (*self._all, self._bridge):
            os.close(space.descriptor)
        self._all.clear()

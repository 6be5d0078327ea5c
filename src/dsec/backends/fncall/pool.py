"""The function environments of a node: a jail for each project, environment and set of imports, made when it is asked
for, kept while it is used, and ended when it has been idle or another needs its place.

Invariant: a jail serves one project only, so that whatever a call could do to its jail, it does to its own project.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from dsec.backends.fncall.host import JailHost
from dsec.backends.fncall.jail import AHEAD, SHAPE, FunctionJail
from dsec.errors import CreateFailed, DsecError, QuotaExceeded
from dsec.ports import Clock

log = logging.getLogger(__name__)

MOST_JAILS = 16
IDLE_S = 300.0
_SWEEP_S = 15.0
PARENT_ENV = {
    "OPENBLAS_NUM_THREADS": "1",  # threads of a parent's are not in what it forks
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
BASE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
Surroundings = Callable[[str, str], tuple[Sequence[str], Mapping[str, str]]]
"""The layers and the variables of an environment, by its name and the project; raises `EnvironmentNotFound`."""


class Key(NamedTuple):
    """Who shares a jail."""

    project: str
    layers: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    imports: tuple[str, ...] | None
    """What its warm parent has imported; None: it has none, and workers execute programs."""


class Jails:
    """Close it in the end."""

    def __init__(
        self,
        host: JailHost,
        surroundings: Surroundings,
        clock: Clock,
        *,
        most: int = MOST_JAILS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._host = host
        self._surroundings = surroundings
        self._clock = clock
        self._most = most
        self._idle_s = idle_s
        self._jails: dict[Key, FunctionJail] = {}
        self._making: dict[Key, asyncio.Task[FunctionJail]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._code = (files("dsec.backends.fncall") / "parent.py").read_text()
        self._sweeper: asyncio.Task[None] | None = None

    def key(self, project: str, environment: str, imports: Sequence[str] | None) -> Key:
        """Raises `EnvironmentNotFound`."""
        layers, env = self._surroundings(environment, project)
        variables = tuple((BASE_ENV | dict(env) | {"HOME": "/tmp"}).items())
        return Key(project, tuple(layers), variables, None if imports is None else tuple(imports))

    async def use(self, key: Key) -> FunctionJail:
        """A jail that isn't ended before it is `left`. Raises `Unsupported` (its imports fail, there is no Python),
        `CreateFailed`, `QuotaExceeded` where as many as may be are in use."""
        jail = self._jails.get(key)
        if jail is None or jail.broken is not None:
            jail = await self._made(key)
        jail.users += 1
        return jail

    def use_ready(self, key: Key) -> FunctionJail | None:
        """As `use`; None where none is there."""
        jail = self._jails.get(key)
        if jail is None or jail.broken is not None:
            return None
        jail.users += 1
        return jail

    def left(self, jail: FunctionJail) -> None:
        """Once for each `use`."""
        jail.users -= 1
        jail.used_at = self._clock.monotonic()

    async def close(self) -> None:
        """End them all."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        for key in list(self._jails):
            self._end(key)
        await asyncio.gather(*self._ending, return_exceptions=True)

    # --- making and ending ---

    async def _made(self, key: Key) -> FunctionJail:
        making = self._making.get(key)
        if making is None:
            if key in self._jails:
                self._end(key)  # it is broken
            self._make_room(key.project)
            making = self._making[key] = asyncio.ensure_future(self._make(key))
            making.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(making)

    async def _make(self, key: Key) -> FunctionJail:
        name = f"fn{os.urandom(10).hex()}"
        warm = key.imports is not None
        channel = await self._host.make(name, key.layers, key.project, SHAPE)
        jail = FunctionJail(self._host, name, key.project, channel, warm=warm)
        try:
            if key.imports is not None:
                await jail.start_parent(self._code, key.imports, dict(key.env) | PARENT_ENV)
            for _ in range(AHEAD):
                jail.add_lane()
        except BaseException as error:
            await asyncio.shield(jail.close())
            if isinstance(error, OSError):
                raise CreateFailed(f"the host refused a function environment: {error}", remedy="Try again.") from error
            raise
        jail.used_at = self._clock.monotonic()
        self._jails[key] = jail
        if self._sweeper is None:
            self._sweeper = asyncio.ensure_future(self._sweep())
        return jail

    def _make_room(self, project: str) -> None:
        """Room for one more of a project's. The last quarter of the places is for who has less than that: one project
        alone, with calls that last or imports that hang, leaves room for others."""
        share = self._most // 4
        while True:
            own = sum(key.project == project for key in (*self._jails, *self._making))
            most = self._most if own < share else self._most - share
            if len(self._jails) + len(self._making) < most:
                return
            idle = [key for key, jail in self._jails.items() if not jail.users]
            if not idle:
                raise QuotaExceeded(f"{most} function environments are in use on this node", remedy="Try again later.")
            self._end(min(idle, key=lambda key: self._jails[key].used_at))

    def _end(self, key: Key) -> None:
        task = asyncio.ensure_future(self._jails.pop(key).close())
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a function environment can't be ended: %s", task.exception())

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(_SWEEP_S)
            now = self._clock.monotonic()
            for key, jail in list(self._jails.items()):
                if jail.users:
                    continue
                if jail.used_at < now - self._idle_s or jail.broken is not None:
                    with contextlib.suppress(DsecError):
                        self._end(key)
                elif jail.used_at < now - _SWEEP_S:
                    jail.rest()

"""Groups: sandboxes that are started and ended as one, and reach each other by name.

Owns nothing on the server but what is there for every sandbox: a group is a run of its name, its sandboxes have the
names of its services and a label, their commands a fixed key. So whoever comes after a client that died finds it all,
and starting a group again goes on where the start was left.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from dsec.errors import Conflict, DsecError, NotFound, PortClosed, ServiceFailed
from dsec.sdk._command import AsyncCommand
from dsec.sdk._commands import argv_of
from dsec.sdk._results import CommandResult
from dsec.sdk._sandbox import AsyncSandbox
from dsec.spec.groups import GROUP_LABEL, Health, Service, health_of, in_order, sandbox_of
from dsec.spec.sandbox import SandboxInfo, State

if TYPE_CHECKING:
    from dsec.sdk._client import AsyncClient

KEY = "dsec.service"
"""Of a service's command."""
_LOG = "/tmp/service.log"
_TO_LOG = f'exec "$@" >>{_LOG} 2>&1'
_FOR_EVER_S = 365 * 86400.0
_SAID = 2000

Infos = dict[str, SandboxInfo]
Groups = dict[str, dict[str, SandboxInfo]]
Checks = dict[str, bool]
Listed = list[SandboxInfo]


class AsyncGroup:
    """Sandboxes that are started and ended as one. Make it with `create`, find it again with `find`; leaving
    `async with` ends it. Like a sandbox, nothing else does but `kill` and its sandboxes' own ends.
    """

    def __init__(self, name: str, sandboxes: dict[str, AsyncSandbox], client: AsyncClient | None) -> None:
        """Not for callers: use `create` or `find`."""
        self.name: str = name
        """The run of its sandboxes too."""
        self._sandboxes = sandboxes
        self._client = client

    @classmethod
    async def create(
        cls,
        services: Mapping[str, Service],
        *,
        name: str | None = None,
        client: AsyncClient | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGroup:
        """Start all services: their sandboxes at once, then each one's command when those that it links to are ready.
        Returns when all are ready.

        `name`: None: one is made up. The same name and services again give the same group, and what was started isn't
        started again. Where a service fails, all of the group is ended: `ServiceFailed` says which and why, with what
        it wrote last. Raises `InvalidRequest`, `Conflict` (a service of this name has another spec; nothing is ended),
        and as `AsyncSandbox.create`.
        """
        name = name or f"group-{secrets.token_hex(6)}"
        order = in_order(services)
        specs = {each: sandbox_of(name, each, services) for each in order}
        group = cls(name, {}, client)
        try:
            work = (AsyncSandbox.create(spec, client=client, deadline_s=deadline_s) for spec in specs.values())
            made = await asyncio.gather(*work, return_exceptions=True)  # all of them: what is made can be ended
            for each, sandbox in zip(specs, made, strict=True):
                if isinstance(sandbox, BaseException):
                    raise sandbox
                group._sandboxes[each] = sandbox
            for each in order:
                await group._start(each, services[each])
        except Conflict:
            raise
        except BaseException:
            await AsyncSandbox.kill_many(await group._listed(), client=client)
            raise
        return group

    @classmethod
    async def find(cls, name: str, *, client: AsyncClient | None = None) -> AsyncGroup:
        """The group of a name, with those of its sandboxes that live. Raises `NotFound` where none does."""
        group = cls(name, {}, client)
        infos = await group._listed()
        if not infos:
            raise NotFound(f"there is no group {name[:200]!r}", remedy="`dsec group ls` lists them.")
        made = [await AsyncSandbox.connect(info.id, client=client) for info in infos]
        group._sandboxes = {each.info.spec.name or "": each for each in made}
        return group

    @classmethod
    async def list(cls, *, client: AsyncClient | None = None) -> Groups:
        """The project's groups: their live sandboxes, by group and service."""
        found: Groups = {}
        for info in await AsyncSandbox.list(client=client):
            group = info.spec.labels.get(GROUP_LABEL)
            if group is not None and group == info.spec.run:
                found.setdefault(group, {})[info.spec.name or ""] = info
        return found

    def sandbox(self, service: str) -> AsyncSandbox:
        """The sandbox of a service. Raises `NotFound`."""
        if service not in self._sandboxes:
            raise NotFound(f"group {self.name!r} has no service {service[:80]!r}")
        return self._sandboxes[service]

    async def refresh(self) -> Infos:
        """The sandboxes as they are now, by service; ended ones too."""
        return {name: await sandbox.refresh() for name, sandbox in self._sandboxes.items()}

    async def check(self) -> Checks:
        """Whether each service is ready now: one check of its health, where it has one, else whether its command runs
        or has ended with 0."""
        names = list(self._sandboxes)
        results = await asyncio.gather(*(self._ready(name) for name in names))
        return dict(zip(names, results, strict=True))

    async def kill(self) -> None:
        """End all of it. Idempotent. Raises the first error of those that couldn't be ended."""
        errors = await AsyncSandbox.kill_many(list(self._sandboxes.values()), client=self._client)
        for error in errors.values():
            raise error

    async def __aenter__(self) -> AsyncGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def _listed(self) -> Listed:
        return await AsyncSandbox.list(run=self.name, labels={GROUP_LABEL: self.name}, client=self._client)

    # --- one service ---

    async def _start(self, name: str, service: Service) -> None:
        command: AsyncCommand | None = None
        if service.command is not None:
            argv = ["/bin/sh", "-c", _TO_LOG, "sh", *argv_of(service.command)]
            commands = self._sandboxes[name].commands
            try:
                command = await commands.start(argv, key=KEY, command_timeout_s=_FOR_EVER_S)
            except Conflict as error:
                if not error.details.get("key_used"):
                    raise
                raise Conflict(
                    f"service {name!r} of group {self.name!r} was started with another command",
                    remedy=f"End the group first (`dsec group down {self.name}`), or give this one another name.",
                ) from None
        if service.health is None:
            return
        ended = None if command is None else asyncio.ensure_future(command.wait())
        try:
            for attempt in range(service.health.retries):
                if attempt:
                    await _pause(ended, service.health.interval_s)
                if ended is not None and ended.done():
                    raise await self._failed(name, f"its command ended: {(await ended).exit_code}")
                if await self._passes(name, service.health):
                    return
            raise await self._failed(name, f"it wasn't ready after {service.health.retries} checks")
        finally:
            if ended is not None and command is not None:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)
                await command.detach()

    async def _failed(self, name: str, why: str) -> ServiceFailed:
        said = await self._sandboxes[name].commands.run(["tail", "-c", str(_SAID), _LOG], request_timeout_s=10)
        return ServiceFailed(
            f"service {name!r} failed: {why}", service=name, log=said.stdout, remedy="The log says what it wrote last."
        )

    async def _ready(self, name: str) -> bool:
        sandbox = self._sandboxes[name]
        try:
            health = health_of((await sandbox.refresh()).spec)
            if sandbox.info.ended_at is not None:
                return False
            return await (self._works(name) if health is None else self._passes(name, health))
        except DsecError:
            return False

    async def _works(self, name: str) -> bool:
        sandbox = self._sandboxes[name]
        if sandbox.info.state is State.PAUSED:
            return True  # to ask would make it go on
        try:
            command = await sandbox.commands.attach(KEY)
        except NotFound as error:
            if type(error) is not NotFound:
                raise
            return True  # it has none
        try:
            if any(each.key == KEY for each in await sandbox.commands.list()):
                return True
            return (await command.wait()).exit_code == 0
        finally:
            await command.detach()

    async def _passes(self, name: str, health: Health) -> bool:
        sandbox = self._sandboxes[name]
        try:
            async with asyncio.timeout(health.timeout_s):
                if health.port is not None:
                    await (await sandbox.ports.connect(health.port)).close()
                if health.command is not None:
                    done = await sandbox.commands.run(health.command, command_timeout_s=health.timeout_s)
                    return done.exit_code == 0
        except (TimeoutError, PortClosed):
            return False
        return True


async def _pause(ended: asyncio.Future[CommandResult] | None, seconds: float) -> None:
    """Sleep, but not on when the command has ended."""
    if ended is None:
        await asyncio.sleep(seconds)
    else:
        await asyncio.wait([ended], timeout=seconds)

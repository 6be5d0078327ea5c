"""Builds, as callers have them: at most so many at once, each in a scratch directory that goes with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from dsec.builder.fetching import Downloads
from dsec.builder.files import Files, leave_out, load_archive
from dsec.builder.interpreter import Interpreter
from dsec.builder.memory import Memory
from dsec.builder.workshop import LABEL, Say, Stage, Workshop
from dsec.edge.charges import Charges
from dsec.edge.client import EdgeClient, Principal
from dsec.errors import DsecError, InvalidRequest
from dsec.recipe.dockerfile import MAX_BYTES, Dockerfile, parse
from dsec.recipe.ignore import Ignored
from dsec.spec.building import BACKEND, BuildLimits
from dsec.spec.network import Network
from dsec.spec.sandbox import Name
from dsec.store.environments import Environment
from dsec.store.image import host_platform, parse_platform
from dsec.store.service import LayerService

AT_ONCE = 4
"""Builds; others wait."""
_PAGE = 1000


class BuildOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller says of a build."""

    name: Name
    """Of the environment that it becomes."""
    dockerfile: Annotated[str, Meta(min_length=1, max_length=1000)] = "Dockerfile"
    """Its path in the context."""
    target: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    """The stage that counts; None: the last."""
    args: dict[str, str] = {}
    """For ARG."""
    network: Network = {}
    """What its commands may reach, by named permission; nothing where absent."""
    fresh: bool = False
    """Do every step again."""
    platform: Annotated[str, Meta(max_length=100)] | None = None
    """Of registry images, like `linux/arm64`; None: the server's own."""
    readers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=100)] = []
    description: Annotated[str, Meta(max_length=1000)] = ""
    limits: BuildLimits = BuildLimits()


class BuildService:
    """The builds of one node."""

    def __init__(
        self,
        layers: LayerService,
        edge: EdgeClient,
        written: Callable[[str], tuple[Path, int]],
        downloads: Downloads,
        charges: Charges,
    ) -> None:
        """`written`: what a sandbox has written, as `Volume.written`."""
        self.layers = layers
        self._edge = edge
        self._written = written
        self._downloads = downloads
        self._charges = charges
        self._memory = Memory(layers.layers)
        self._room = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A build that no request waits for; it ends with the server at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Stop the builds that go on in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def clear(self) -> None:
        """End the sandboxes of builds that an earlier server was in the middle of. Call when no build runs."""
        for project in {key.project for key in self._edge.list_keys()}:
            page = await self._edge.list_sandboxes(project, labels={LABEL: "1"}, limit=_PAGE)
            for info in page.sandboxes:
                with contextlib.suppress(DsecError):
                    await self._edge.delete(info.id)
        await asyncio.to_thread(self._memory.tidy)

    @asynccontextmanager
    async def workshop(
        self,
        principal: Principal,
        say: Say,
        *,
        network: Network,
        limits: BuildLimits = BuildLimits(),  # noqa: B008 (frozen)
        fresh: bool = False,
        platform: str | None = None,
    ) -> AsyncIterator[tuple[Workshop, Path]]:
        """The means of one build, and a directory of its own. It counts as one sandbox on its project's quota all the
        while. Raises `PermissionDenied` where the caller may not grant that network."""
        self._edge.check_grants(principal, network or None)
        with self._charges.one(principal.project, BACKEND, limits.cpus, limits.memory_bytes):
            if self._room.locked():
                say("waiting for other builds")
            async with self._room, self.layers.making():
                with self.layers.layers.scratch() as scratch:
                    workshop = Workshop(
                        self.layers,
                        self._edge,
                        self._written,
                        self._memory,
                        self._downloads,
                        scratch=Path(scratch),
                        project=principal.project,
                        say=say,
                        network=network,
                        limits=limits,
                        fresh=fresh,
                        platform=platform,
                    )
                    try:
                        yield workshop, Path(scratch)
                    finally:
                        workshop.close()

    async def build(self, principal: Principal, options: BuildOptions, archive: Path, say: Say) -> Environment:
        """Build the Dockerfile in an archive (tar, may be compressed) of a context. Raises `InvalidRequest` and
        `Unsupported` with the line, `BuildFailed` with the command's last output, `TooLarge`, `PermissionDenied`, and
        what importing an image raises."""
        platform = parse_platform(options.platform) if options.platform else host_platform()
        async with self.workshop(
            principal,
            say,
            network=options.network,
            limits=options.limits,
            fresh=options.fresh,
            platform=options.platform,
        ) as (workshop, scratch):
            with open(scratch / "context", "x+b") as data:  # noqa: ASYNC230 (its I/O is in threads)
                context, dockerfile = await asyncio.to_thread(self._context, archive, data, options.dockerfile)
                interpreter = Interpreter(
                    workshop, dockerfile, context, platform=platform, arguments=options.args, target=options.target
                )
                stage = await interpreter.run()
                layers = await workshop.finish(stage)
            return await self.named(
                principal.project,
                options.name,
                layers,
                stage,
                description=options.description,
                readers=options.readers,
            )

    async def named(
        self,
        project: str,
        name: str,
        layers: Sequence[str],
        stage: Stage,
        *,
        description: str = "",
        readers: Sequence[str] = (),
    ) -> Environment:
        """Make what was built an environment."""
        made = await asyncio.to_thread(
            self.layers.environments.put,
            name,
            layers,
            user=stage.config.user,
            workdir=stage.config.workdir,
            description=description,
            project=project,
            readers=readers,
        )
        await self.layers.publish()
        return made

    @staticmethod
    def _context(archive: Path, data: object, name: str) -> tuple[Files, Dockerfile]:
        files = load_archive(archive, data)  # type: ignore[arg-type]
        text = _text(files, name)
        if text is None:
            raise InvalidRequest(
                f"the context has no {name[:200]!r}", remedy="Say where the Dockerfile is.", field="dockerfile"
            )
        dockerfile = parse(text)
        lines = _text(files, f"{name}.dockerignore")
        if lines is None:
            lines = _text(files, ".dockerignore")
        leave_out(files, Ignored((lines or "").splitlines()))
        return files, dockerfile


def _text(files: Files, name: str) -> str | None:
    try:
        node = files.find(name.encode(errors="surrogateescape"))
    except ValueError as error:
        raise InvalidRequest(f"{name[:200]!r} in the context: {error}") from None
    if node is None or not node.is_file:
        return None
    try:
        return files.content(node, MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name[:200]!r} in the context is not UTF-8") from None

"""The steps of a build: bases are looked up, commands run in sandboxes of their own, files become layers.

Owns the sandboxes of a build, which carry the label `dsec.build` and end with their step, whatever becomes of it.
A sandbox's changes are read from outside once nothing runs in it but its guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from msgspec.structs import replace

from dsec.builder.copying import ROOT, Copy, Entries, Owner, Source
from dsec.builder.fetching import Downloads
from dsec.builder.files import Files, Layers
from dsec.builder.memory import NOTHING, Memory, key_of
from dsec.builder.mounting import CACHE, Mounted, Mounts
from dsec.edge.client import Created, EdgeClient, Execution
from dsec.errors import BuildFailed, DsecError, EnvironmentNotFound, InvalidRequest, NotFound, OutcomeUnknown
from dsec.spec.building import BACKEND, BuildLimits
from dsec.spec.network import Network
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, SandboxSpec
from dsec.store.archive import place_entries
from dsec.store.data import Budget
from dsec.store.directory import DirectoryReader
from dsec.store.environments import PATH, SCRATCH, merged_config
from dsec.store.format import ImageConfig
from dsec.store.image import host_platform, parse_platform
from dsec.store.layers import LayerMaker
from dsec.store.service import LayerService
from dsec.store.tree import Node, directory, walk

LABEL = "dsec.build"
DEFAULT_SHELL = ("/bin/sh", "-c")
LAST_BYTES = 4096
"""Of a failing command's output, in the error."""
MAX_LINES, LINE_BYTES = 5000, 1000
"""Of one command's output, that are told."""
_SLACK_S = 600.0

Say = Callable[[str], None]
"""Told what happens, a line each."""


class Stage:
    """What a build has so far."""

    def __init__(self, layers: Sequence[str], config: ImageConfig, said: ImageConfig) -> None:
        """`layers`: digests, top first. `said`: what the layers themselves say of `config`."""
        self.layers = list(layers)
        self.config = config
        self.said = said
        self.shell: Sequence[str] = DEFAULT_SHELL
        self.arguments: dict[str, str] = {}
        self.view: Layers | None = None
        """What the layers show, once somebody asked."""

    @property
    def variables(self) -> dict[str, str]:
        """What words may name: ENV wins over ARG."""
        return self.arguments | self.config.env


class Workshop:
    """The means of one build."""

    def __init__(
        self,
        service: LayerService,
        edge: EdgeClient,
        written: Callable[[str], tuple[Path, int]],
        memory: Memory,
        downloads: Downloads,
        *,
        scratch: Path,
        project: str,
        say: Say,
        network: Network,
        limits: BuildLimits,
        fresh: bool = False,
        platform: str | None = None,
    ) -> None:
        """`written`: what a sandbox has written, as `Volume.written`. `scratch`: a directory of this build. `network`:
        what commands may reach. `fresh`: remembered steps don't count."""
        self._service = service
        self._store = service.layers
        self._edge = edge
        self._written = written
        self._memory = memory
        self.project = project
        self.say = say
        self._network = network
        self._limits = limits
        self.fresh = fresh
        self._platform = platform
        self._downloads = downloads
        self._scratch = scratch
        self._views: list[Layers] = []
        self._fetched: list[BinaryIO] = []

    def close(self) -> None:
        for view in self._views:
            view.close()
        for file in self._fetched:
            file.close()

    # --- beginning ---

    async def base(self, reference: str, platform: str | None = None, credentials: str | None = None) -> Stage:
        """A stage over an environment, a named layer, or a registry's image. Raises `NotFound` and what importing
        raises."""
        environments = self._service.environments
        if reference == SCRATCH:
            return Stage([], ImageConfig(), ImageConfig())
        runtime = environments.runtime()
        try:
            environment = await self._service.find_environment(self.project, reference)
        except EnvironmentNotFound:
            pass
        else:
            layers = [layer for layer in environment.layers if layer != runtime]
            said = await asyncio.to_thread(self._said, layers)
            config = replace(
                said,
                env=environment.env,
                user=environment.user,
                workdir=environment.workdir,
                entrypoint=environment.entrypoint or said.entrypoint,
            )
            return Stage(layers, config, said)
        with contextlib.suppress(NotFound):
            layers = [await self._service.find_layer(self.project, reference)]
            said = await asyncio.to_thread(self._said, layers)
            return Stage(layers, said, said)
        chosen = platform or self._platform
        try:
            found = await self._service.fetch(
                self.project,
                reference,
                parse_platform(chosen) if chosen else host_platform(),
                lambda step, done=0, total=0: self.say(step) if not total else None,
                credentials=credentials,
            )
        except InvalidRequest as error:
            raise InvalidRequest(
                f"no earlier stage, environment or layer is called {reference[:200]!r}; as an image: {error.message}",
                remedy=error.remedy,
            ) from error
        return Stage(found.layers, found.config, found.config)

    def _said(self, layers: Sequence[str]) -> ImageConfig:
        configs = []
        for layer in layers:
            with contextlib.suppress(NotFound):  # of the first version
                configs.append(self._store.manifest(layer).config)
        return merged_config(configs)

    async def view(self, stage: Stage) -> Layers:
        """What the stage's layers show."""
        if stage.view is None:
            view = Layers(self._store)
            self._views.append(view)
            for layer in reversed(stage.layers):
                await asyncio.to_thread(view.push, layer)
            stage.view = view
        return stage.view

    async def _push(self, stage: Stage, layer: str) -> None:
        if layer == NOTHING:
            return
        stage.layers.insert(0, layer)
        if stage.view is not None:
            await asyncio.to_thread(stage.view.push, layer)

    # --- steps ---

    async def run(
        self,
        stage: Stage,
        argv: Sequence[str],
        title: str,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        network: bool = True,
        mounts: Sequence[Mounted] = (),
        fresh: bool = False,
    ) -> None:
        """Run a command on top of the stage, and put what it changed there. `env`: variables of this command alone.
        Raises `BuildFailed`, `InvalidRequest` for mounts that can't be, `PlatformError`."""
        config = stage.config
        variables = {"PATH": PATH} | dict(env or {}) | config.env
        user, workdir = user or config.user or "root", config.workdir or "/"
        granted: Network = self._network if network else {}
        seen = await asyncio.to_thread(_seen, mounts)
        key = key_of(self.project, "run", stage.layers, list(argv), variables, user, workdir, granted, *seen)
        known = None if fresh or self.fresh else self._memory.recall(key)
        if known is None:
            await self.directory(stage, workdir)
            spec = ExecSpec(
                argv=list(argv),
                env=variables,
                user=user,
                cwd=workdir,
                merge_stderr=True,
                kill_leftovers=True,
                command_timeout_s=self._limits.step_timeout_s,
                output_bytes=self._limits.output_bytes,
            )
            known = await self._run(stage, spec, title, granted, await self._mounts(stage, mounts))
            self._memory.keep(key, known)
        else:
            self.say("  as before")
        await self._push(stage, known)

    async def _mounts(self, stage: Stage, wanted: Sequence[Mounted]) -> Mounts | None:
        if not wanted:
            return None
        mounts = []
        for each in wanted:
            cached = self._memory.recall(key_of(self.project, "cache", each.cache)) if each.cache else None
            if cached is None:
                mounts.append(each)
                continue
            view = Layers(self._store)
            self._views.append(view)
            await asyncio.to_thread(view.push, cached)
            mounts.append(each._replace(files=view.files, source=view.files.find(CACHE), cached=cached))
        image = (await self.view(stage)).files
        return await asyncio.to_thread(Mounts, self._store, image, mounts)

    async def _run(self, stage: Stage, spec: ExecSpec, title: str, network: Network, mounts: Mounts | None) -> str:
        limits = self._limits
        layers = [*([await asyncio.to_thread(mounts.layer)] if mounts else ()), *stage.layers]
        wanted = SandboxSpec(
            environment=SCRATCH,
            backend=BACKEND,
            layers=layers,
            cpus=limits.cpus,
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
            pids=limits.pids,
            ttl_s=limits.step_timeout_s + _SLACK_S,
            user="root",
            workdir="/",
            labels={LABEL: "1"},
            network=network or None,
        )
        with self._service.environments.lending(self.project, layers):
            creating = asyncio.ensure_future(self._edge.create(wanted, project=self.project))
            try:
                created = await asyncio.shield(creating)
            except asyncio.CancelledError:
                creating.add_done_callback(self._abandon)
                raise
        sandbox = created.sandbox.id
        try:
            await self._command(sandbox, spec, title)
            return await asyncio.to_thread(self._keep, sandbox, title, mounts)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end(sandbox)))

    def _abandon(self, creating: asyncio.Future[Created]) -> None:
        """Nobody waits for this sandbox any more."""
        if not creating.cancelled() and creating.exception() is None:
            sandbox = creating.result().sandbox.id
            _ending.add(task := asyncio.ensure_future(self._end(sandbox)))
            task.add_done_callback(_ending.discard)

    async def _end(self, sandbox: str) -> None:
        with contextlib.suppress(DsecError):
            await self._edge.delete(sandbox)

    async def _command(self, sandbox: str, spec: ExecSpec, title: str) -> None:
        execution = await self._edge.exec(sandbox, spec)
        status, last = await self._followed(execution)
        if status.infra:
            raise OutcomeUnknown(f"{title}: {status.message or status.cause.value}")
        if status.exit_code or status.truncated:
            raise BuildFailed(
                f"{title}: it ended with exit code {status.exit_code}"
                + (f" ({status.cause.value}{': ' + status.message if status.message else ''})" if _odd(status) else ""),
                remedy="Its last output is in the details.",
                exit_code=status.exit_code,
                cause=status.cause.value,
                output=last,
            )

    async def _followed(self, execution: Execution) -> tuple[ExecStatus, str]:
        last, line, told = b"", b"", 0
        events = execution.events()
        try:
            async for event in events:
                if isinstance(event, Chunk):
                    last = (last + event.data)[-LAST_BYTES:]
                    *lines, line = (line + event.data).split(b"\n")
                    for each in lines[: max(0, MAX_LINES - told)]:
                        self.say(f"  {each[:LINE_BYTES].decode(errors='replace')}")
                    if told < MAX_LINES <= told + len(lines):
                        self.say("  ... and more, which is left out")
                    told, line = told + len(lines), line[-LINE_BYTES:]
                else:
                    if line and told < MAX_LINES:
                        self.say(f"  {line.decode(errors='replace')}")
                    return event, last.decode(errors="replace")
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        raise OutcomeUnknown("the command's end was never told")

    def _keep(self, sandbox: str, title: str, mounts: Mounts | None) -> str:
        """The layer of what a sandbox changed, in which nothing runs; what it changed in caches is kept there."""
        upper, id_base = self._written(sandbox)
        for cache, layer in mounts.keep(upper, id_base) if mounts else ():
            self._memory.keep(key_of(self.project, "cache", cache), layer)
        with self._store.making(Budget()) as maker:
            without = mounts.targets if mounts else ()
            top = DirectoryReader(maker.data, id_base=id_base).read(upper, without=without)
            for _, node in walk(top):
                for name in [n for n, child in node.children.items() if stat.S_ISSOCK(child.mode)]:
                    del node.children[name]
            if not top.children and not top.xattrs:
                return NOTHING
            return maker.finish(top, "workspace", title[:200]).digest

    async def copy(self, stage: Stage, copies: Sequence[Copy], title: str, *, fresh: bool = False) -> None:
        """Copy files onto the stage. Raises `InvalidRequest`, `TooLarge`."""

        def key() -> str:
            return key_of(
                self.project,
                "copy",
                stage.layers,
                [
                    [
                        [[each.name.hex(), copy.files.digest(each.node)] for each in copy.sources],
                        copy.dest.hex(),
                        copy.into,
                        copy.owner,
                        copy.mode,
                        copy.unpack,
                        copy.exclude,
                    ]
                    for copy in copies
                ],
            )

        name = await asyncio.to_thread(key)
        known = None if fresh or self.fresh else self._memory.recall(name)
        if known is None:
            view = await self.view(stage)

            def place(maker: LayerMaker) -> Node:
                return place_entries(Entries(copies, view.files), maker.data, view.files.top)

            known = await asyncio.to_thread(self._made, place, title)
            self._memory.keep(name, known)
        else:
            self.say("  as before")
        await self._push(stage, known)

    async def fetch(self, url: str, checksum: str | None) -> tuple[Files, Source]:
        """What a URL has, as `Downloads.fetch`."""
        path = self._scratch / f"fetched-{len(self._fetched)}"
        file: BinaryIO = await asyncio.to_thread(path.open, "x+b")
        self._fetched.append(file)
        return await self._downloads.fetch(self._network, url, checksum, file, self._limits.step_timeout_s)

    async def directory(self, stage: Stage, path: str, owner: Owner = ROOT) -> None:
        """Make a directory where the stage hasn't got it; those on the way are root's. Raises `InvalidRequest`."""
        view = await self.view(stage)
        name = path.encode(errors="surrogateescape")
        try:
            found = view.files.find(name)
        except ValueError as error:
            raise InvalidRequest(f"{path[:200]!r}: {error}") from None
        if found is None:
            made = Files(directory(), lambda _: None)
            await self.copy(
                stage, [Copy(made, [Source(b"", made.top)], name, into=True, owner=owner)], f"directory {path}"
            )
        elif not found.is_dir:
            raise InvalidRequest(f"{path[:200]!r} is to be a directory, and is a file")

    async def add_tree(self, stage: Stage, place: Callable[[LayerMaker], Node], title: str) -> None:
        """Put a layer that is made here on the stage."""
        await self._push(stage, await asyncio.to_thread(self._made, place, title))

    def _made(self, place: Callable[[LayerMaker], Node], title: str) -> str:
        with self._store.making(Budget()) as maker:
            return maker.finish(place(maker), "workspace", title[:200]).digest

    # --- the end ---

    async def finish(self, stage: Stage) -> list[str]:
        """The stage's layers, top first, which say all of its configuration."""
        config = stage.config
        if config != stage.said:
            top = await asyncio.to_thread(self._configured, config)
            stage.layers.insert(0, top)
            stage.said = config
        await self._service.share(stage.layers, lambda step, done=0, total=0: None)
        return stage.layers

    def _configured(self, config: ImageConfig) -> str:
        with self._store.making() as maker:
            return maker.finish(directory(), "workspace", "settings", config=config).digest


_ending: set[asyncio.Task[None]] = set()


def _seen(mounts: Sequence[Mounted]) -> list[list[object]]:
    """What a step's outcome depends on; the content of a cache isn't part of it."""
    return [
        [
            each.target.hex(),
            each.files.digest(each.source) if each.files is not None and each.source is not None else "",
            each.owner,
            each.mode,
            each.cache,
        ]
        for each in mounts
    ]


def _odd(status: ExecStatus) -> bool:
    return status.cause.value != "exited"


def joined(workdir: str | None, path: str) -> str:
    """A path from the root, where it is relative to the working directory."""
    return posixpath.normpath(posixpath.join("/", workdir or "/", path))

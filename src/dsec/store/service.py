"""What callers may do with layers and environments, project by project: the whole of issue "layers" behind one class.

Everything that makes layers holds those that it touches (`holds`), and collecting garbage leaves them: neither waits
for the other. Work that blocks runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from dsec.errors import InvalidRequest, LayerCorrupt, NotFound, TooLarge, Unavailable
from dsec.ports import Clock
from dsec.spec.sandbox import SandboxSpec
from dsec.store.archive import read_layer
from dsec.store.environments import SCRATCH, Environment, EnvironmentStore
from dsec.store.format import ImageConfig, Kind, check_chunk
from dsec.store.image import ImageSource, Platform
from dsec.store.importer import Imported, Importer
from dsec.store.layers import LayerMeta
from dsec.store.leases import RENEW_S
from dsec.store.merge import export_layer, merge_layers
from dsec.store.oci import LocalSource
from dsec.store.packed import Unpacked
from dsec.store.registries import Registries
from dsec.store.remote import RemoteCatalog
from dsec.store.shared import Progress, SharedLayers, quiet
from dsec.store.tree import Node, directory

log = logging.getLogger(__name__)

GRACE_S = 3600.0
"""Layers younger than this are never garbage: other processes on this node make some without this lock."""
_SPOOL_FREE = 1 << 30


class LayerInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer, as its readers see it."""

    digest: str
    names: list[str] = []
    environments: list[str] = []
    """That have it."""
    kind: str = ""
    description: str = ""
    size_bytes: int = 0
    created_at: float = 0.0
    files: int = 0
    file_bytes: int = 0
    metadata_bytes: int = 0
    chunks: int = 0
    config: ImageConfig | None = None
    source: dict[str, str] = {}
    unique_bytes: int | None = None
    """Of its chunks, what no other layer that the caller may read has."""


class LayerService:
    """Layers and environments of one node."""

    def __init__(
        self,
        environments: EnvironmentStore,
        *,
        shared: SharedLayers | None = None,
        remote: RemoteCatalog | None = None,
        used: Callable[[], set[str] | None] = set,
        release: Callable[[str], None] = lambda layer: None,
        registries: Registries = Registries(),  # noqa: B008 (frozen)
    ) -> None:
        """`used`: the layers that sandboxes stand on; None: unknown. `release`: unmounts a layer before its files go.
        `registries`: what callers may name."""
        self.environments = environments
        self.layers = environments.layers
        self.shared = shared
        self._remote = remote
        self._used = used
        self._release = release
        self._registries = registries
        self._collecting = asyncio.Lock()

    # --- making ---

    @asynccontextmanager
    async def making(self) -> AsyncIterator[None]:
        """While the context lasts no layer that this task makes or finds is taken for garbage. Not to be entered
        twice."""
        with self.layers.holds.open():
            yield

    async def import_registry(
        self,
        project: str,
        image: str,
        platform: Platform,
        then: Callable[[Imported], None],
        progress: Progress = quiet,
        *,
        credentials: str | None = None,
    ) -> Imported:
        """Import an image of a registry; `then` gives the layers a name. Raises as `Importer.run`, and
        `Registries.source`."""
        source = self._registries.source(image, project, credentials)
        return await self._import(project, source, platform, then, progress)

    async def import_archive(
        self,
        project: str,
        path: Path,
        platform: Platform,
        then: Callable[[Imported], None],
        progress: Progress = quiet,
        *,
        tag: str | None = None,
    ) -> Imported:
        """Import an image from an archive on this node's disk; `then` gives the layers a name. Raises as
        `Importer.run`."""
        with self.layers.scratch() as scratch:
            source = await asyncio.to_thread(LocalSource, path, Path(scratch), tag, name="the archive")
            return await self._import(project, source, platform, then, progress)

    async def _import(
        self,
        project: str,
        source: ImageSource,
        platform: Platform,
        then: Callable[[Imported], None],
        progress: Progress,
    ) -> Imported:
        try:
            async with self.making():
                found = await Importer(self.layers, project).run(source, platform, "base", progress)
                await self.share(found.layers, progress)
                await asyncio.to_thread(then, found)
                await self.publish()
                return found
        finally:
            await source.close()

    async def fetch(
        self,
        project: str,
        image: str,
        platform: Platform,
        progress: Progress = quiet,
        *,
        credentials: str | None = None,
    ) -> Imported:
        """The layers of a registry's image, for who is `making`. Raises as `import_registry`."""
        source = self._registries.source(image, project, credentials)
        try:
            return await Importer(self.layers, project).run(source, platform, "base", progress)
        finally:
            await source.close()

    async def build_archive(
        self,
        path: Path,
        kind: Kind,
        then: Callable[[LayerMeta], None],
        progress: Progress = quiet,
        *,
        at: str = "/",
        description: str = "",
    ) -> LayerMeta:
        """A layer of the tree in a tar archive, which may be compressed, placed at the path `at`; `then` gives it a
        name. Raises `InvalidRequest`, `Unsupported`, `TooLarge`."""
        parts = [part for part in os.fsencode(at).split(b"/") if part]
        if b".." in parts or b"." in parts:
            raise InvalidRequest(f"not a path in a layer: {at!r}", field="at")

        def build() -> LayerMeta:
            with self.layers.making() as maker, open(path, "rb") as file:
                archive = Unpacked(file.read)
                node: Node = read_layer(archive.read, maker.data)
                archive.finish()
                for part in reversed(parts):
                    top = directory()
                    top.children[part] = node
                    node = top
                return maker.finish(node, kind, description)

        async with self.making():
            progress("building")
            meta = await asyncio.to_thread(build)
            await self.share([meta.digest], progress)
            await asyncio.to_thread(then, meta)
            await self.publish()
            return meta

    async def merge(
        self,
        project: str,
        references: Sequence[str],
        kind: Kind,
        then: Callable[[LayerMeta], None],
        progress: Progress = quiet,
    ) -> LayerMeta:
        """One layer of several (top first); `then` gives it a name. Raises `NotFound`, `InvalidRequest`."""
        layers = [await self.find_layer(project, each) for each in references]
        async with self.making():
            progress("merging")
            meta = await asyncio.to_thread(merge_layers, self.layers, layers, kind)
            await self.share([meta.digest], progress)
            await asyncio.to_thread(then, meta)
            await self.publish()
            return meta

    async def spool(self, chunks: AsyncIterator[bytes], into: Path, progress: Progress = quiet) -> int:
        """Write what comes to a file. Returns its size. Raises `TooLarge` where the disk has no room."""
        size = 0
        with open(into, "xb") as file:  # noqa: ASYNC230 (its I/O is the page cache's)
            async for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
                if size >> 24 != (size - len(chunk)) >> 24:
                    stat = os.statvfs(into.parent)
                    if stat.f_bavail * stat.f_frsize < _SPOOL_FREE:
                        raise TooLarge("the server's disk has no room for this archive")
                    progress("receiving", size)
        return size

    async def publish(self) -> None:
        """Let other nodes know what this one's names mean now. Raises `Unavailable`."""
        if self._remote is not None:
            await self._remote.publish()

    async def share(self, layers: Sequence[str], progress: Progress) -> None:
        """Push them (top first), and what lies below all, to the shared store, where there is one."""
        if self.shared is not None:
            for layer in dict.fromkeys((self.environments.runtime(), *reversed(layers))):
                with contextlib.suppress(NotFound):  # of the first version: it stays on its node
                    await self.shared.push(layer, progress)

    async def create_environment(
        self,
        project: str,
        name: str,
        references: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        description: str = "",
        readers: Sequence[str] = (),
    ) -> Environment:
        """Make or replace an environment of layers by name or digest, or of other environments' layers
        (`env:NAME`), top first. Raises `NotFound`, `EnvironmentNotFound`, `InvalidRequest`."""
        layers: list[str] = []
        for each in references:
            if each.startswith("env:"):
                layers += (await self.find_environment(project, each.removeprefix("env:"))).layers
            else:
                layers.append(await self.find_layer(project, each))
        environment = await asyncio.to_thread(
            self.environments.put,
            name,
            list(dict.fromkeys(layers)),
            env=env,
            user=user,
            workdir=workdir,
            description=description,
            project=project,
            readers=readers,
        )
        await self.share(environment.layers, quiet)
        await self.publish()
        return environment

    # --- looking ---

    async def find_layer(self, project: str, reference: str) -> str:
        """The digest of a layer by its name or digest, to be read here: of one that only the store has, what is read
        is fetched. Raises `NotFound`, `LayerCorrupt`, `Unavailable`."""
        await self._learn(SandboxSpec(environment=SCRATCH, layers=[reference]), project)
        return self.environments.find_layer(reference, project)

    async def find_environment(self, project: str, name: str) -> Environment:
        """What a project means by a name, its layers to be read here, as by `find_layer`. Raises
        `EnvironmentNotFound`, `LayerCorrupt`, `Unavailable`."""
        await self._learn(SandboxSpec(environment=name), project)
        return self.environments.get(name, project)

    async def _learn(self, needed: SandboxSpec, project: str) -> None:
        if self._remote is not None and not self._remote.knows(needed, project):
            await self._remote.learn(needed, project)

    async def list(self, project: str) -> Sequence[LayerInfo]:
        """The layers that a project may read."""
        await asyncio.to_thread(self.environments.refresh)
        visible = sorted(self.environments.visible_layers(project))
        here = [digest for digest in visible if self.layers.has(digest) or self.layers.is_lazy(digest)]
        found = await asyncio.to_thread(self._briefs, here, project)
        return sorted(found, key=lambda info: info.created_at)

    def _briefs(self, digests: Iterable[str], project: str) -> Sequence[LayerInfo]:
        """Goes through all names once: there may be a hundred thousand."""
        names, environments = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for named in self.environments.layer_names(project):
            names[named.layer].append(named.name)
        for environment in self.environments.list(project):
            for digest in dict.fromkeys(environment.layers):
                environments[digest].append(environment.name)
        return [
            LayerInfo(
                digest=digest,
                names=names[digest],
                environments=environments[digest],
                kind=meta.kind,
                description=meta.description,
                size_bytes=meta.size_bytes,
                created_at=meta.created_at,
            )
            for digest in digests
            for meta in [self.layers.meta(digest)]
        ]

    async def inspect(self, project: str, reference: str) -> LayerInfo:
        """Everything about a layer. Raises as `find_layer`."""
        digest = await self.find_layer(project, reference)
        (brief,) = await asyncio.to_thread(self._briefs, [digest], project)
        try:
            manifest = await asyncio.to_thread(self.layers.manifest, digest)
        except NotFound:
            return brief  # of the first version

        def unique() -> int:
            own = {chunk.digest: chunk.size for chunk in manifest.chunk_list()}
            for other in self.environments.visible_layers(project) - {digest}:
                try:
                    for chunk in self.layers.manifest(other).chunk_list():
                        own.pop(chunk.digest, None)
                except NotFound:
                    continue
            return sum(own.values())

        return LayerInfo(
            **{name: getattr(brief, name) for name in ("digest", "names", "environments", "kind", "description")},
            size_bytes=brief.size_bytes,
            created_at=brief.created_at,
            files=manifest.files,
            file_bytes=manifest.file_bytes,
            metadata_bytes=manifest.metadata_bytes,
            chunks=len(manifest.chunk_list()),
            config=manifest.config,
            source=manifest.source,
            unique_bytes=await asyncio.to_thread(unique),
        )

    async def verify(self, project: str, reference: str, progress: Progress = quiet) -> str:
        """Read all of a layer here, and in the store where there is one, and compare it with its digests. What is
        damaged in the store is replaced by what is whole here. Returns the layer's digest. Raises as `find_layer`."""
        digest = await self.find_layer(project, reference)

        def local() -> None:
            manifest, files = self.layers.manifest(digest), self.layers.files(digest)
            if hashlib.sha256(files.image.read_bytes()).hexdigest() != manifest.metadata:
                raise LayerCorrupt(f"the metadata image of layer {digest} is damaged on this node")
            if files.data is None:
                return
            with open(files.data, "rb", buffering=0) as file:
                for chunk in manifest.chunk_list():
                    check_chunk(os.pread(file.fileno(), chunk.size, chunk.offset), chunk)
                    progress("verifying", chunk.offset + chunk.size, manifest.data_bytes)

        await asyncio.to_thread(local)
        if self.shared is not None and await self.shared.store.size(f"manifests/{digest}") is not None:
            try:
                await self.shared.verify(digest, progress)
            except LayerCorrupt as error:
                if not self.layers.has(digest):
                    raise
                log.warning("the store's copy is replaced by this node's: %s", error)
                await self.shared.push(digest, progress, anew=True)
                await self.shared.verify(digest, progress)
        return digest

    async def export(self, project: str, reference: str) -> Iterator[bytes]:
        """A layer as a tar archive; to be iterated in a thread. Raises as `find_layer`."""
        digest = await self.find_layer(project, reference)
        await asyncio.to_thread(self.layers.manifest, digest)
        return export_layer(self.layers, digest)

    # --- removing ---

    async def keep_used(self, node: str, clock: Clock) -> None:
        """Say in the store, over and over, which layers this node needs. Ends when it is cancelled."""
        while self.shared is not None:
            try:
                used = self._used()
                await self.shared.leases.use(node, self.environments.visible_layers(None) | (used or set()))
                if self._remote is not None and used is not None:
                    await self._remote.let_go(used, self._release)
            except Unavailable as error:
                log.warning("the store doesn't know which layers this node uses: %s", error)
            await clock.sleep(RENEW_S)

    async def collect(self, progress: Progress = quiet, *, least_age_s: float = GRACE_S) -> int:
        """Delete this node's layers that no name stands for and no sandbox stands on, and those of the store that are
        no other node's either. Returns the bytes that were freed.

        Raises `Unavailable` where it isn't known what is in use.
        """
        async with self._collecting:
            await asyncio.to_thread(self.environments.refresh)
            used = self._used()
            if used is None:
                raise Unavailable("sandboxes run that are older than the last upgrade", remedy="End them first.")
            young = time.time() - least_age_s
            unused = self.environments.unused_layers() - used - self.layers.holds.held()
            freed = 0
            for meta in await asyncio.to_thread(self.layers.all):
                if meta.digest in unused and meta.created_at <= young:
                    progress(f"deleting {meta.digest[:12]}")
                    await asyncio.to_thread(self._release, meta.digest)
                    freed += meta.size_bytes * await asyncio.to_thread(self._remove, meta.digest)
            if self.shared is not None:

                async def roots() -> Set[str]:
                    found = self.environments.visible_layers(None) | self.layers.holds.held()
                    found |= used | (self._used() or set())
                    if self._remote is not None:
                        await self._remote.publish()
                        found |= await self._remote.roots()
                    return found

                freed += await self.shared.collect(roots, least_age_s=least_age_s, now=time.time(), progress=progress)
            return freed

    def _remove(self, digest: str) -> bool:
        """Unless somebody has found or named it since it was taken for garbage: else no sandbox stands on it."""
        return self.layers.remove(digest, unless=lambda: digest in self.environments.visible_layers(None))

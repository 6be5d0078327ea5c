"""What other nodes know: names of environments and layers in the shared store, and layers that are only there.

A node publishes the names of projects after each change; the node's own (those of no project) stay its own. A node
that is asked for a name or a layer that it doesn't know looks in the store, keeps the name as its own copy, and has
the layers filled on demand.

Keys: `names/environments/<name>/<project>`, `names/layers/<name>/<project>`, percent-encoded, JSON as on a node's disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec

from dsec.errors import DsecError, EnvironmentNotFound, NotFound
from dsec.ports import BlobStore
from dsec.spec.sandbox import SandboxSpec
from dsec.store.environments import SCRATCH, Environment, EnvironmentStore, LayerName
from dsec.store.format import is_layer
from dsec.store.layers import LayerFiles
from dsec.store.lazy.service import LazyLayers
from dsec.store.names import may_read

log = logging.getLogger(__name__)

N = TypeVar("N", Environment, LayerName)
_LONGEST = 200


def _part(text: str) -> str:
    encoded = quote(text, safe="@+").replace("~", "%7E")
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if len(encoded) > _LONGEST:
        return f"{encoded[:100]}%{hashlib.sha256(text.encode()).hexdigest()}"
    return encoded


class RemoteCatalog:
    """The store's names and layers, for one node."""

    def __init__(self, store: BlobStore, environments: EnvironmentStore, lazy: LazyLayers | None) -> None:
        """`lazy`: None where this node can't fill layers on demand; then only names are learnt."""
        self._store = store
        self._environments = environments
        self._lazy = lazy
        self._published: dict[str, bytes] = {}
        self._publishing = asyncio.Lock()

    async def publish(self) -> None:
        """Bring what changed of this node's names into the store. Raises `Unavailable`."""
        async with self._publishing:
            now: dict[str, bytes] = {}
            for top, items in (
                ("environments", self._environments.list(None)),
                ("layers", self._environments.layer_names(None)),
            ):
                for item in items:
                    if item.project:
                        key = f"names/{top}/{_part(item.name)}/{_part(item.project)}"
                        now[key] = msgspec.json.encode(item)
            for key, data in now.items():
                if self._published.get(key) != data:
                    await self._store.put(key, data)
            for key in self._published.keys() - now.keys():
                await self._store.delete(key)
            self._published = now

    def knows(self, spec: SandboxSpec, project: str) -> bool:
        """Whether a sandbox of this spec needs nothing from the store. Cheap."""
        try:
            for layer in self._environments.resolve(spec, project).layers:
                self._environments.layers.files(layer)
        except (NotFound, EnvironmentNotFound):
            return False
        return True

    async def learn(self, spec: SandboxSpec, project: str) -> None:
        """Fetch what `knows` misses, as far as the store has it: whatever is missing then is the caller's to hear of
        from `EnvironmentStore.resolve`. Raises `Unavailable`, `LayerCorrupt`."""
        await self._learn_environment(spec.environment, project)
        for reference in spec.layers:
            await self._learn_layer(reference, project)
        try:
            layers = self._environments.resolve(spec, project).layers
        except (NotFound, EnvironmentNotFound):
            return
        await asyncio.gather(*(self._attach(layer) for layer in layers))

    async def _learn_environment(self, name: str, project: str) -> None:
        if name == SCRATCH:
            return
        try:
            environment = self._environments.get(name, project)
        except EnvironmentNotFound:
            found = await self._find("environments", name, project, Environment)
            if found is None:
                return
            environment = found
            await self._attach_all(environment.layers)
            await asyncio.to_thread(self._environments.keep, environment)
        await self._attach_all(environment.layers)

    async def _learn_layer(self, reference: str, project: str) -> None:
        try:
            layer = self._environments.find_layer(reference, project)
        except NotFound:
            if is_layer(reference):
                return  # a digest is theirs to use where a name stands for it, and this node knows of none
            found = await self._find("layers", reference, project, LayerName)
            if found is None:
                return
            layer = found.layer
            await self._attach(layer)
            await asyncio.to_thread(self._environments.keep, found)
        await self._attach(layer)

    async def _find(self, top: str, name: str, project: str, kind: type[N]) -> N | None:
        """What `project` means by a name: its own, else the first that it may read."""
        found = []
        async for info in self._store.list(f"names/{top}/{_part(name)}/"):
            try:
                item = msgspec.json.decode(await self._store.get(info.key), type=kind)
            except (NotFound, msgspec.MsgspecError) as error:
                log.warning("%s: %s", info.key, error)
                continue
            if item.name == name and may_read(item, project):
                found.append(item)
        return min(found, key=lambda item: (item.project != project, item.project), default=None)

    async def _attach_all(self, layers: Sequence[str]) -> None:
        await asyncio.gather(*(self._attach(layer) for layer in layers))

    async def _attach(self, layer: str) -> None:
        """Have a layer that isn't on this node filled on demand, if the store has it."""
        layers = self._environments.layers
        if self._lazy is None or layers.has(layer) or layers.is_lazy(layer):
            return
        try:
            files = await self._lazy.attach(layer)
        except NotFound:
            return
        except DsecError as error:
            log.warning("layer %s: %s", layer, error)
            raise
        layers.attach(layer, LayerFiles(files.image, files.data))

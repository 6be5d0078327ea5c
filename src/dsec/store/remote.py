"""What other nodes know: names of environments and layers in the shared store, and layers that are only there.

A node publishes the names of projects after each change; the node's own (those of no project) stay its own. A node
that is asked for a name or a layer that it doesn't know looks in the store, keeps the name as its own copy, and has
the layers filled on demand.

Keys: `names/environments/<name>/<project>`, `names/layers/<name>/<project>`, percent-encoded, JSON as on a node's disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar
from urllib.parse import quote

import msgspec

from dsec.errors import DsecError, EnvironmentNotFound, NotFound, Unavailable
from dsec.ports import Clock
from dsec.spec.sandbox import SandboxSpec
from dsec.store.environments import SCRATCH, Environment, EnvironmentStore, LayerName
from dsec.store.format import is_layer
from dsec.store.layers import LayerFiles
from dsec.store.lazy.service import LazyLayers
from dsec.store.leases import RENEW_S
from dsec.store.names import may_read
from dsec.store.shared import SharedLayers

log = logging.getLogger(__name__)

N = TypeVar("N", Environment, LayerName)
FRESH_S = 10.0
"""A name of another node's is looked for anew after so long."""
UNUSED_S = 600.0
"""A layer filled on demand on which no sandbox stands stays mounted for so long."""
_LONGEST = 200


def _key(kind: type, name: str, project: str) -> str:
    """Where the store has a name."""
    return f"names/{'environments' if kind is Environment else 'layers'}/{_part(name)}/{_part(project)}"


def _part(text: str) -> str:
    encoded = quote(text, safe="@+").replace("~", "%7E")
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if len(encoded) > _LONGEST:
        return f"{encoded[:100]}%{hashlib.sha256(text.encode()).hexdigest()}"
    return encoded


class RemoteCatalog:
    """The store's names and layers, for one node."""

    def __init__(
        self, shared: SharedLayers, environments: EnvironmentStore, lazy: LazyLayers, clock: Clock, node: str
    ) -> None:
        """`node`: names this node in the store."""
        self._shared = shared
        self._store = shared.store
        self._environments = environments
        self._lazy: LazyLayers | None = lazy
        self._clock = clock
        self._node = node
        self._used: set[str] = set()
        """Layers whose data this node may still want from the store."""
        self._renewing: asyncio.Task[None] | None = None
        self._learnt: dict[tuple[str, str, str], float] = {}
        """When a name was looked for last, by kind, name and project."""
        self._published: dict[tuple[type, str, str], Environment | LayerName] = {}
        self._publishing = asyncio.Lock()
        self._touched: dict[str, float] = {}
        """When a layer filled on demand was asked for last."""
        self._changing: dict[str, asyncio.Lock] = {}
        """Held for a layer while it is attached or let go."""

    async def open(self) -> None:
        """Hold on to the layers that are mounted already. Raises `Unavailable`."""
        if self._lazy is not None and self._lazy.mounted():
            await self._use(self._lazy.mounted())
        self._renewing = asyncio.create_task(self._renew(), name="lease of layers")

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])

    def fill_whole(self) -> None:
        """This node can't fill on demand: layers are fetched whole before they are used."""
        self._lazy = None

    async def _use(self, layers: Iterable[str]) -> None:
        """No one may delete these from the store."""
        if not self._used.issuperset(layers):
            self._used.update(layers)
            await self._shared.leases.use(self._node, self._used)

    async def _renew(self) -> None:
        while True:
            await self._clock.sleep(RENEW_S)
            if self._used:
                try:
                    await self._shared.leases.use(self._node, self._used)
                except DsecError as error:
                    log.warning("the lease of this node's layers can't be renewed: %s", error)

    async def roots(self) -> set[str]:
        """Every layer that a name in the store stands for, whoever published it. Raises `Unavailable`, also for a name
        that can't be read: it may stand for anything."""
        found: set[str] = set()
        async for info in self._store.list("names/"):
            is_environment = info.key.startswith("names/environments/")
            try:
                data = await self._store.get(info.key)
                if is_environment:
                    found.update(msgspec.json.decode(data, type=Environment).layers)
                else:
                    found.add(msgspec.json.decode(data, type=LayerName).layer)
            except NotFound:  # removed meanwhile
                continue
            except ValueError as error:
                message = f"{info.key} in the store can't be read: {error}"
                raise Unavailable(message, remedy="If it stays so, delete it.") from None
        return found

    async def publish(self) -> None:
        """Bring what changed of this node's names into the store. Raises `Unavailable`."""
        async with self._publishing:
            now = {
                (type(item), item.name, item.project): item for item in self._environments.own_names() if item.project
            }
            for which, item in now.items():
                if self._published.get(which) != item:
                    await self._store.put(_key(*which), msgspec.json.encode(item))
            for which in self._published.keys() - now.keys():
                await self._store.delete(_key(*which))
            self._published = now

    def knows(self, spec: SandboxSpec, project: str) -> bool:
        """Whether a sandbox of this spec needs nothing from the store. Cheap."""
        names = [("environments", spec.environment), *(("layers", each) for each in spec.layers)]
        now = self._clock.monotonic()
        if any(now - self._learnt.get((top, name, project), now) > FRESH_S for top, name in names):
            return False
        try:
            for layer in self._environments.resolve(spec, project).layers:
                self._environments.layers.files(layer)
                if layer in self._touched:
                    self._touched[layer] = now
        except (NotFound, EnvironmentNotFound):
            return False
        return True

    async def learn(self, spec: SandboxSpec, project: str) -> None:
        """Fetch what `knows` misses, as far as the store has it: whatever is missing then is the caller's to hear of
        from `EnvironmentStore.resolve`. Raises `Unavailable`, `LayerCorrupt`."""
        await self._learn_environment(spec.environment, project)
        for reference in spec.layers:
            await self._learn_layer(reference, project)

    async def _learn_environment(self, name: str, project: str) -> None:
        if name == SCRATCH:
            return
        environment: Environment | None = None
        with contextlib.suppress(EnvironmentNotFound):
            environment = self._environments.get(name, project)
        if environment is None or ("environments", name, project) in self._learnt:
            environment = await self._look("environments", name, project, Environment, environment)
        if environment is not None:
            await self._attach_all(environment.layers)

    async def _learn_layer(self, reference: str, project: str) -> None:
        layer = None
        try:
            layer = self._environments.find_layer(reference, project)
        except NotFound:
            if is_layer(reference):
                return  # a digest is theirs to use where a name stands for it, and this node knows of none
        if layer is None or ("layers", reference, project) in self._learnt:
            old = LayerName(name=reference, layer=layer, project=project) if layer else None
            found = await self._look("layers", reference, project, LayerName, old)
            layer = found.layer if found is not None else None
        if layer is not None:
            await self._attach_all([layer])

    async def _look(self, top: str, name: str, project: str, kind: type[N], old: N | None) -> N | None:
        """What `project` means by a name, in the store: its own, else the first that it may read. Where the store can't
        be asked, what was known before holds."""
        found: list[N] = []
        try:
            async for info in self._store.list(f"names/{top}/{_part(name)}/"):
                item = await self._read(info.key, kind)
                if item is not None and item.name == name and may_read(item, project):
                    found.append(item)
        except Unavailable:
            if old is None:
                raise
            return old
        if not found:
            if old is not None:
                self._environments.forget(old)
            return None
        best = min(found, key=lambda item: (item.project != project, item.project))
        if best != old:
            await self._attach_all(best.layers if isinstance(best, Environment) else [best.layer])
            self._environments.learn(best)
        self._learnt[top, name, project] = self._clock.monotonic()
        return best

    async def _read(self, key: str, kind: type[N]) -> N | None:
        try:
            return msgspec.json.decode(await self._store.get(key), type=kind)
        except (NotFound, ValueError) as error:
            log.warning("%s: %s", key, error)
            return None

    async def _attach_all(self, layers: Iterable[str]) -> None:
        """Have layers that aren't on this node filled on demand, those that the store has."""
        own = self._environments.layers
        missing = []
        for layer in layers:
            if own.is_lazy(layer):
                self._touched[layer] = self._clock.monotonic()
            elif not own.has(layer):
                missing.append(layer)
        if missing:
            await self._use(missing)
            await asyncio.gather(*(self._attach_one(layer) for layer in missing))

    async def hold(self, layers: Iterable[str]) -> None:
        """An earlier server had these of a sandbox's filled on demand, and they may be read. Raises `Unavailable`,
        `LayerCorrupt`."""
        await self._attach_all(layers)

    async def let_go(self, used: set[str], unmount: Callable[[str], None]) -> None:
        """Unmount the layers filled on demand that no sandbox stands on (`used` are those), and that nobody has asked
        for in a while: then the cache may drop them. `unmount` blocks. Raises `Unavailable`."""
        if self._lazy is None:
            return
        held = set(self._used)
        for layer in self._lazy.attached() - used:
            async with self._changing.setdefault(layer, asyncio.Lock()):
                now = self._clock.monotonic()
                if now - self._touched.setdefault(layer, now) < UNUSED_S:
                    continue
                self._environments.layers.detach(layer)  # who wants it now attaches it again, after this
                await asyncio.to_thread(unmount, layer)
                await self._lazy.release(layer)
                del self._touched[layer]
                self._used.discard(layer)
        if held != self._used:
            await self._shared.leases.use(self._node, self._used)

    async def _attach_one(self, layer: str) -> None:
        async with self._changing.setdefault(layer, asyncio.Lock()):
            self._touched[layer] = self._clock.monotonic()
            await self._attach(layer)

    async def _attach(self, layer: str) -> None:
        try:
            if self._lazy is None:
                await self._shared.pull(layer)
                return
            files = await self._lazy.attach(layer)
        except NotFound:
            return
        found = LayerFiles(files.image, files.data)
        self._environments.layers.attach(layer, found, loops=not files.events, complete=files.complete)

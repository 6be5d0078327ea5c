"""Collecting garbage beside work that makes layers: what the work found stays, and neither waits for the other. And
what is damaged in the store."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import store_kit

from dsec.edge.config import SystemClock
from dsec.errors import LayerCorrupt, Unavailable
from dsec.store.blobs import DirectoryStore
from dsec.store.environments import EnvironmentStore
from dsec.store.format import image_key
from dsec.store.lazy.service import LazyLayers
from dsec.store.remote import RemoteCatalog
from dsec.store.service import LayerService
from dsec.store.shared import quiet
from dsec.store.tree import Node, directory
from dsec.testing.blobs import FaultyStore

pytestmark = pytest.mark.root


@pytest.fixture
def service(tmp_path: Path) -> LayerService:
    (tmp_path / "state").mkdir()
    store = FaultyStore(DirectoryStore(tmp_path / "store"))
    return LayerService(EnvironmentStore(tmp_path / "state"), shared=store_kit.node(tmp_path / "node", store))


def made(service: LayerService, name: str) -> str:
    top = directory()
    top.children[name.encode()] = Node(stat.S_IFREG | 0o644)
    with service.layers.making() as maker:
        return maker.finish(top, "workspace").digest


async def test_what_a_build_found_stays_while_it_runs(service: LayerService) -> None:
    recalled, forgotten, named = (made(service, name) for name in ("recalled", "forgotten", "named"))
    service.environments.put("app", [named], project="p")
    found, go_on = asyncio.Event(), asyncio.Event()

    async def build() -> list[str]:
        async with service.making():
            assert await asyncio.to_thread(service.layers.has, recalled)  # as a step of an earlier build is
            layers = [await asyncio.to_thread(made, service, "new"), recalled]
            found.set()
            await go_on.wait()
            for layer in layers:
                service.layers.manifest(layer)
            service.environments.put("built", layers, project="p")
            return layers

    building = asyncio.create_task(build())
    await found.wait()
    assert await service.collect(least_age_s=-1) > 0  # and doesn't wait for the build
    assert not service.layers.has(forgotten)
    go_on.set()
    for layer in [*await building, named]:
        assert service.layers.has(layer)
    assert service.layers.holds.held() == set()
    service.environments.remove("built", "p")
    assert await service.collect(least_age_s=-1) > 0
    assert not service.layers.has(recalled)
    assert service.layers.has(named)


async def test_a_build_begins_while_garbage_is_collected(
    service: LayerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.shared is not None
    store = service.shared.store
    assert isinstance(store, FaultyStore)
    store.latency_s = 0.2
    garbage = made(service, "garbage")
    collecting = asyncio.create_task(service.collect(least_age_s=-1))
    while service.layers.has(garbage):  # noqa: ASYNC110 (a file is looked at)
        await asyncio.sleep(0.001)
    go_on = asyncio.Event()
    with monkeypatch.context() as held:
        held.setattr(store, "_enter", go_on.wait)  # whatever the machine does, it isn't over yet
        async with service.making():
            layer = await asyncio.to_thread(made, service, "garbage")  # the same is made again
            assert not collecting.done()
            held.undo()
            go_on.set()
            await collecting
        assert service.layers.has(layer)
    assert await service.collect(least_age_s=-1) > 0


async def test_a_name_that_can_not_be_read_may_stand_for_anything(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "state").mkdir()
    shared, environments = store_kit.node(tmp_path / "node", store), EnvironmentStore(tmp_path / "state")
    lazy = LazyLayers(cache=tmp_path / "cache", run=tmp_path / "run", filler=[])
    remote = RemoteCatalog(shared, environments, lazy, SystemClock(), "node")
    service = LayerService(environments, shared=shared, remote=remote)
    layer = shared._layers.add(store_kit.project(tmp_path / "source", 1), "workspace").digest
    await shared.push(layer)
    await store.put("names/layers/tools@1/p", b'{"name":"tools@1","layer":"')
    with pytest.raises(Unavailable, match="names/layers/tools@1/p"):
        await service.collect(least_age_s=-1)
    await shared.verify(layer)
    assert await store.size(image_key(layer)) == shared._layers.manifest(layer).metadata_bytes
    await store.delete("names/layers/tools@1/p")
    assert await service.collect(least_age_s=-1) > 0
    assert await store.size(image_key(layer)) is None


@pytest.mark.parametrize("part", ["packs", "metadata", "placements", "manifests"])
async def test_what_is_damaged_in_the_store_is_replaced_by_who_has_it(tmp_path: Path, part: str) -> None:
    shared = store_kit.node(tmp_path / "node", DirectoryStore(tmp_path / "store"))
    service = LayerService(EnvironmentStore(tmp_path / "node", shared._layers), shared=shared)
    layers = []
    source = store_kit.project(tmp_path / "source", 1)
    for number in range(2):  # the second needs the first one's pack
        (source / f"own{number}").write_bytes(bytes([number]) * 300_000)
        layers.append(service.layers.add(source, "workspace").digest)
        service.environments.name_layer(f"x@{number}", layers[-1], project="p")
        await service.share([layers[-1]], quiet)
    for path in (tmp_path / "store" / part).iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:100] + b"damage" + data[106:])
    elsewhere = store_kit.node(tmp_path / "elsewhere", shared.store)
    with pytest.raises(LayerCorrupt):
        await elsewhere.pull(layers[0])
    for number in range(2):
        await service.verify("p", f"x@{number}")
        await elsewhere.pull(layers[number])

"""The base layer of an environment, mounted for the peers: the same root file system as our sandboxes have, owners as
on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.kernel import mounts
from dsec.kernel.mounts import ErofsMount
from dsec.store.environments import EnvironmentStore


@contextmanager
def mounted_base(state: Path, environment: str, target: Path) -> Iterator[Path]:
    """Mount the largest layer of `environment` of the server on `state` at `target` (the lowest is the runtime,
    whichever version made it). Raises `EnvironmentNotFound`."""
    store = EnvironmentStore(state)
    layers = [store.layers.files(digest) for digest in store.get(environment).layers]
    image, data = max(layers, key=lambda files: sum(file.stat().st_size for file in files if file is not None))
    target.mkdir(parents=True)
    ErofsMount(image, target, data=data).mount()
    try:
        yield target
    finally:
        mounts.unmount(target)
        target.rmdir()

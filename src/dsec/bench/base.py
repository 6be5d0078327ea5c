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
    """Mount the lowest layer of `environment` of the server on `state` at `target`. Raises `EnvironmentNotFound`."""
    store = EnvironmentStore(state)
    base = next(digest for digest in reversed(store.get(environment).layers) if digest != store.runtime())
    target.mkdir(parents=True)
    image, data = store.layers.files(base)
    ErofsMount(image, target, data=data).mount()
    try:
        yield target
    finally:
        mounts.unmount(target)
        target.rmdir()

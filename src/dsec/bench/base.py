"""The base layer of an environment, mounted for the peers: the same root file system as our sandboxes have, owners as
on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dsec.errors import EnvironmentNotFound
from dsec.kernel import mounts
from dsec.kernel.mounts import ErofsMount


@contextmanager
def mounted_base(state: Path, environment: str, target: Path) -> Iterator[Path]:
    """Mount the lowest layer of `environment` of the server on `state` at `target`. Raises `EnvironmentNotFound`."""
    listed = state / "store" / "environments" / f"{environment}.json"
    try:
        digest = msgspec.json.decode(listed.read_bytes())["layers"][-1]
    except FileNotFoundError:
        raise EnvironmentNotFound(f"there is no environment {environment!r} in {state}") from None
    target.mkdir(parents=True)
    ErofsMount(state / "store" / "layers" / digest / "layer.erofs", target).mount()
    try:
        yield target
    finally:
        mounts.unmount(target)
        target.rmdir()

"""What steps of earlier builds gave: `store/builds/<key>` names the layer, or `-` where a step changed nothing.

A key is a digest of everything that a step's outcome depends on, the project included: what one project's permissions
fetched is never another's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

import msgspec

from dsec.store.layers import LayerStore

NOTHING = "-"
_VERSION = 1


def key_of(*parts: Any) -> str:
    """A digest of JSON values, in order."""
    return hashlib.sha256(msgspec.json.encode([_VERSION, *parts], order="sorted")).hexdigest()


class Memory:
    """Of one node."""

    def __init__(self, layers: LayerStore) -> None:
        self._layers = layers
        self._top = layers.root.parent / "builds"
        self._top.mkdir(exist_ok=True)

    def recall(self, key: str) -> str | None:
        """The layer, or NOTHING; None: unknown, or the layer is gone."""
        with contextlib.suppress(FileNotFoundError):
            layer = (self._top / key).read_text()
            if layer == NOTHING or self._layers.has(layer):
                return layer
            (self._top / key).unlink()
        return None

    def keep(self, key: str, layer: str) -> None:
        """Note what a step gave."""
        draft = self._top / f".{key}.{os.getpid()}"
        draft.write_text(layer)
        draft.rename(self._top / key)

    def tidy(self) -> None:
        """Forget what layers are gone for. Blocks."""
        for path in self._top.iterdir():
            if path.name.startswith("."):
                path.unlink()
            else:
                self.recall(path.name)

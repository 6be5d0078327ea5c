"""What a shield's server has of the host's environments: those that are there when its machine is booted, whose layers
are disks of the machine. So what is made, changed or removed on the host later waits for the next machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from dsec.errors import NotFound
from dsec.store.environments import Environment
from dsec.store.layers import LayerFiles, LayerStore

log = logging.getLogger(__name__)
_ENVIRONMENTS = Path("store", "environments")


class Stored(NamedTuple):
    """Environments with all their layers."""

    texts: dict[str, str]
    """Of their files, by name below the state directory."""
    layers: dict[str, LayerFiles]
    """By digest."""

    def files(self) -> dict[str, str]:
        """What the state directory inside has of them, as `shield_inside` takes it."""
        files: dict[str, str] = {}
        for digest, (image, data) in sorted(self.layers.items()):
            files[f"store/layers/{digest}/{image.name}"] = f"disk {image_serial(digest)}"
            if data is not None:
                files[f"store/layers/{digest}/data"] = f"disk {data_serial(digest)}"
            for name in ("manifest.json", "meta.json"):
                if (path := image.with_name(name)).exists():
                    files[f"store/layers/{digest}/{name}"] = path.read_text()
        return files | self.texts

    def marks(self) -> dict[str, str]:
        """By which another process knows whether they are the same."""
        return {_shown(name): hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in self.texts.items()}


def stored(state: Path, layers: LayerStore) -> Stored:
    """What is there now. One that lacks a layer is left out. Blocks."""
    found = Stored({}, {})
    for path in sorted((state / _ENVIRONMENTS).rglob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            name, text = str(path.relative_to(state)), path.read_text()
            try:
                parts = {digest: layers.files(digest) for digest in msgspec.json.decode(text, type=Environment).layers}
            except NotFound as error:
                log.warning("the shield has no environment %s: %s", _shown(name), error.message)
                continue
            found.texts[name] = text
            found.layers.update(parts)
    return found


def others(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which environments were made, changed or removed between two `marks`."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def image_serial(digest: str) -> str:
    """Of the disk with a layer's image."""
    return f"m{digest[:18]}"


def data_serial(digest: str) -> str:
    """Of the one with its data."""
    return f"d{digest[:18]}"


def _shown(name: str) -> str:
    return name.removeprefix(f"{_ENVIRONMENTS}/").removesuffix(".json")

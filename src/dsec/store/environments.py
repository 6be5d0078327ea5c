"""Environments: a name, an ordered list of layers (top first), and the defaults of the sandboxes that are made of it.

On disk: `store/environments/<name, percent-encoded>.json`, replaced atomically. Below the layers of every environment
lies the generated `runtime` layer, which has the mount points that a sandbox needs whatever the image lacks; so any
tree is an environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from dsec.errors import EnvironmentNotFound, InvalidRequest
from dsec.spec.sandbox import NAME_PATTERN
from dsec.store.layers import Entry, LayerStore

_NAME = re.compile(NAME_PATTERN)
DEFAULT = "debian"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Environment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What sandboxes are made of."""

    name: str
    layers: tuple[str, ...]
    """Digests, top first; the runtime layer is last."""
    env: dict[str, str] = {}
    """Variables under the sandbox's own."""
    user: str = "root"
    workdir: str = "/"
    description: str = ""
    created_at: float = 0.0


RUNTIME = {
    "dev": Entry(mode=0o755),
    "proc": Entry(mode=0o555),
    "sys": Entry(mode=0o555),
    "run": Entry(mode=0o755),
    "run/shm": Entry(mode=0o1777),
    "run/lock": Entry(mode=0o1777),
    "tmp": Entry(mode=0o1777),
    "var/tmp": Entry(mode=0o1777),
    "root": Entry(mode=0o700),
    "home": Entry(mode=0o755),
    "etc/hosts": Entry(b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"),
    "etc/hostname": Entry(b"sandbox\n"),
    "etc/resolv.conf": Entry(b""),
    "etc/machine-id": Entry(b"", mode=0o444),
    "etc/passwd": Entry(b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"),
    "etc/group": Entry(b"root:x:0:\nnogroup:x:65534:\n"),
    "etc/nsswitch.conf": Entry(b"passwd: files\ngroup: files\nhosts: files dns\n"),
}
"""What lies below every image: mount points and the few files without which programs fail at odd places."""


class EnvironmentStore:
    """The environments below a state directory."""

    def __init__(self, state_dir: Path, layers: LayerStore | None = None) -> None:
        self.layers = layers or LayerStore(state_dir)
        self._root = state_dir / "store" / "environments"
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._runtime: str | None = None
        self._known = {env.name: env for env in self._load()}

    def _load(self) -> list[Environment]:
        return [msgspec.json.decode(path.read_bytes(), type=Environment) for path in sorted(self._root.glob("*.json"))]

    def _path(self, name: str) -> Path:
        encoded = quote(name, safe="@:+")
        if len(encoded) > 200:
            encoded = f"{encoded[:100]}%{hashlib.sha256(name.encode()).hexdigest()}"
        return self._root / f"{encoded}.json"

    def runtime(self) -> str:
        """The digest of the runtime layer, made on first use."""
        with self._lock:
            if self._runtime is None:
                self._runtime = self.layers.add_tree(RUNTIME, "runtime", "mount points").digest
            return self._runtime

    def put(
        self,
        name: str,
        layers: tuple[str, ...],
        *,
        env: dict[str, str] | None = None,
        user: str = "root",
        workdir: str = "/",
        description: str = "",
    ) -> Environment:
        """Make or replace an environment of layers that exist, top first. The runtime layer is added below them.

        Raises `InvalidRequest` for a bad name, `NotFound` for a layer that doesn't exist.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"not a name for an environment: {name!r}", remedy=f"It has to match {NAME_PATTERN}.")
        for digest in layers:
            self.layers.files(digest)
        runtime = self.runtime()
        environment = Environment(
            name=name,
            layers=(*(digest for digest in layers if digest != runtime), runtime),
            env=env or {},
            user=user,
            workdir=workdir,
            description=description,
            created_at=time.time(),
        )
        with self._lock:
            path = self._path(name)
            fresh = path.with_suffix(".new")
            with open(fresh, "wb") as file:
                file.write(msgspec.json.encode(environment))
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(path)
            self._known[name] = environment
        return environment

    def get(self, name: str) -> Environment:
        """No I/O for a name that is known; an unknown one may have been made by another process since, so the disk is
        looked at. Raises `EnvironmentNotFound`."""
        known = self._known.get(name) or self._look_again(name)
        if known is None:
            names = ", ".join(sorted(self._known)) or "none yet"
            raise EnvironmentNotFound(
                f"there is no environment {name!r}", remedy=f"Known here: {names[:300]}.", environment=name
            )
        return known

    def _look_again(self, name: str) -> Environment | None:
        try:
            found = msgspec.json.decode(self._path(name).read_bytes(), type=Environment)
        except (FileNotFoundError, ValueError):
            return None
        return self._known.setdefault(name, found)

    def list(self) -> list[Environment]:
        return sorted(self._known.values(), key=lambda env: env.name)

    def remove(self, name: str) -> None:
        """Forget an environment; its layers stay. Idempotent."""
        with self._lock:
            self._known.pop(name, None)
            self._path(name).unlink(missing_ok=True)

    def unused_layers(self) -> set[str]:
        """Layers that no environment names: the caller knows whether sandboxes still run on them."""
        used = {digest for environment in self._known.values() for digest in environment.layers}
        return {meta.digest for meta in self.layers.all()} - used

    def ensure_default(self, build: Callable[[LayerStore], str]) -> Environment:
        """The environment `debian`, built by `build` (which returns a layer's digest) where it is missing."""
        with self._building:
            with contextlib.suppress(EnvironmentNotFound):
                return self.get(DEFAULT)
            return self.put(
                DEFAULT,
                (build(self.layers),),
                env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"},
                description="Debian with Python 3, pip, git and bash",
            )

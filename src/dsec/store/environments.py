"""Environments: a name, an ordered list of layers (top first), and the defaults of the sandboxes that are made of it.

Environments and layers have names, as `store.names` says; a layer's is `NAME@VERSION`, and stays what it is. Below the
layers of every environment lies the generated `runtime` layer, which has the mount points that a sandbox needs whatever
the image lacks; so any tree is an environment, and `scratch` is the one without any.

What layers say about commands (`ImageConfig`) is merged so: variables from the bottom up, one above replaces one of the
same name below; user, working directory and entrypoint are those of the topmost layer that sets them. An environment's
own settings come over that, a sandbox's own over both.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dsec.errors import Conflict, EnvironmentNotFound, InvalidRequest, NotFound
from dsec.spec.sandbox import NAME_PATTERN, SandboxSpec
from dsec.store.format import ImageConfig, is_layer
from dsec.store.layers import Entry, LayerStore
from dsec.store.names import Names

_NAME = re.compile(NAME_PATTERN)
_LAYER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,150}@[A-Za-z0-9][A-Za-z0-9._+-]{0,47}")
DEFAULT = "debian"
SCRATCH = "scratch"
_VIEWS = 64
MAX_LAYERS = 400
"""Of one sandbox; the kernel stacks 500."""
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
    entrypoint: list[str] = []
    description: str = ""
    created_at: float = 0.0
    project: str = ""
    """Whose it is; empty: the node's own."""
    readers: list[str] = []
    """Other projects that may list, read and start it; `*`: all."""


class LayerName(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer's name."""

    name: str
    """`NAME@VERSION`."""
    layer: str
    created_at: float = 0.0
    project: str = ""
    readers: list[str] = []


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
    "etc/resolv.conf": Entry(
        b"# dsec: names that this sandbox's network policy grants resolve here; without a policy none does.\n"
        b"nameserver 127.0.0.1\n"
    ),
    "etc/machine-id": Entry(b"", mode=0o444),
    "etc/passwd": Entry(b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"),
    "etc/group": Entry(b"root:x:0:\nnogroup:x:65534:\n"),
    "etc/nsswitch.conf": Entry(b"passwd: files\ngroup: files\nhosts: files dns\n"),
}
"""What lies below every image: mount points and the few files without which programs fail at odd places."""


class EnvironmentStore:
    """The environments, and the names of layers, below a state directory."""

    def __init__(self, state_dir: Path, layers: LayerStore | None = None) -> None:
        self.layers = layers or LayerStore(state_dir)
        self._environments = Names(state_dir / "store" / "environments", Environment)
        self._layer_names = Names(state_dir / "store" / "names", LayerName)
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._runtime: str | None = None
        self._configs: dict[str, ImageConfig] = {}
        self._lent: list[tuple[str, frozenset[str]]] = []
        self._visible: dict[str | None, tuple[tuple[int, int], frozenset[str]]] = {}
        """What projects that asked lately may read of layers; the latest last."""

    def runtime(self) -> str:
        """The digest of the runtime layer, made on first use."""
        with self._lock:
            if self._runtime is None:
                self._runtime = self.layers.add_tree(RUNTIME, "runtime", "mount points").digest
            return self._runtime

    def refresh(self) -> None:
        """See what other processes have made or removed since. Blocks."""
        self._environments.refresh()
        self._layer_names.refresh()

    # --- of other nodes ---

    def learn(self, item: Environment | LayerName) -> None:
        """Know a name that another node made."""
        if isinstance(item, Environment):
            self._environments.learn(item)
        else:
            self._layer_names.learn(item)

    def forget(self, item: Environment | LayerName) -> None:
        """The other node has it no more."""
        if isinstance(item, Environment):
            self._environments.forget(item.name, item.project)
        else:
            self._layer_names.forget(item.name, item.project)

    def own_names(self) -> Sequence[Environment | LayerName]:
        """What was named on this node."""
        return [*self._environments.own(), *self._layer_names.own()]

    # --- environments ---

    def put(
        self,
        name: str,
        layers: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        description: str = "",
        project: str = "",
        readers: Sequence[str] = (),
    ) -> Environment:
        """Make or replace an environment of layers that are here (digests, top first). The runtime layer is added below
        them. `env` is laid over what the layers say; `user` and `workdir` take its place (None: what they say).

        Raises `InvalidRequest` for a bad name or too many layers, `NotFound` for a layer that doesn't exist.
        """
        if not _NAME.fullmatch(name) or name == SCRATCH:
            raise InvalidRequest(f"not a name for an environment: {name!r}", remedy=f"It has to match {NAME_PATTERN}.")
        runtime = self.runtime()
        digests = [digest for digest in layers if digest != runtime]
        config = self._checked(digests)
        environment = Environment(
            name=name,
            layers=(*digests, runtime),
            env=config.env | (env or {}),
            user=user or config.user or "root",
            workdir=workdir or config.workdir or "/",
            entrypoint=config.entrypoint or [],
            description=description,
            created_at=time.time(),
            project=project,
            readers=list(readers),
        )
        self._environments.put(environment)
        return environment

    def get(self, name: str, project: str | None = None) -> Environment:
        """What `project` means by the name (None: the node's own view). Raises `EnvironmentNotFound`, also for what it
        may not read."""
        if name == SCRATCH:
            return Environment(name=SCRATCH, layers=(self.runtime(),))
        known = self._environments.find(name, project)
        if known is None:
            names = ", ".join(self._environments.some(project, 20)) or "none yet"
            raise EnvironmentNotFound(
                f"there is no environment {name!r}", remedy=f"Known here: {names[:300]}.", environment=name
            )
        return known

    def around(self, name: str, project: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """The layers, top first, and the variables of what `project` means by the name. Raises
        `EnvironmentNotFound`."""
        environment = self.get(name, project)
        return environment.layers, environment.env

    def list(self, project: str | None = None) -> list[Environment]:
        """What a project may read, by name (None: all)."""
        return self._environments.list(project)

    def remove(self, name: str, project: str = "") -> bool:
        """Forget a project's environment; its layers stay. False where it has none of the name."""
        return self._environments.remove(name, project)

    def resolve(self, spec: SandboxSpec, project: str | None) -> SandboxSpec:
        """The spec with everything said: `layers` are the digests of all of them, top first, `env`, `user` and
        `workdir` what will be used.

        Raises `EnvironmentNotFound`, `NotFound` for a layer that the project may not use, `InvalidRequest`.
        """
        environment = self.get(spec.environment, project)
        env, user, workdir = environment.env, environment.user, environment.workdir
        own = [self.find_layer(each, project) for each in spec.layers]
        if own:
            config = self._checked(own)
            env = env | config.env
            user, workdir = config.user or user, config.workdir or workdir
        user = spec.user or user
        if user not in ("root", "0") and env.get("HOME") == "/root":  # root's own: the guest knows the user's
            env = {name: value for name, value in env.items() if name != "HOME"}
        layers = list(dict.fromkeys((*own, *environment.layers)))
        if len(layers) > MAX_LAYERS:
            raise InvalidRequest(f"{len(layers)} layers; {MAX_LAYERS} is the limit", field="layers")
        return replace(spec, layers=layers, env=env | spec.env, user=user, workdir=spec.workdir or workdir)

    def _checked(self, layers: Sequence[str]) -> ImageConfig:
        """The merged configuration of layers that have to be here."""
        if len(layers) > MAX_LAYERS:
            raise InvalidRequest(f"{len(layers)} layers; {MAX_LAYERS} is the limit", field="layers")
        return merged_config([self._config(digest) for digest in layers])

    def _config(self, layer: str) -> ImageConfig:
        known = self._configs.get(layer)
        if known is None:
            self.layers.files(layer)
            known = ImageConfig()
            with contextlib.suppress(NotFound):  # a layer of the first version says nothing
                known = self.layers.manifest(layer).config
            self._configs[layer] = known
        return known

    # --- layers ---

    def name_layer(self, name: str, layer: str, *, project: str = "", readers: Sequence[str] = ()) -> LayerName:
        """Give a layer that is here a name. Raises `InvalidRequest` for a bad one, `NotFound`, `Conflict` where the
        name is another layer's already."""
        if not _LAYER_NAME.fullmatch(name):
            raise InvalidRequest(
                f"not a name for a layer: {name[:200]!r}",
                remedy="Like tools@1.0: a name, `@`, a version.",
                field="name",
            )
        self.layers.files(layer)
        known = self._layer_names.find(name, project)
        if known is not None and known.project == project and known.layer != layer:
            raise Conflict(
                f"{name} is the layer {known.layer[:12]} already", remedy="Use another version, or remove that name."
            )
        made = LayerName(name=name, layer=layer, created_at=time.time(), project=project, readers=list(readers))
        self._layer_names.put(made)
        return made

    def find_layer(self, reference: str, project: str | None) -> str:
        """The digest of a layer by its name or digest. Raises `NotFound`, also for what the project may not use: a
        digest is its to use where some name that it may read stands for it."""
        named = self._layer_names.find(reference, project)
        if named is not None:
            return named.layer
        if is_layer(reference) and (project is None or reference in self.visible_layers(project)):
            return reference
        raise NotFound(f"there is no layer {reference[:200]!r}", remedy="`dsec layer ls` lists them.", field="layers")

    def layer_names(self, project: str | None) -> Sequence[LayerName]:
        """The names that a project may read."""
        return self._layer_names.list(project)

    def remove_layer_name(self, name: str, project: str = "") -> bool:
        """Forget a project's name of a layer. False where it has none."""
        return self._layer_names.remove(name, project)

    def visible_layers(self, project: str | None) -> Set[str]:
        """Every layer that some name stands for which a project may read."""
        lent = [layers for borrower, layers in self._lent if project in (borrower, None)]
        return self._named_layers(project).union(*lent)

    def _named_layers(self, project: str | None) -> frozenset[str]:
        """Looked for anew only when a name has changed."""
        version = self._environments.version, self._layer_names.version
        known = self._visible.pop(project, None)
        if known is None or known[0] != version:
            named = {named.layer for named in self.layer_names(project)}
            known = version, frozenset(named.union(*(each.layers for each in self.list(project))))
        self._visible[project] = known
        if len(self._visible) > _VIEWS:
            del self._visible[next(iter(self._visible))]
        return known[1]

    @contextlib.contextmanager
    def lending(self, project: str, layers: Iterable[str]) -> Iterator[None]:
        """While the context lasts, the project may use these layers by their digests, named or not."""
        lent = (project, frozenset(layers))
        self._lent.append(lent)
        try:
            yield
        finally:
            self._lent.remove(lent)

    def unused_layers(self) -> Set[str]:
        """Layers that no name stands for: the caller knows whether sandboxes still run on them."""
        return {meta.digest for meta in self.layers.all()} - self.visible_layers(None) - {self.runtime()}

    # --- the default ---

    def ensure_default(self, build: Callable[[LayerStore], str]) -> Environment:
        """The environment `debian`, built by `build` (which returns a layer's digest) where it is missing."""
        with self._building:
            with contextlib.suppress(EnvironmentNotFound):
                return self.get(DEFAULT)
            return self.put(
                DEFAULT,
                (build(self.layers),),
                env={"PATH": PATH, "LANG": "C.UTF-8"},
                description="Debian with Python 3, pip, git and bash",
            )


def merged_config(configs: Iterable[ImageConfig]) -> ImageConfig:
    """What layers say together; the topmost comes first."""
    env: dict[str, str] = {}
    user = workdir = None
    entrypoint = cmd = None
    for config in reversed(list(configs)):
        env |= config.env
        user, workdir = config.user or user, config.workdir or workdir
        if config.entrypoint or config.cmd:
            entrypoint, cmd = config.entrypoint, config.cmd
    return ImageConfig(env=env, user=user, workdir=workdir, entrypoint=entrypoint, cmd=cmd)

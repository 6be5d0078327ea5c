"""Layers of Debian packages: a whole base, or what packages add to an environment.

The node's apt resolves and fetches (`store.debian`), and a sandbox without a network installs: no package's scripts run
on the node. A base is mmdebstrap's smallest system, with the packages on top of it, as one layer.

The same packages are the same layer: what an installation writes itself gets the time of the youngest package, and
logs, caches and back-up copies stay out.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from dsec.builder.copying import ROOT, text_source
from dsec.builder.files import Files
from dsec.builder.mounting import Mounted
from dsec.builder.service import BuildService
from dsec.builder.workshop import Stage, Workshop
from dsec.edge.client import Principal
from dsec.errors import BuildFailed, InvalidRequest, PlatformError
from dsec.spec.building import BuildLimits
from dsec.store.build import build_debian_layer, host_suite
from dsec.store.data import Budget, LayerData
from dsec.store.debian import (
    MAX_STATUS_BYTES,
    MIRROR,
    PACKAGE,
    SUITE,
    Fetched,
    Target,
    explained,
    fetch,
    target_of,
)
from dsec.store.directory import DirectoryReader
from dsec.store.format import ImageConfig, Kind
from dsec.store.layers import LayerMeta, LayerStore
from dsec.store.merge import laid_together
from dsec.store.programs import Failed, Stop, Stopped
from dsec.store.shared import Progress
from dsec.store.tree import Node, walk

T = TypeVar("T")

AT = "/.dsec-packages"
"""Where they lie in the sandbox that installs them."""
STATUS = b"var/lib/dpkg/status"
_RELEASES = (b"etc/os-release", b"usr/lib/os-release")
_LEFT_OUT = ("doc", "man", "info", "locale", "lintian", "bug")
_TRACES = re.compile(
    rb"(var/cache/(apt|debconf|ldconfig)|var/log|var/lib/systemd/catalog|var/tmp|tmp|run)/.*"
    rb"|var/lib/dpkg/(status-old|available|lock|lock-frontend)|var/lib/dbus/machine-id"
    rb"|etc/([^/]*-|\.pwd\.lock|machine-id)"
    rb"|etc/ssh/ssh_host_.*|etc/ssl/(private|certs)/ssl-cert-snakeoil.*",
    re.DOTALL,
)
"""Of these only what the packages themselves brought: the rest differs from one installation to the next, or is a
secret that all sandboxes would share."""
_HEAD = f"""\
set -e
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true LC_ALL=C PYTHONHASHSEED=0
cd {AT}
touch began
since=$(($(date +%s) / 86400))
with() {{ dpkg --force-unsafe-io --force-confdef --force-confold {
    " ".join(f"'--path-exclude=/usr/share/{name}/*'" for name in _LEFT_OUT)
} "$@"; }}
"""
_TAIL = """\
with --configure --pending
if test /etc/shadow -nt began; then
  for day in $since $(($(date +%s) / 86400)); do
    sed -i "s/^\\([^:]*:[^:]*\\):$day:/\\1:{day}:/" /etc/shadow
  done
fi
"""
"""The day on which an account was made is the packages', too."""
_TEST_CERTIFICATE = b"ssl-cert-snakeoil.pem"
"""Links to it are named by its digest."""


class PackagesRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/layers:packages`."""

    name: Annotated[str, Meta(min_length=1, max_length=250, description="NAME@VERSION")]
    packages: Annotated[list[Annotated[str, Meta(pattern=PACKAGE)]], Meta(min_length=1, max_length=1000)]
    on: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """The environment that they are added to; None: the layer is a whole base."""
    suite: Annotated[str, Meta(pattern=SUITE)] | None = None
    """Like `bookworm`; None: the environment's, or the node's own."""
    mirror: Annotated[str, Meta(pattern=MIRROR)] | None = None
    """In place of the node's own: for keys of the node's own project."""
    kind: Kind | None = None
    """None: `base`, or `toolkit` where they are added to an environment."""
    readers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=100)] = []
    fresh: bool = False
    """Install them again, where the same was done before."""
    limits: BuildLimits = BuildLimits()
    """Of the sandbox that installs them."""


async def build_packages(
    service: BuildService,
    principal: Principal,
    asked: PackagesRequest,
    then: Callable[[LayerMeta], None],
    progress: Progress,
) -> LayerMeta:
    """Make the layer; `then` gives it a name. Raises as `store.debian.fetch`, `build_debian_layer`, and
    `EnvironmentNotFound`, `BuildFailed` with dpkg's last output, `TooLarge`."""
    packages = sorted(set(asked.packages))

    def say(line: str) -> None:
        words = line.strip()
        if words.startswith(("Unpacking", "Setting up", "Processing", "waiting")):
            progress(words.removesuffix(" ...")[:200], 0, 0)

    async with service.workshop(principal, say, network={}, limits=asked.limits, fresh=asked.fresh) as (
        workshop,
        scratch,
    ):
        store = service.layers.layers
        if asked.on is None:
            below = [(await _base(store, asked, progress)).digest]
        else:
            environment = await service.layers.find_environment(principal.project, asked.on)
            runtime = service.layers.environments.runtime()
            below = [layer for layer in environment.layers if layer != runtime]
        stage = Stage(below, ImageConfig(), ImageConfig())
        target = await _target(workshop, stage, asked.on)
        suite = asked.suite or target.suite
        if not suite:
            raise InvalidRequest("the environment doesn't say its suite", remedy="Name it: --suite.", field="suite")
        fetched = await _stoppable(
            lambda stop: fetch(
                scratch, packages, target, suite=suite, mirror=asked.mirror, progress=progress, stop=stop
            )
        )
        if fetched.files:
            with _packages(fetched, scratch) as mounts:
                await _install(workshop, stage, mounts, packages)
        progress("packing", 0, 0)
        layers = stage.layers[: len(stage.layers) - len(below)] if asked.on else stage.layers
        kind: Kind = asked.kind or ("toolkit" if asked.on else "base")
        source = {"suite": suite, "packages": " ".join(packages)}
        made_ns = fetched.made_at * 10**9
        if asked.on is None:
            made_ns = max(made_ns, await asyncio.to_thread(_youngest, store, below[0]))
        meta = await asyncio.to_thread(_settled, store, layers, kind, source, made_ns)
        await service.layers.share([meta.digest], progress)
        await asyncio.to_thread(then, meta)
        await service.layers.publish()
        return meta


async def _base(store: LayerStore, asked: PackagesRequest, progress: Progress) -> LayerMeta:
    own = await asyncio.to_thread(host_suite)
    suite = asked.suite or own
    progress(f"building {suite}", 0, 0)

    def build(stop: Stop) -> LayerMeta:
        return build_debian_layer(
            store, (), suite=suite, mirror=asked.mirror, progress=lambda line: progress(line[:200], 0, 0), stop=stop
        )

    try:
        return await _stoppable(build)
    except PlatformError as error:
        if isinstance(error.__cause__, Failed):
            raise explained(error.__cause__.output, suite) from error
        raise


async def _stoppable(work: Callable[[Stop], T]) -> T:
    """Run it in a thread; a cancellation ends it, and is waited for."""
    stop = Stop()
    running = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        if not isinstance(running.exception(), Stopped | None):
            running.result()
        raise


async def _target(workshop: Workshop, stage: Stage, name: str | None) -> Target:
    """What the system says of itself. Raises `InvalidRequest` where it isn't Debian's."""
    view = await workshop.view(stage)

    def read() -> Target:
        try:
            status = view.files.find(STATUS)
            release = next(filter(None, map(view.files.find, _RELEASES)), None)
        except ValueError as error:
            raise InvalidRequest(f"the environment {name}: {error}", field="on") from None
        if status is None or not status.is_file:
            raise InvalidRequest(
                f"the environment {name} isn't a Debian system: it has no /{STATUS.decode()}", field="on"
            )
        said = view.files.content(release, 1 << 16) if release is not None and release.is_file else b""
        return target_of(view.files.content(status, MAX_STATUS_BYTES), said)

    return await asyncio.to_thread(read)


@contextmanager
def _packages(fetched: Fetched, scratch: Path) -> Iterator[Sequence[Mounted]]:
    """The files, and how to install them, as a command sees them."""
    script = _HEAD
    for step in fetched.steps:
        names = [f"./{name}" if step.verb == "unpack" else name for name in step.names]
        options = "--auto-deconfigure --unpack" if step.verb == "unpack" else "--configure"
        script += f"with --no-triggers {options} {shlex.join(names)}\n"
    script += _TAIL.format(day=fetched.made_at // 86_400)
    folder = scratch / "packages"
    folder.mkdir()
    for file in fetched.files:
        file.rename(folder / file.name)
    (folder / "install").write_text(script)
    with open(scratch / "packages.data", "x+b") as data:
        tree = Files(DirectoryReader(LayerData(data, Budget()), owner=(0, 0)).read(folder), lambda _: data)
        data.flush()
        refusal, source = text_source("policy-rc.d", "#!/bin/sh\nexit 101\n")
        source.node.mode = stat.S_IFREG | 0o755
        yield (
            Mounted(AT.encode(), tree, tree.top, ROOT),
            Mounted(b"/usr/sbin/policy-rc.d", refusal, source.node, ROOT),  # no services are started
        )


async def _install(workshop: Workshop, stage: Stage, mounts: Sequence[Mounted], packages: Sequence[str]) -> None:
    title = f"installing {' '.join(packages)}"
    try:
        await workshop.run(stage, ["/bin/sh", f"{AT}/install"], title[:300], user="root", network=False, mounts=mounts)
    except BuildFailed as error:
        output = str(error.details.get("output", ""))
        said = [line for line in output.splitlines() if line.startswith("dpkg: error")] or output.splitlines()[-3:]
        raise BuildFailed(
            f"{error.message}: {' / '.join(said)[-1000:]}", remedy=error.remedy, **error.details
        ) from error


def _youngest(store: LayerStore, layer: str) -> int:
    return max(node.mtime_ns for _, node in walk(store.tree(layer)))


def _is_trace(path: bytes, node: Node) -> bool:
    if node.is_dir or node.is_whiteout:
        return False
    return _TRACES.fullmatch(path) is not None or (node.is_link and node.target == _TEST_CERTIFICATE)


def _settled(store: LayerStore, layers: Sequence[str], kind: Kind, source: dict[str, str], latest_ns: int) -> LayerMeta:
    """One layer of them, with nothing in it that another installation would write otherwise."""

    def settle(top: Node) -> None:
        for path, node in walk(top):
            for name, child in list(node.children.items()):
                if child.mtime_ns > latest_ns and _is_trace(path + b"/" + name if path else name, child):
                    del node.children[name]
            node.mtime_ns = min(node.mtime_ns, latest_ns)

    words = f"{source['suite']}: {source['packages']}"
    if not layers:  # all of them were there
        return store.add_tree({}, kind, words[:200])
    return laid_together(store, layers, kind, words[:200], source=source, settle=settle)

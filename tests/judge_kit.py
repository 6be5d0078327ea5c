"""A server with an environment `cc` that has this host's C and C++ compilers, as a layer."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec import Client
from server_kit import Server, serving
from trees import link_store

PACKAGES = (
    "gcc",
    "g++",
    "cpp",
    "binutils",
    "libc6-dev",
    "libcrypt-dev",
    "linux-libc-dev",
    "libgcc-*-dev",
    "gcc-*",
    "g++-*",
    "libstdc++-*-dev",
    "cpp-*",
)
LIBRARIES = (
    "libbinutils",
    "libisl*",
    "libmpc3",
    "libmpfr6",
    "libgmp10",
    "libctf*",
    "libjansson4",
    "libzstd1",
    "zlib1g",
)
NEEDS = pytest.mark.skipif(not shutil.which("dpkg-query") or not shutil.which("g++"), reason="needs Debian's compilers")


def toolchain(path: Path) -> Path:
    """An archive of the compilers' own files."""
    query = [
        "dpkg-query",
        "-W",
        "-f",
        "${db:Status-Status} ${binary:Package}\n",
        *PACKAGES,
        "binutils-*",
        *LIBRARIES,
    ]
    known = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    found = [line.split()[1] for line in known if line.startswith("installed ")]
    listed = subprocess.run(["dpkg-query", "-L", *found], capture_output=True, text=True, check=True).stdout
    with tarfile.open(path, "w") as tar:
        for line in sorted(set(listed.splitlines())):
            name = Path(line)
            unneeded = "/share/" in line or name.name in ("lto1", "lto-dump", "lto-wrapper") or name.suffix == ".gox"
            if line.startswith("/") and not unneeded and (name.is_symlink() or name.is_file()):
                tar.add(name, line.lstrip("/"), recursive=False)
    return path


@contextmanager
def compiling(debian_store: Path, top: Path) -> Iterator[Server]:
    """A server, its state in `top`, whose store is its own."""
    (top / "state").mkdir(mode=0o700, exist_ok=True)
    link_store(debian_store, top / "state" / "store")
    (top / "state" / "native").symlink_to(debian_store.parent / "native")
    with serving(top / "state") as made:
        endpoint = made.endpoint()
        with Client(endpoint.url, endpoint.api_key) as client:
            client.catalog.build(toolchain(top / "cc.tar"), "cc@1")
            client.catalog.create_environment("cc", ["cc@1", "env:debian"])
        yield made

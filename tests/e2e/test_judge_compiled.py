"""The judge with a compiler: this host's, as a layer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec import Client
from server_kit import Server, serving

PACKAGES = (
    "gcc",
    "cpp",
    "binutils",
    "libc6-dev",
    "libcrypt-dev",
    "linux-libc-dev",
    "libgcc-*-dev",
    "gcc-*",
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
ADD = '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }\n'
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs Debian's packages"),
]


def toolchain(path: Path) -> Path:
    """An archive of the C compiler's own files."""
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
            unneeded = "/share/" in line or name.name in ("cc1plus", "lto1", "lto-dump") or name.suffix == ".gox"
            if line.startswith("/") and not unneeded and (name.is_symlink() or name.is_file()):
                tar.add(name, line.lstrip("/"), recursive=False)
    return path


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    top = tmp_path_factory.mktemp("compiled")
    (top / "state").mkdir(mode=0o700)
    shutil.copytree(debian_store, top / "state" / "store", copy_function=os.link)  # a store of its own
    (debian_store.parent / "native").mkdir(exist_ok=True)
    (top / "state" / "native").symlink_to(debian_store.parent / "native")
    with serving(top / "state") as made:
        endpoint = made.endpoint()
        with Client(endpoint.url, endpoint.api_key) as client:
            client.catalog.build(toolchain(top / "cc.tar"), "cc@1")
            client.catalog.create_environment("cc", ["cc@1", "env:debian"])
        yield made


def result(server: Server, source: str) -> dict[str, Any]:
    spec = {
        "environment": "cc",
        "language": "c",
        "source": source,
        "cases": [{"stdin": "1 2", "expected": "3"}] * 3,
    }
    endpoint = server.endpoint()
    request = urllib.request.Request(
        f"{endpoint.url}/v1/judge", json.dumps(spec).encode(), {"Authorization": f"Bearer {endpoint.api_key}"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [json.loads(line) for line in answer]
    found: dict[str, Any] = lines[-1]["result"]
    return found


def test_programs_are_compiled_once(server: Server) -> None:
    whole = {"verdict": "accepted", "passed": 3, "cases": 3}
    assert result(server, ADD) == {**whole, "compiled": True}
    assert result(server, ADD) == whole
    assert result(server, "int main(void) {")["verdict"] == "compile_error"
    assert result(server, "int main(void) { int *p = 0; return *(volatile int *)p; }")["verdict"] == "runtime_error"
    assert result(server, "int main(void) { return 0; }")["verdict"] == "wrong_answer"

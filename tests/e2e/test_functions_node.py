"""A language whose toolchain comes from Debian's packages, unpacked and made a layer as a user would: Node. Others were
tried by hand in the same way (docs/FUNCTIONS.md)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Client, FunctionLimits
from dsec.spec.causes import Cause
from dsec.spec.judging import Word
from server_kit import serving
from trees import link_store

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not (shutil.which("apt-get") and shutil.which("dpkg")), reason="needs Debian's tools"),
]
SUM = "console.log('sum', require('fs').readFileSync(0, 'utf8').trim().split(' ').map(Number).reduce((a, b) => a + b))"


def unpacked(packages: list[str], status: bytes, cache: Path, work: Path) -> Path:
    """An archive of packages and of what they need besides those of a dpkg status. `cache` keeps what was fetched."""
    (cache / "partial").mkdir(parents=True, exist_ok=True)
    (work / "status").write_bytes(status)
    places = [f"Dir::State::status={work}/status", f"Dir::Cache::archives={cache}", "APT::Sandbox::User=root"]
    options = [word for each in [*places, "Debug::NoLocking=1"] for word in ("-o", each)]
    fetch = ["apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", *options, "install", *packages]
    if subprocess.run(fetch, capture_output=True, check=False).returncode:  # the lists are old, or not there
        subprocess.run(["apt-get", "-qq", "update"], capture_output=True, check=True)
        subprocess.run(fetch, capture_output=True, check=True)
    for package in cache.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, work / "root"], check=True)
    return Path(shutil.make_archive(str(work / "root"), "tar", work / "root"))


@pytest.fixture(scope="module")
def client(debian_module_state: Path, debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    (debian_module_state / "store").unlink()
    link_store(debian_store, debian_module_state / "store")  # its own names: the next run makes the layer anew
    with serving(debian_module_state) as server:
        endpoint = server.endpoint()
        with Client(endpoint.url, endpoint.api_key) as client:
            status = client.function("cat /var/lib/dpkg/status", language="bash").run().stdout
            cache = debian_store.parent / "packages" / "node"
            archive = unpacked(["nodejs"], status, cache, tmp_path_factory.mktemp("node"))
            client.catalog.build(archive, "node@1")
            client.catalog.create_environment("node", ["node@1", "env:debian"])
            yield client


def test_programs(client: Client) -> None:
    program = client.function(SUM, language="node", environment="node")
    assert program.run(stdin=b"20 22\n").stdout == b"sum 42\n"
    bad = client.function("console.log(", language="node", environment="node").run()
    assert not bad.ok
    assert b"SyntaxError" in bad.stderr
    limits = FunctionLimits(cpu_s=0.5)
    endless = client.function("for (;;) {}", language="node", environment="node", limits=limits).run()
    assert endless.cause is Cause.COMMAND_TIMEOUT
    assert "cpu_s" in endless.message


def test_the_judge(client: Client) -> None:
    cases = [("1 2", "sum 3"), ("4 5", "sum 9")]
    judged = client.judge(SUM, cases, language="node", environment="node")
    assert judged.verdict is Word.ACCEPTED
    for compiled in (True, False):
        judged = client.judge("console.log(", cases, language="node", environment="node")
        assert (judged.verdict, judged.compiled) == (Word.COMPILE_ERROR, compiled)
        assert "SyntaxError" in judged.cases[0].stderr
    judged = client.judge("for (;;) {}", cases, language="node", environment="node", limits={"cpu_s": 0.5})
    assert judged.verdict is Word.TIME_LIMIT

"""E2B's unmodified client, in both versions, against a real server: each case of its script is a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import clients
import pytest
from image_kit import TinyImage, registry, tar

from dsec.bench import e2b_client
from dsec.store.image import host_platform
from trees import link_store

sys.path.insert(0, str(Path(__file__).parents[1]))
from server_kit import Server, serving

pytestmark = [pytest.mark.root, pytest.mark.slow]

SCRIPTS = tuple(sorted(path.name for path in clients.HERE.glob("cases_*.py")))
CASES = [(script, case) for script in SCRIPTS for case in clients.cases(script)]


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("e2b") / "state"
    state.mkdir(mode=0o700)
    (state / "native").symlink_to(debian_store.parent / "native")
    link_store(debian_store, state / "store")  # its own names, the same files
    with serving(state) as server:
        yield server


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image in a registry that can run a shell."""
    libraries = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout.split()
    paths = [Path(word) for word in libraries if word.startswith("/")]
    files = [(str(path).lstrip("/"), {"data": path.read_bytes(), "mode": 0o755}) for path in (Path("/bin/sh"), *paths)]
    with registry(tmp_path_factory.mktemp("registry")) as url:
        archive = tar(*files, ("from-image", b"yes\n"))
        TinyImage(archive, architecture=host_platform().architecture).push(url, "team/tool", "1")
        yield f"{url.removeprefix('http://')}/team/tool:1"


@pytest.fixture(scope="module")
def outcome(server: Server, image: str) -> Callable[[str, str], dict[str, str | None]]:
    """Runs a script with a version of the client, once."""
    key = server.endpoint().api_key
    return cache(lambda script, version: clients.run(script, version, server.url, key, TEST_IMAGE=image))


@pytest.mark.parametrize("version", clients.VERSIONS)
@pytest.mark.parametrize(("script", "case"), CASES, ids=[f"{script[6:-3]}-{case[5:]}" for script, case in CASES])
def test_case(outcome: Callable[[str, str], dict[str, str | None]], script: str, case: str, version: str) -> None:
    outcomes = outcome(script, version)
    assert case in outcomes, "the script didn't come that far"
    assert outcomes[case] is None, outcomes[case]


@pytest.mark.parametrize("version", clients.VERSIONS)
async def test_the_benchmark_times_it(server: Server, version: str) -> None:
    package = e2b_client.find(clients.package(version))
    assert package is not None
    async with server.client() as client:
        sandbox = await client.create("debian")
        times = await e2b_client.run_times(package, server.endpoint(), sandbox.id, 3)
        await sandbox.kill()
    assert len(times) == 3
    assert all(time > 0 for time in times)

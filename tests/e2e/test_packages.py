"""Layers of Debian packages, by the node's own mirrors: the same packages are the same layer, nothing is left of what
goes wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Client
from dsec.errors import DsecError, EnvironmentNotFound, InvalidRequest, Unavailable
from dsec.kernel import mounts
from server_kit import Server, serving
from trees import link_store

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("packages") / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")
    (state / "native").symlink_to(debian_store.parent / "native")
    with serving(state) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as made:
        yield made


def dsec(server: Server, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsec.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=server.environment())
    assert done.returncode == code, done.stderr
    return done


def left(server: Server) -> list[str]:
    return [each.name for each in (server.state / "store" / "tmp").iterdir()]


def test_packages_on_an_environment(server: Server, client: Client) -> None:
    """`openssh-server` makes keys, an account and a link; `tree` nothing."""
    said = dsec(server, "layer", "build", "net@1", "--packages", "tree openssh-server", "--on", "debian", "--json")
    made = json.loads(said.stdout)
    dsec(server, "env", "create", "net", "net@1", "env:debian")
    with client.create("net") as sandbox:
        ran = sandbox.commands.run(
            "tree --version && dpkg --audit && dpkg -s openssh-server | grep Status"
            " && grep -c sshd /etc/passwd && ls /etc/ssh /usr/share/doc /var/log /usr/sbin/policy-rc.d /.dsec-packages"
        )
        assert "tree v" in ran.stdout
        assert "Status: install ok installed\n1\n" in ran.stdout
        assert "sshd_config" in ran.stdout
        for absent in ("ssh_host", "dpkg.log", "policy-rc.d\n", "install\n"):
            assert absent not in ran.stdout
    info = client.catalog.layer("net@1")
    assert (info["kind"], info["source"]["packages"]) == ("toolkit", "openssh-server tree")
    again = client.catalog.build_packages(["openssh-server", "tree"], "net@2", on="debian", fresh=True)
    assert again["layer"] == made["layer"]
    assert client.catalog.build_packages(["tree"], "none@1", on="net")["size_bytes"] < 10_000  # it is there
    assert left(server) == []


@pytest.mark.slow
def test_packages_alone_are_a_whole_base(server: Server, client: Client) -> None:
    steps: list[str] = []
    made = client.catalog.build_packages(["jq"], "jq@1", on_step=lambda step, done, total: steps.append(step))
    assert any(step.startswith("fetching") for step in steps)
    client.catalog.create_environment("jq", ["jq@1"])
    with client.create("jq") as sandbox:
        assert sandbox.commands.run("echo '{\"a\": 1}' | jq .a; which git").stdout == "1\n"
    assert client.catalog.layer(made["layer"])["kind"] == "base"
    assert left(server) == []


@pytest.mark.parametrize(
    ("packages", "options", "error"),
    [
        (["tree", "no-such-package-x"], {}, (InvalidRequest, "has no package no-such-package-x")),
        (["tree; id"], {}, (InvalidRequest, "packages")),
        (["-oX=1"], {}, (InvalidRequest, "packages")),
        ([], {}, (InvalidRequest, "packages")),
        (["tree"], {"on": "scratch"}, (InvalidRequest, "isn't a Debian system")),
        (["tree"], {"on": "nowhere"}, (EnvironmentNotFound, "nowhere")),
        (["tree"], {"suite": "../../x"}, (InvalidRequest, "suite")),
        (["tree"], {"mirror": "file:///etc"}, (InvalidRequest, "mirror")),
        (["tree"], {"mirror": "http://127.0.0.1:1/debian"}, (Unavailable, "reaches no mirror of bookworm|trixie")),
        (["tree"], {"mirror": "http://127.0.0.1:1/debian", "on": None}, (Unavailable, "reaches no mirror")),
    ],
)
def test_what_cannot_be(
    server: Server,
    client: Client,
    packages: list[str],
    options: dict[str, str | None],
    error: tuple[type[DsecError], str],
) -> None:
    kind, words = error
    with pytest.raises(kind, match=words):
        client.catalog.build_packages(packages, "never@1", **{"on": "debian", **options})  # type: ignore[arg-type]
    assert "never@1" not in str(client.catalog.layers())
    assert left(server) == []


def test_the_command_line_says_what_does_not_go_together(server: Server) -> None:
    for arguments in (
        ["a@1"],
        [".", "a@1", "--on", "debian"],
        [".", "a@1", "--packages", "x"],
        ["a@1", "--packages", " "],
    ):
        assert "invalid_request" in dsec(server, "layer", "build", *arguments, code=2).stderr
    assert "there is no nowhere" in dsec(server, "layer", "build", "nowhere", "a@1", code=2).stderr


def test_who_goes_away_leaves_nothing(server: Server) -> None:
    """In the middle of mmdebstrap, which has mounted /proc."""

    async def leave() -> None:
        begun = asyncio.Event()
        async with server.client() as client:
            making = asyncio.create_task(
                client.catalog.build_packages(
                    ["jq"], "never@2", on_step=lambda step, *_: begun.set() if step.startswith("downloading") else None
                )
            )
            await asyncio.wait_for(begun.wait(), 120)
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    asyncio.run(leave())
    deadline = time.monotonic() + 120
    while left(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left(server) == []
    assert not [each for each in mounts.mounted(server.state / "store") if "/tmp/" in str(each)]

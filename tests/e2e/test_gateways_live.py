"""pip, npm, apt and git in sandboxes that have just their permission, against servers that speak the real protocols."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from gateway_world import SECRET, World, open_world, run, works

from dsec import AsyncSandbox
from dsec.errors import InvalidRequest

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(debian_module_state: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with open_world(debian_module_state, tmp_path_factory.mktemp("outside")) as world:
        yield world


async def bring(box: AsyncSandbox, paths: list[Path]) -> None:
    """Programs of this host, at the same places inside."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        for path in paths:
            archive.add(path)
    await box.files.write("/tmp/tools.tar", packed.getvalue())
    await works(box, "tar -C / -xf /tmp/tools.tar --keep-directory-symlink && rm /tmp/tools.tar")


def libraries(*programs: Path) -> list[Path]:
    """What they are linked with."""
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=True)
    return [Path(found) for found in sorted(set(re.findall(r"=> (/\S+)", done.stdout)))]


async def test_pip_works_with_its_permission(world: World) -> None:
    async with await world.client.create("debian", network={"pypi": {"before": "2022-12-31"}}) as box:
        await works(box, "pip install --target /tmp/site tool")
        assert sorted(await works_lines(box, "ls -d /tmp/site/*.dist-info | xargs -n1 basename")) == [
            "base-0.1.dist-info",
            "tool-2.0.dist-info",
        ]
        # Its file can't be had either, nor another gateway, nor the index itself.
        code, output = await fetch(box, "http://pypi.dsec/files/tool/tool-3.0-py3-none-any.whl")
        assert "403" in output
        for url in ("http://npm.dsec/left", "http://git.dsec/", world.index.url):
            code, output = await fetch(box, url)
            assert code != 0, url
        events = [event async for event in box.events() if event.type == "gateway"]
        assert {event.data["permission"] for event in events} == {"pypi"}
        assert any(event.data.get("file", "").startswith("tool-2.0") and event.data["bytes"] for event in events)
        # A later stage has none.
        await box.network.update({"pypi": False})
        code, _ = await fetch(box, "http://pypi.dsec/simple/tool/")
        assert code != 0


async def works_lines(box: AsyncSandbox, command: str) -> list[str]:
    return (await works(box, command)).split()


async def fetch(box: AsyncSandbox, url: str) -> tuple[int, str]:
    """As a program inside does that knows nothing of gateways."""
    script = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=60).read())"
    return await run(box, f'python3 -c "{script}"')


async def test_git_works_with_its_permission(world: World) -> None:
    async with await world.client.create("debian", network={"git:git.example/org/repo": True}) as box:
        await works(box, "git clone -q https://git.example/org/repo.git /tmp/tree")
        assert await works_lines(box, "git -C /tmp/tree rev-parse HEAD") == [world.first]
        for url in ("https://git.example/org/other.git", "http://git.dsec/git.example/org/repo/../other.git"):
            code, output = await run(box, f"git clone -q {url} /tmp/other")
            assert code != 0, output
        code, output = await run(box, "cd /tmp/tree && git -c user.name=a -c user.email=a@example.com commit -q "
                                      "--allow-empty -m x && git push -q origin HEAD:mine")  # fmt: skip
        assert code != 0
        assert "403" in output


NODE, NPM = Path("/usr/bin/node"), Path(shutil.which("npm") or "/nowhere/bin/npm").resolve().parent.parent
NPM_TREE = NPM.parent if NPM.parent.name == "nodejs" else NPM
"""Debian's has each module of npm's in a package of its own, beside it."""


async def test_npm_works_with_its_permission(world: World) -> None:
    async with await world.client.create("debian", network={"npm": {"before": "2022-12-31"}}) as box:
        await bring(box, [NODE, NPM_TREE, *libraries(NODE)])
        await works(
            box, f"mkdir /tmp/p; cd /tmp/p; echo '{{}}' > package.json; node {NPM}/bin/npm-cli.js install @scope/thing"
        )
        lock = json.loads(await works(box, "cat /tmp/p/package-lock.json"))
        versions = {
            name.removeprefix("node_modules/"): each["version"] for name, each in lock["packages"].items() if name
        }
        assert versions == {"@scope/thing": "0.1.0", "left": "2.0.0"}
        assert await works(box, "cd /tmp/p; node -p 'require(\"left\")'") == "2.0.0\n"


APT = [Path("/usr/bin/apt-get"), Path("/usr/lib/apt/methods/http"), Path("/usr/lib/apt/methods/store")]


async def test_apt_works_with_its_permission(world: World) -> None:
    async with await world.client.create("debian", network={"apt": True}) as box:
        await bring(box, [Path("/usr/lib/apt"), *APT, *libraries(*APT)])
        await works(
            box,
            "mkdir -p /etc/apt/apt.conf.d /etc/apt/preferences.d /var/lib/apt/lists/partial"
            " /var/cache/apt/archives/partial /var/log/apt;"
            " echo 'deb [trusted=yes] http://mirror.example/debian stable main' > /etc/apt/sources.list;"
            " echo 'APT::Sandbox::User \"root\";' > /etc/apt/apt.conf.d/test; apt-get update",
        )
        await works(box, "apt-get install -y --no-install-recommends hello-dsec")
        assert await works(box, "cat /usr/share/hello-dsec.txt") == "1.0"
        for url in ("http://mirror.example/private", "http://other.example/debian/dists/stable/Release"):
            code, _ = await fetch(box, url)
            assert code != 0


async def test_a_model_is_reached_and_its_key_is_not_inside(world: World) -> None:
    async with await world.client.create("debian", network={"inference:main": True}) as box:
        output = await works(
            box,
            'python3 -c "import json, os, urllib.request as u;'
            " r = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', b'{\\\"model\\\": \\\"m\\\"}',"
            " {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}); print(u.urlopen(r).read().decode())\"; env",
        )
        assert world.asked[-1]["Authorization"] == f"Bearer {SECRET}"
        assert '"usage"' in output
        assert SECRET not in output
        events = [event async for event in box.events() if event.type == "gateway"]
        assert (events[-1].data["input_tokens"], events[-1].data["output_tokens"]) == (3, 4)
        assert SECRET not in str(events)


async def test_a_permission_that_its_gateway_does_not_know_is_refused(world: World) -> None:
    wrong: list[dict[str, Any]] = [
        {"git:git.example": True},
        {"inference:other": True},
        {"git:git.example/a/../b": True},
    ]
    for network in wrong:
        with pytest.raises(InvalidRequest):
            await world.client.create("debian", network=network)

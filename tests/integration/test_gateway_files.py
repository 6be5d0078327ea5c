"""The `apt` and `go` gateways, over repositories made by Debian's own tools and files of the module proxy protocol."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_kit import Front, open_front, run, serve
from upstream_kit import MIDDLE, NEW, OLD, Files, repository

from dsec.egress.gateways.config import GatewaysConfig, Repository, Upstream
from dsec.errors import InvalidRequest

MODULE = "mod.example/!thing"


def go_files(top: Path) -> None:
    """Three versions of a module."""
    directory = top / "go" / MODULE / "@v"
    directory.mkdir(parents=True)
    (directory / "list").write_text("v1.0.0\nv1.10.0\nv1.9.0\nv2.0.0-rc.1\n")
    for version, at in (("v1.0.0", OLD), ("v1.9.0", MIDDLE), ("v1.10.0", NEW), ("v2.0.0-rc.1", OLD), ("master", NEW)):
        described = {"Version": "v1.11.0-0.2024" if version == "master" else version, "Time": at[:19] + "Z"}
        (directory / f"{version}.info").write_text(json.dumps(described))
        (directory / f"{version}.mod").write_text("module mod.example/Thing\n")
        (directory / f"{version}.zip").write_bytes(version.encode() * 10)
    (top / "go" / MODULE / "@latest").write_text(json.dumps({"Version": "v1.10.0", "Time": NEW[:19] + "Z"}))
    sums = top / "go/sumdb/sum.example"
    (sums / "lookup" / "mod.example").mkdir(parents=True)
    (sums / "supported").write_text("")
    for version in ("v1.9.0", "v1.10.0"):
        (sums / "lookup" / f"{MODULE}@{version}").write_text(f"hash of {version}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("upstream") / "files"
    repository(top, "stable", {"hello-dsec": "1.0", "other-dsec": "2.0"})
    repository(top, "secret", {"hidden-dsec": "1.0"})
    (top / "private.deb").write_text("not a repository's")
    go_files(top)
    return top


@pytest.fixture
def files(made: Path, tmp_path: Path) -> Files:
    return Files(Path(shutil.copytree(made, tmp_path / "upstream")))


@pytest.fixture
async def front(files: Files, tmp_path: Path) -> AsyncIterator[Front]:
    async with serve(files.handle) as url:
        config = GatewaysConfig(
            apt=(Repository(f"{url}/debian", inside="http://mirror.example/debian"),),
            go=Upstream(f"{url}/go"),
            index_ttl_s=0,
        )
        async with open_front(tmp_path / "state", config) as front:
            yield front


# --- apt ---


def apt_environment(front: Front, tmp_path: Path) -> dict[str, str]:
    """apt with directories of its own, which believes in the test's unsigned repository."""
    root = tmp_path / "apt"
    for each in ("state/lists/partial", "cache/archives/partial", "etc"):
        (root / each).mkdir(parents=True, exist_ok=True)
    (root / "status").touch()
    host = front.of("apt").hosts[-1]
    (root / "etc/sources.list").write_text(f"deb [trusted=yes] http://{host}/debian stable main\n")
    (root / "apt.conf").write_text(
        f'Dir::State "{root}/state"; Dir::State::status "{root}/status"; Dir::Cache "{root}/cache";\n'
        f'Dir::Etc "{root}/etc"; Dir::Etc::parts "/dev/null"; APT::Architecture "amd64";\n'
        'APT::Architectures { "amd64"; };\n'
        f'APT::Sandbox::User "root"; Acquire::http::Proxy "{front.url}"; Acquire::Languages "none";\n'
    )
    return {**front.environment(), "APT_CONFIG": str(root / "apt.conf")}


async def test_apt_updates_and_downloads(front: Front, files: Files, tmp_path: Path) -> None:
    front.grant("apt")
    environment = apt_environment(front, tmp_path)
    for _ in range(2):
        code, output = await run("apt-get", "update", environment=environment, cwd=tmp_path)
        assert code == 0, output
    code, output = await run("apt-get", "download", "hello-dsec", environment=environment, cwd=tmp_path)
    assert code == 0, output
    deb = "pool/hello-dsec_1.0_all.deb"
    assert (tmp_path / "hello-dsec_1.0_all.deb").read_bytes() == (files.top / "debian" / deb).read_bytes()
    host = front.of("apt").hosts[-1]
    for url in (f"http://{host}/debian/{deb}", f"http://apt.dsec/{host}/debian/{deb}"):
        assert (await front.get(url))[0] == 200
    assert files.asked.count(f"/debian/{deb}") == 1


async def test_only_repositories_and_their_suites_are_served(front: Front, files: Files) -> None:
    host = front.of("apt").hosts[-1]
    front.grant("apt", suites=["stable"])
    assert (await front.get(f"http://{host}/debian/dists/stable/Release"))[0] == 200
    before = len(files.asked)
    for path in ("/debian/dists/secret/Release", "/private.deb", "/debian/../private.deb", "/debian/%2e%2e/private.deb",
                 "/go/x", "/debian/dists/stable/../secret/Release", "/debian/dists//secret/Release"):  # fmt: skip
        assert (await front.get(f"http://{host}{path}"))[0] in {400, 403}, path
    assert (await front.get("http://apt.dsec/other.example/debian/dists/stable/Release"))[0] == 403
    async with front.ask("POST", f"http://{host}/debian/dists/stable/Release") as response:
        assert response.status == 403
    assert len(files.asked) == before
    front.grant("apt", hosts=["other.example"])
    assert (await front.get(f"http://{host}/debian/dists/stable/Release"))[0] == 403


async def test_what_changes_is_asked_for_again(front: Front, files: Files) -> None:
    host = front.of("apt").hosts[-1]
    front.grant("apt")
    url = f"http://{host}/debian/dists/stable/Release"
    async with front.ask("GET", url) as response:
        modified = response.headers["Last-Modified"]
        body = await response.read()
    assert (await front.get(url, **{"If-Modified-Since": modified}))[0] == 304
    (files.top / "debian/dists/stable/Release").write_text("newer and longer than what there was before" * 100)
    status, newer = await front.get(url)
    assert status == 200
    assert newer != body


# --- Go ---

GO = f"http://go.dsec/{MODULE}"


async def test_a_module_proxy_is_passed_on(front: Front) -> None:
    front.grant("go")
    assert front.of("go").environment(front.grants)["GOPROXY"] == "http://go.dsec"
    assert (await front.get(f"{GO}/@v/list"))[1].split() == [b"v1.0.0", b"v1.10.0", b"v1.9.0", b"v2.0.0-rc.1"]
    assert await front.get(f"{GO}/@v/v1.10.0.zip") == (200, b"v1.10.0" * 10)
    assert json.loads((await front.get(f"{GO}/@latest"))[1])["Version"] == "v1.10.0"
    assert (await front.get("http://go.dsec/sumdb/sum.example/supported"))[0] == 200


async def test_a_date_hides_versions_everywhere(front: Front) -> None:
    front.grant("go", before="2023-01-01")
    assert (await front.get(f"{GO}/@v/list"))[1].split() == [b"v1.0.0", b"v1.9.0", b"v2.0.0-rc.1"]
    assert json.loads((await front.get(f"{GO}/@latest"))[1])["Version"] == "v1.9.0"
    for hidden in ("v1.10.0.info", "v1.10.0.mod", "v1.10.0.zip", "master.info"):
        status, body = await front.get(f"{GO}/@v/{hidden}")
        assert status == 403, hidden
        assert b"permission go" in body
    assert (await front.get(f"{GO}/@v/v1.9.0.zip"))[0] == 200
    sums = "http://go.dsec/sumdb/sum.example"
    assert (await front.get(f"{sums}/lookup/{MODULE}@v1.9.0"))[0] == 200
    assert (await front.get(f"{sums}/lookup/{MODULE}@v1.10.0"))[0] == 403


async def test_modules_are_denied_and_allowed(front: Front) -> None:
    front.grant("go", deny=["mod.example/Thing@>=v1.9.0"])
    assert (await front.get(f"{GO}/@v/list"))[1].split() == [b"v1.0.0"]
    assert json.loads((await front.get(f"{GO}/@latest"))[1])["Version"] == "v1.0.0"
    assert (await front.get(f"{GO}/@v/v1.10.0.zip"))[0] == 403
    front.grant("go", deny=["mod.example/*"])
    assert (await front.get(f"{GO}/@v/list"))[0] == 403
    front.grant("go", allow=["other.example/*"])
    assert (await front.get(f"{GO}/@latest"))[0] == 403
    for path in ("/x/@v/../list", "/@v/list/x", "/sumdb/sum.example/other", "/"):
        assert (await front.get(f"http://go.dsec{path}"))[0] in {400, 403, 404}, path


async def test_options_that_are_wrong_are_refused(front: Front) -> None:
    for permission, options in (("go", {"before": "x"}), ("apt", {"before": "2022-01-01"}), ("apt", {"suites": "x"})):
        with pytest.raises(InvalidRequest):
            front.grant(permission, **options)


async def test_permissions_add_up(front: Front) -> None:
    front.grant("go", before="2021-06-01", allow=["mod.example/Thing"])
    assert (await front.get(f"{GO}/@v/list"))[1].split() == [b"v1.0.0", b"v2.0.0-rc.1"]
    front.also("go:mod.example", deny=["mod.example/Thing@v1.10.0"])
    assert (await front.get(f"{GO}/@v/list"))[1].split() == [b"v1.0.0", b"v1.9.0", b"v2.0.0-rc.1"]
    front.grant("go:mod.example/Other")
    assert (await front.get(f"{GO}/@v/list"))[0] == 403

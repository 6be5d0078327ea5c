"""The `git:` gateway, with git itself and git's own HTTP server."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_kit import Front, open_front, run, serve
from upstream_kit import GitServer, bare, commit, push

from dsec.egress.gateways.config import GatewaysConfig, Upstream
from dsec.errors import InvalidRequest

URL = "https://git.example/org/repo"
LOCAL = "http://git.dsec/git.example/org/repo"


class Repositories:
    """`org/repo` with two commits on main, a branch and tags; `org/other` with one."""

    def __init__(self, top: Path) -> None:
        self.origin, self.clone = bare(top / "served", "org/repo.git")
        self.first = commit(self.clone, "a", "1", "2021-01-01T00:00:00Z")
        subprocess.run(["git", "tag", "v1"], cwd=self.clone, check=True)
        self.second = commit(self.clone, "b", "2", "2024-01-01T00:00:00Z")
        subprocess.run(["git", "tag", "v2"], cwd=self.clone, check=True)
        push(self.clone, "main", "v1", "v2", "main:refs/heads/fix")
        _, other = bare(top / "served", "org/other.git")
        commit(other, "c", "3", "2021-01-01T00:00:00Z")
        push(other)
        (top / "served/org/repo").symlink_to("repo.git")

    def begin(self) -> None:
        """For one test, which may add but not take away."""
        self.server = GitServer(self.origin.parent.parent)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repositories:
    return Repositories(tmp_path_factory.mktemp("git") / "upstream")


@pytest.fixture
def repositories(made: Repositories) -> Repositories:
    made.begin()
    return made


@pytest.fixture
async def front(repositories: Repositories, tmp_path: Path) -> AsyncIterator[Front]:
    state = tmp_path / "state"
    state.mkdir()
    async with serve(repositories.server.handle) as url:
        config = GatewaysConfig(git={"git.example": Upstream(url)})
        host = url.removeprefix("http://")
        secrets = state / "secrets.toml"
        secrets.touch(0o600)
        token = base64.b64encode(b"user:hunter2hunter2").decode()
        secrets.write_text(f'[token]\nvalue = "{token}"\nhosts = ["{host}"]\n')
        async with open_front(state, config) as front:
            yield front


async def git(front: Front, tmp_path: Path, *arguments: str) -> tuple[int, str]:
    environment = {**front.environment(), "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    return await run("git", *arguments, environment=environment, cwd=tmp_path)


def log(tree: Path) -> list[str]:
    done = subprocess.run(["git", "log", "--format=%H"], cwd=tree, check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize("url", [URL, f"{URL}.git", "git@git.example:org/repo.git", "ssh://git@git.example/org/repo"])
async def test_git_clones(front: Front, repositories: Repositories, tmp_path: Path, url: str) -> None:
    front.grant("git:git.example/org/repo")
    code, output = await git(front, tmp_path, "clone", "-q", url, "tree")
    assert code == 0, output
    assert log(tmp_path / "tree") == [repositories.second, repositories.first]
    assert {note["permission"] for note in front.notes} == {"git:git.example/org/repo"}


@pytest.mark.parametrize("version", ["0", "1", "2"])
async def test_all_versions_of_the_protocol_fetch(front: Front, tmp_path: Path, version: str) -> None:
    front.grant("git:git.example/org/repo")
    code, output = await git(front, tmp_path, "-c", f"protocol.version={version}", "clone", "-q", f"{URL}.git", "tree")
    assert code == 0, output
    code, output = await git(front, tmp_path, "clone", "-q", "--depth=1", f"{URL}.git", "shallow")
    assert code == 0, output


async def test_other_repositories_are_refused(front: Front, repositories: Repositories, tmp_path: Path) -> None:
    front.grant("git:git.example/org/repo")
    code, output = await git(front, tmp_path, "clone", "-q", "https://git.example/org/other.git", "tree")
    assert code != 0
    assert "403" in output
    asked = len(repositories.server.asked)
    tail = "info/refs?service=git-upload-pack"
    for path in (
        f"/git.example/org/repo/../other.git/{tail}",
        f"/git.example/org/repo/%2e%2e/other.git/{tail}",
        f"/git.example/org%2frepo/{tail}",
        f"/git.example/org/repo%2f..%2fother.git/{tail}",
        f"/git.example/org//repo/{tail}",
        f"/git.example/org/repo/x/{tail}",
        f"/git.example/org/repo.git.git/{tail}",
        f"/git.example:443/org/repo/{tail}",
        f"/git.example@other/org/repo/{tail}",
        "/git.example/org/repo/info/refs",
        "/git.example/org/repo/HEAD",
        "/git.example/org/repo/objects/info/packs",
        "/git.example/org/repo/info/refs?service=git-upload-pack&service=git-receive-pack",
        "/git.example/org/repo/info/lfs/objects/batch",
    ):
        assert (await front.get(f"http://git.dsec{path}"))[0] in {400, 403, 405}, path
    assert len(repositories.server.asked) == asked


async def test_pushing_takes_its_option(front: Front, repositories: Repositories, tmp_path: Path) -> None:
    front.grant("git:git.example/org/repo")
    await git(front, tmp_path, "clone", "-q", f"{URL}.git", "tree")
    made = commit(tmp_path / "tree", "new", "x", "2024-02-02T00:00:00Z")
    code, output = await git(front, tmp_path / "tree", "push", "-q", "origin", "HEAD:refs/heads/mine")
    assert code != 0
    assert "403" in output
    front.grant("git:git.example/org/repo", write=True)
    code, output = await git(front, tmp_path / "tree", "push", "-q", "origin", "HEAD:refs/heads/mine")
    assert code == 0, output
    assert (repositories.origin / "refs/heads/mine").read_text().strip() == made


async def test_credentials_are_added_outside(front: Front, repositories: Repositories, tmp_path: Path) -> None:
    token = base64.b64encode(b"user:hunter2hunter2").decode()
    repositories.server.need = f"Basic {token}"
    front.grant("git:git.example/org/repo")
    code, _ = await git(front, tmp_path, "clone", "-q", f"{URL}.git", "tree")
    assert code != 0
    front.grant("git:git.example/org/repo", headers={"Authorization": "Basic secret:token"})
    code, output = await git(front, tmp_path, "clone", "-q", f"{URL}.git", "tree")
    assert code == 0, output
    assert token not in output + str(front.notes)


async def test_only_the_refs_of_the_permission_exist(front: Front, repositories: Repositories, tmp_path: Path) -> None:
    front.grant("git:git.example/org/repo", refs=["refs/tags/v1"])
    code, output = await git(front, tmp_path, "ls-remote", f"{URL}.git")
    assert (code, output.split()) == (0, [repositories.first, "refs/tags/v1"])
    code, output = await git(front, tmp_path, "clone", "-q", "--branch", "v1", f"{URL}.git", "tree")
    assert code == 0, output
    assert log(tmp_path / "tree") == [repositories.first]
    tree = tmp_path / "tree"
    code, output = await git(front, tree, "fetch", "origin", repositories.second)
    assert code != 0
    assert "403" in output
    code, _ = await git(front, tree, "fetch", "origin", "main")
    assert code != 0
    code, output = await git(front, tree, "-c", "protocol.version=0", "fetch", "origin", "v1")
    assert code != 0


async def test_a_pinned_branch_ends_at_its_commit(front: Front, repositories: Repositories, tmp_path: Path) -> None:
    front.grant("git:git.example/org/repo", pins={"refs/heads/fix": repositories.first})
    code, output = await git(front, tmp_path, "clone", "-q", "--branch", "fix", f"{URL}.git", "tree")
    assert code == 0, output
    tree = tmp_path / "tree"
    assert log(tree) == [repositories.first]
    _, output = await git(front, tree, "ls-remote", "origin")
    assert repositories.second not in output
    for wanted in (repositories.second, "main", "v2", "refs/tags/v2:refs/tags/v2"):
        code, output = await git(front, tree, "fetch", "origin", wanted)
        assert code != 0, wanted
    code, _ = await git(front, tree, "cat-file", "-e", repositories.second)
    assert code != 0
    commit(repositories.clone, "later", "4", "2024-05-05T00:00:00Z")
    push(repositories.clone, "HEAD:refs/heads/fix")
    code, output = await git(front, tree, "fetch", "-q", "origin")
    assert code == 0, output
    assert log(tree) == [repositories.first]


async def test_what_a_definition_hides_a_policy_does_not_show(
    front: Front, repositories: Repositories, tmp_path: Path
) -> None:
    tag, pinned = "refs/tags/v1", {"refs/heads/main": repositories.second, "refs/tags/v1": repositories.first}
    front.grant("git:git.example/org/repo", refs=["*"], pins=pinned, within=[tag])
    _, output = await git(front, tmp_path, "ls-remote", f"{URL}.git")
    assert output.split() == [repositories.first, tag]
    code, _ = await git(front, tmp_path, "clone", "-q", "--branch", "v1", f"{URL}.git", "tree")
    assert code == 0
    code, _ = await git(front, tmp_path / "tree", "fetch", "origin", repositories.second)
    assert code != 0


async def test_permissions_that_are_wrong_are_refused(front: Front) -> None:
    for permission, options in (
        ("git:git.example", {}),
        ("git:git.example/", {}),
        ("git:git.example/org/*/x", {}),
        ("git:git.example/../x", {}),
        ("git:../org/repo", {}),
        ("git:git.example/org/repo", {"pins": {"main": "abc"}}),
        ("git:git.example/org/repo", {"write": True, "refs": ["refs/heads/main"]}),
    ):
        with pytest.raises(InvalidRequest):
            front.grant(permission, **options)  # type: ignore[arg-type]

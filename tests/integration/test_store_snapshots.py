"""Snapshots of hostile and awkward captures: what is packed, what is scrubbed, and what a full disk leaves."""

from __future__ import annotations

import asyncio
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.errors import Conflict, EnvironmentNotFound, NotFound, Unavailable
from dsec.kernel import mounts, syscalls
from dsec.ports import Captured
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.snapshots import SnapshotInfo, SnapshotRequest
from dsec.store.environments import EnvironmentStore
from dsec.store.layers import LayerStore
from dsec.store.service import LayerService
from dsec.store.snapshots import pack

pytestmark = pytest.mark.root

BASE = 400_000
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store on a small file system of its own."""
    state = tmp_path / "state"
    state.mkdir()
    syscalls.mount("tmpfs", state, "tmpfs", data="size=8m")
    yield state
    mounts.unmount_under(tmp_path)


@pytest.fixture
def service(store: Path) -> LayerService:
    environments = EnvironmentStore(store, LayerStore(store))
    environments.put("base", [environments.layers.add_tree({}, "base").digest])
    return LayerService(environments)


def packed(service: LayerService, upper: Path, **asked: object) -> SnapshotInfo:
    request = SnapshotRequest(**{"name": "made@1", **asked})  # type: ignore[arg-type]
    spec = SandboxSpec(environment="base", layers=list(service.environments.get("base").layers))
    return asyncio.run(pack(service, Captured("c", upper, BASE), "s1", spec, "p", request, "p/builder"))


def make_upper(tmp_path: Path) -> Path:
    upper = tmp_path / "upper"
    upper.mkdir()
    os.chown(upper, BASE, BASE)
    return upper


def test_a_full_disk_leaves_neither_layer_nor_name(service: LayerService, store: Path, tmp_path: Path) -> None:
    upper = make_upper(tmp_path)
    noise = random.Random(1)
    for number in range(40):
        (upper / f"f{number}").write_bytes(noise.randbytes(MIB // 2))
    before = {each.digest for each in service.layers.all()}
    with pytest.raises(Unavailable, match="full") as caught:
        packed(service, upper)
    assert caught.value.infra
    assert {each.digest for each in service.layers.all()} == before
    assert list((store / "store" / "tmp").iterdir()) == []
    with pytest.raises(EnvironmentNotFound):
        service.environments.get("made@1", "p")
    with pytest.raises(NotFound):
        service.environments.find_layer("made@1", "p")
    for number in range(8, 40):
        (upper / f"f{number}").unlink()
    assert packed(service, upper).kept == 8, "with room it goes on"


def test_what_a_snapshot_refuses_leaves_nothing(service: LayerService, tmp_path: Path) -> None:
    upper = make_upper(tmp_path)
    (upper / "f").write_bytes(b"1")
    packed(service, upper)
    (upper / "f").write_bytes(b"2")
    before = {each.name for each in service.environments.list("p")}
    with pytest.raises(Conflict):
        packed(service, upper)
    assert {each.name for each in service.environments.list("p")} == before


def test_scrubbing_cannot_be_tricked(service: LayerService, tmp_path: Path) -> None:
    """By links, whiteouts, opaque directories and odd names: nothing outside is touched, residue goes, marks stay."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"host")
    upper = make_upper(tmp_path)
    for name in ("tmp", "root", "work", "var"):
        (upper / name).mkdir()
    (upper / "tmp" / "out").symlink_to(secret)  # a link where residue is deleted
    (upper / "var" / "log").symlink_to("../work")  # and one in the place of a directory whose content goes
    (upper / "root" / ".bash_history").write_bytes(b"the answer")
    os.link(upper / "root" / ".bash_history", upper / "work" / "notes")  # what was kept under another name is kept
    (upper / "root" / ".ash_history").symlink_to(secret / "key")
    (upper / "root" / ".python_history").mkdir()  # a directory of a file's name
    (upper / "root" / ".python_history" / "deep").write_bytes(b"residue")
    (upper / "work" / "a\n.x_history").write_bytes(b"not one")
    (upper / "work" / "\n").mkdir()
    (upper / "work" / "\n" / ".y_history").write_bytes(b"one")
    os.mknod(upper / "tmp" / "gone", stat.S_IFCHR, os.makedev(0, 0))  # what is deleted below stays deleted
    (upper / "work" / ".cache").mkdir()
    os.setxattr(upper / "work" / ".cache", "trusted.overlay.opaque", b"y")
    (upper / "work" / ".cache" / "c").write_bytes(b"residue")
    os.mkfifo(upper / "tmp" / "fifo")
    made = packed(service, upper)
    assert (secret / "key").read_bytes() == b"host"
    tree = service.layers.tree(made.layer)
    work, root = tree.children[b"work"], tree.children[b"root"]
    assert work.children[b"notes"].content.inline == b"the answer"
    assert set(root.children) == set()
    assert b".y_history" not in work.children.get(b"\n", tree).children
    assert b"a\n.x_history" in work.children
    assert set(tree.children[b"tmp"].children) == {b"gone"}
    assert work.children[b".cache"].is_opaque
    assert not work.children[b".cache"].children
    log = tree.children[b"var"].children[b"log"]
    assert (log.is_link, log.target) == (True, b"../work"), "a link is a link, whatever it leads to"
    assert b"host" not in service.layers.files(made.layer).image.read_bytes()
    gone = {path.rpartition("/")[2] for path in made.removed_paths}
    assert {"out", ".bash_history", ".ash_history", "deep", "fifo", ".y_history", "c"} == gone


def test_ids_and_marks_of_the_host_do_not_leak(service: LayerService, tmp_path: Path) -> None:
    """Owners below the range become root's, attributes that lead elsewhere go, device nodes stay what `nodev` makes of
    them."""
    upper = make_upper(tmp_path)
    (upper / "host").write_bytes(b"")  # root's outside
    os.setxattr(upper / "host", "trusted.overlay.redirect", b"/etc")
    (upper / "dir").mkdir()
    os.setxattr(upper / "dir", "trusted.overlay.origin", b"x" * 20)
    (upper / "mine").write_bytes(b"")
    os.chown(upper / "mine", BASE + 7, BASE + 8)
    tree = service.layers.tree(packed(service, upper).layer)
    assert (tree.children[b"host"].uid, tree.children[b"mine"].uid, tree.children[b"mine"].gid) == (0, 7, 8)
    assert not tree.children[b"host"].xattrs
    assert not tree.children[b"dir"].xattrs


@pytest.mark.parametrize("reader", ["p", "q"])
def test_who_may_start_from_it(service: LayerService, tmp_path: Path, reader: str) -> None:
    """A grader's snapshot is its project's alone: to others, and their digests, it doesn't exist."""
    upper = make_upper(tmp_path)
    (upper / "answer").write_bytes(b"42")
    made = packed(service, upper)
    if reader == "p":
        assert service.environments.get("made@1", "p").layers[0] == made.layer
        return
    for reference in ("made@1", made.layer):
        with pytest.raises(NotFound):
            service.environments.find_layer(reference, reader)
        with pytest.raises(NotFound):
            service.environments.resolve(SandboxSpec(environment="base", layers=[reference]), reader)
    with pytest.raises(EnvironmentNotFound):
        service.environments.resolve(SandboxSpec(environment="made@1"), reader)

"""Layers and environments: made, mounted, id-mapped and found again on the real kernel."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.errors import EnvironmentNotFound, InvalidRequest, NotFound, PlatformError, Unsupported
from dsec.kernel import loop, mounts
from dsec.store import build
from dsec.store.environments import DEFAULT, RUNTIME, EnvironmentStore
from dsec.store.layers import Entry, LayerMounts, LayerStore

pytestmark = pytest.mark.root


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "state"
    path.mkdir()
    yield path
    mounts.unmount_under(tmp_path)
    for image in path.rglob("*.erofs"):
        assert loop.attached(image) == []


def tree(top: Path, seed: int) -> Path:
    """The same files, made in another order."""
    names = [f"d{n % 5}/f{n}" for n in range(60)]
    random.Random(seed).shuffle(names)
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name * 20)
    (top / "link").symlink_to("d0/f0")
    os.link(top / "d0/f0", top / "hard")
    for directory, _, files in os.walk(top, topdown=False):
        for name in (*files, ""):
            os.utime(Path(directory, name), (0, 1_600_000_000 + len(name)), follow_symlinks=False)
    return top


def test_the_same_tree_is_the_same_layer_and_keeps_its_times(state: Path, tmp_path: Path) -> None:
    store = LayerStore(state)
    first = store.add(tree(tmp_path / "a", 1), "directory")
    second = store.add(tree(tmp_path / "b", 2), "directory")
    assert first == second
    assert [meta.digest for meta in store.all()] == [first.digest]
    (tmp_path / "b" / "d0" / "f0").write_text("other")
    assert store.add(tmp_path / "b", "directory").digest != first.digest
    layers = LayerMounts(tmp_path / "run", store)
    layers.open()
    at = layers.path(first.digest)
    assert (at / "d1" / "f1").stat().st_mtime == 1_600_000_002
    assert (at / "d1" / "f1").read_text() == "d1/f1" * 20
    assert (at / "hard").stat().st_ino == (at / "d0" / "f0").stat().st_ino
    assert list((state / "store" / "tmp").iterdir()) == []


def test_layers_are_mounted_once_and_cloned_once_a_range(state: Path, tmp_path: Path) -> None:
    store = LayerStore(state)
    digest = store.add_tree(
        {"etc/x": Entry(b"1", uid=5), "s": Entry(target="etc/x"), "e": Entry(mode=0o1777)}, "directory"
    ).digest
    layers = LayerMounts(tmp_path / "run", store)
    layers.open()
    plain, clone, other = (layers.path(digest, base) for base in (0, 300_000, 400_000))
    assert [layers.path(digest, base) for base in (0, 300_000, 400_000)] == [plain, clone, other]
    assert len(mounts.mounted(layers.root)) == 3
    assert (clone / "etc/x").stat().st_uid == 300_005
    assert (other / "etc/x").stat().st_uid == 400_005
    assert (plain / "etc/x").stat().st_uid == 5
    assert (plain / "e").stat().st_mode & 0o7777 == 0o1777
    again = LayerMounts(tmp_path / "run", store)
    again.open()
    assert again.path(digest, 300_000) == clone
    assert len(mounts.mounted(layers.root)) == 3, "a restarted server goes on with what is mounted"
    again.unmount_all()
    assert mounts.mounted(layers.root) == []
    assert list(layers.root.iterdir()) == []
    again.unmount_all()
    with pytest.raises(NotFound):
        again.path("0" * 64)
    with pytest.raises(NotFound):
        again.path("../../etc")


def test_a_small_layer_is_read_whole_when_it_is_mounted(state: Path, tmp_path: Path) -> None:
    store = LayerStore(state)
    digest = store.add_tree({"a/b": Entry(b"x" * 5000), "c": Entry(target="a/b"), "d": Entry(b"y")}, "directory").digest
    assert store.meta(digest).hot == ["/"]
    layers = LayerMounts(tmp_path / "run", store)
    layers.open()
    layers.path(digest, 300_000)
    layers.settle()
    assert layers.warm(digest) == 5001
    assert layers.warm("0" * 64) == 0  # it went before the thread had its turn
    layers.path(store.add_tree({"big": Entry(b"z" * (8 << 20))}, "directory").digest)
    layers.unmount_all()  # while it reads
    assert mounts.mounted(layers.root) == []


def test_an_overlay_over_clones_gives_files_to_root_inside(state: Path, tmp_path: Path) -> None:
    store = LayerStore(state)
    digest = store.add_tree({"f": Entry(b"old")}, "directory").digest
    layers = LayerMounts(tmp_path / "run", store)
    layers.open()
    lower = layers.path(digest, 300_000)
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "none", "-o", options, tmp_path / "merged"], check=True)
    assert (tmp_path / "merged" / "f").stat().st_uid == 300_000
    (tmp_path / "merged" / "f").write_bytes(b"new")
    assert (tmp_path / "upper" / "f").stat().st_uid == 300_000
    mounts.unmount(tmp_path / "merged")


def test_environments_are_durable_and_have_the_mount_points_below(state: Path, tmp_path: Path) -> None:
    store = EnvironmentStore(state)
    digest = store.layers.add_tree({"app": Entry(b"#!")}, "directory").digest
    made = store.put("team/app@1.0", (digest,), env={"A": "1"}, user="nobody", workdir="/w", description="d")
    assert made.layers == (digest, store.runtime())
    again = EnvironmentStore(state)
    assert again.get("team/app@1.0") == made
    assert again.list() == [made]
    assert again.runtime() == store.runtime()
    long = "x" + "/" * 199
    assert again.put(long, (digest,)).name == long
    assert EnvironmentStore(state).get(long).layers == made.layers
    later = store.put("made/meanwhile", (digest,))
    assert again.get("made/meanwhile") == later, "another process may make one"
    again.remove("made/meanwhile")
    layers = LayerMounts(tmp_path / "run", store.layers)
    layers.open()
    bottom = layers.path(made.layers[-1])
    assert {path.name for path in bottom.iterdir()} >= {"dev", "proc", "sys", "run", "tmp", "root", "etc"}
    assert (bottom / "run/shm").stat().st_mode & 0o7777 == 0o1777
    assert (bottom / "etc/resolv.conf").read_text().endswith("\nnameserver 127.0.0.1\n")
    assert all((bottom / name).exists() for name in RUNTIME)
    again.remove("team/app@1.0")
    again.remove("team/app@1.0")
    again.remove(long)
    assert EnvironmentStore(state).list() == []
    assert digest in again.unused_layers()


def test_bad_environments_are_refused(state: Path) -> None:
    store = EnvironmentStore(state)
    for name in ("", "-x", "a b", "a\n", "x" * 201, "../up", "a\0"):
        with pytest.raises(InvalidRequest):
            store.put(name, ())
    with pytest.raises(NotFound):
        store.put("ok", ("0" * 64,))
    with pytest.raises(EnvironmentNotFound, match="none yet"):
        store.get("absent")
    assert store.list() == []


def test_a_directory_becomes_a_layer_at_a_path(state: Path, tmp_path: Path) -> None:
    store = LayerStore(state)
    source = tree(tmp_path / "src", 1)
    os.chown(source / "d0" / "f5", 77, 78)
    os.setxattr(source / "d0" / "f5", "trusted.overlay.opaque", b"y")
    owned = build.build_directory_layer(store, source, at="/work/project")
    kept = build.build_directory_layer(store, source, at="work/project", owner=None)
    assert owned.digest == build.build_directory_layer(store, source, at="/work/project").digest != kept.digest
    layers = LayerMounts(tmp_path / "run", store)
    layers.open()
    file = layers.path(owned.digest) / "work/project/d0/f5"
    assert file.read_text() == "d0/f5" * 20
    assert (file.stat().st_uid, file.stat().st_gid) == (0, 0)
    assert os.listxattr(file) == []
    stat = (layers.path(kept.digest) / "work/project/d0/f5").stat()
    assert (stat.st_uid, stat.st_gid, stat.st_mtime) == (77, 78, 1_600_000_002)
    with pytest.raises(ValueError, match="not a path"):
        build.build_directory_layer(store, source, at="/a/../b")
    for bad in ("a/../../b", "..", "/"):
        with pytest.raises(ValueError, match="not a path"):
            build.build_directory_layer(store, {bad: Entry(b"")})
    with pytest.raises(OSError, match="No such file"):
        build.build_directory_layer(store, tmp_path / "absent")
    assert list((state / "store" / "tmp").iterdir()) == []


def test_a_base_that_cannot_be_built_says_why_and_leaves_nothing(state: Path) -> None:
    store = LayerStore(state)
    said: list[str] = []
    with pytest.raises(PlatformError, match="mmdebstrap failed"):
        build.build_debian_layer(store, suite="no-such-suite", progress=said.append)
    assert said
    assert store.all() == []
    assert list((state / "store" / "tmp").iterdir()) == []
    assert mounts.mounted(state) == []


def test_without_mmdebstrap_it_is_said_what_to_install(
    state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="mmdebstrap is missing") as raised:
        build.build_debian_layer(LayerStore(state))
    assert "apt-get install mmdebstrap" in raised.value.remedy


def test_a_base_of_the_same_packages_is_the_same_layer(state: Path, tmp_path: Path) -> None:
    """Whenever it was built: what a build writes itself has the time of the youngest file of a package."""
    made = []
    day = 86_400 * 10**9
    for began_ns in (30_000 * day, 30_007 * day + 5):
        top = tree(tmp_path / str(began_ns), 1)
        (top / "etc").mkdir()
        (top / "etc/shadow").write_text(f"root:*:{began_ns // day}:0:99999:7:::\nold:*:9:0:::::\n")
        (top / "etc/shadow").chmod(0o640)
        for written in (top / "link", top / "etc/shadow", top / "etc", top):
            os.utime(written, ns=(0, began_ns + 10**9), follow_symlinks=False)
        build.settle(top, began_ns)
        made.append(LayerStore(state).add(top, "base").digest)
        youngest = (top / "hard").stat().st_mtime_ns // day
        assert (top / "etc/shadow").read_text() == f"root:*:{youngest}:0:99999:7:::\nold:*:9:0:::::\n"
    assert made[0] == made[1]


@pytest.mark.slow
def test_the_default_environment_is_debian_with_python_and_git(debian_store: Path, tmp_path: Path) -> None:
    """The one that `build` made for all tests."""
    store = EnvironmentStore(debian_store.parent)
    made = store.ensure_default(lambda _: pytest.fail("it is built once"))
    assert made.name == DEFAULT
    layers = LayerMounts(tmp_path / "run", store.layers)
    layers.open()
    base, runtime = (layers.path(digest) for digest in made.layers)
    layers.settle()
    assert layers.warm(made.layers[0]) > 1 << 20
    assert (base / "etc/resolv.conf").read_bytes() == b"" if (base / "etc/resolv.conf").exists() else True
    assert not any((base / "etc/apt/sources.list.d").glob("*"))
    merged = tmp_path / "merged"
    merged.mkdir()
    subprocess.run(["mount", "-t", "overlay", "none", "-o", f"lowerdir={base}:{runtime}", merged], check=True)
    try:
        script = "python3 -m pip --version && git --version && python3 -m venv --help >/dev/null && bash -c 'echo ok'"
        done = subprocess.run(["chroot", merged, "/bin/sh", "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("ok\n")
        fresh = "import importlib.util as u, os, json; c = u.cache_from_source(json.__file__); print(os.path.exists(c))"
        done = subprocess.run(
            ["chroot", merged, "python3", "-v", "-c", fresh], capture_output=True, text=True, check=True
        )
        assert done.stdout == "True\n"
        assert "matches" in done.stderr
        stale = re.findall(r"code object from '/usr/lib/python3[^']*\.py'", done.stderr)
        assert not stale, "compiled modules are up to date"
    finally:
        mounts.unmount(merged)
        layers.unmount_all()
        layers.unmount_all()

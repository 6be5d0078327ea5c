"""What COPY and ADD make of files, what is left out of a context, and what a step's memory depends on: without a
sandbox."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import lzma
import random
import stat
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import zstandard
from image_kit import tar

from dsec.builder.copying import Copy, Entries, Owner, find_sources, owner_of, text_source
from dsec.builder.files import Files, Layers, leave_out, load_archive
from dsec.builder.memory import NOTHING, Memory, key_of
from dsec.errors import InvalidRequest
from dsec.recipe.ignore import Ignored
from dsec.store.archive import place_entries, read_layer
from dsec.store.data import LayerData
from dsec.store.directory import DirectoryReader
from dsec.store.environments import EnvironmentStore
from dsec.store.layers import LayerStore
from dsec.store.service import LayerService
from dsec.store.tree import Node, directory, walk

FORMS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": lambda data: bz2.compress(data, 1),
    "xz": lzma.compress,
    "zstd": zstandard.compress,
}
IMAGE = (
    ("etc/passwd", b"root:x:0:0::/root:/bin/sh\nworker:x:70:71::/:\n"),
    ("etc/group", b"root:x:0:\nstaff:x:50:\n"),
    ("opt/", {"type": b"5", "mode": 0o700, "uid": 9}),
    ("link", "opt"),
    ("file", b"below"),
)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    (tmp_path / "state" / "store").mkdir(parents=True)
    return LayerStore(tmp_path / "state")


@pytest.fixture
def image(store: LayerStore) -> Iterator[Layers]:
    layers = Layers(store)
    layers.push(add(store, tar(*IMAGE)))
    yield layers
    layers.close()


def add(store: LayerStore, archive: bytes) -> str:
    with store.making() as maker:
        return maker.finish(read_layer(BytesIO(archive).read, maker.data), "base").digest


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Files]:
    inner = tar(
        ("in/", None), ("in/side", b"packed"), ("in/hard", {"type": b"1", "linkname": "in/side"}), ("up", "../x")
    )
    entries: list[tuple[str, Any]] = [
        ("src/", {"type": b"5", "mode": 0o750, "uid": 5}),
        ("src/a.txt", {"data": b"a", "uid": 5, "gid": 6}),
        ("src/deep/b.txt", b"b" * 5000),
        ("src/to-a", "a.txt"),
        ("c.md", {"data": b"c", "mode": 0o755}),
        ("d.md", b"d"),
        ("to-src", "src"),
        ("out", "../../etc/passwd"),
        ("plain.tar", inner),
        ("packed.tgz", gzip.compress(inner, mtime=0)),
        ("packed.bz2", bz2.compress(inner)),
        ("packed.xz", lzma.compress(inner)),
        ("packed.zst", zstandard.compress(inner)),
        ("text.gz", gzip.compress(b"no archive", mtime=0)),
    ]
    (tmp_path / "context.tar").write_bytes(tar(*entries))
    with (tmp_path / "data").open("x+b") as data:
        yield load_archive(tmp_path / "context.tar", data)


def copied(store: LayerStore, image: Layers, files: Files, names: list[str], dest: str, **more: Any) -> dict[str, str]:
    """What a copy shows, as `mode uid:gid content` by path."""
    into = dest.endswith("/")
    copy = Copy(files, find_sources(files, names), dest.rstrip("/").encode(), into, **{"owner": Owner(0, 0), **more})
    with store.making() as maker:
        layer = maker.finish(
            place_entries(Entries([copy], image.files), maker.data, image.files.top), "workspace"
        ).digest
    shown = Layers(store)
    shown.push(layer)
    found = {}
    for path, node in walk(shown.files.top):
        what = node.target.decode() if node.is_link else "/"
        if node.is_file:
            what = shown.files.content(node, 100_000).decode(errors="replace")[:10]
        found[path.decode()] = f"{stat.S_IMODE(node.mode):o} {node.uid}:{node.gid} {what}"
    shown.close()
    del found[""]
    return found


def test_a_directorys_contents_are_copied(store: LayerStore, image: Layers, context: Files) -> None:
    assert copied(store, image, context, ["src"], "/new/place") == {
        "new": "755 0:0 /",
        "new/place": "750 0:0 /",
        "new/place/a.txt": "644 0:0 a",
        "new/place/deep": "755 0:0 /",
        "new/place/deep/b.txt": "644 0:0 bbbbbbbbbb",
        "new/place/to-a": "777 0:0 a.txt",
    }


def test_what_is_there_stays_and_links_below_are_followed(store: LayerStore, image: Layers, context: Files) -> None:
    found = copied(store, image, context, ["to-src"], "/link", exclude=["**/*.txt"])
    assert found == {"opt": "700 9:0 /", "opt/deep": "755 0:0 /", "opt/to-a": "777 0:0 a.txt"}


def test_files_by_name_and_by_pattern(store: LayerStore, image: Layers, context: Files) -> None:
    assert copied(store, image, context, ["c.md"], "/as") == {"as": "755 0:0 c"}
    assert copied(store, image, context, ["c.md"], "/opt") == {"opt": "700 9:0 /", "opt/c.md": "755 0:0 c"}
    found = copied(store, image, context, ["*.md", "src/a.tx?"], "/opt/", owner=Owner(7, 8), mode=0o640)
    assert found == {
        "opt": "700 9:0 /",
        "opt/a.txt": "640 7:8 a",
        "opt/c.md": "640 7:8 c",
        "opt/d.md": "640 7:8 d",
    }
    assert copied(store, image, context, ["src/a.txt"], "/own", owner=None) == {"own": "644 5:6 a"}
    for source, onto in (
        ("src", "/file"),
        ("src", "/file/x"),
        ("c.md", "/file/"),
        ("c.md", "/file/x/y"),
        ("c.md", "/file/x"),
    ):
        with pytest.raises(InvalidRequest, match="'/file' is to be a directory"):
            copied(store, image, context, [source], onto)
    assert copied(store, image, context, ["c.md"], "/file") == {"file": "755 0:0 c"}


@pytest.mark.parametrize("name", ["plain.tar", "packed.tgz", "packed.bz2", "packed.xz", "packed.zst"])
def test_archives_are_unpacked_by_add(store: LayerStore, image: Layers, context: Files, name: str) -> None:
    assert copied(store, image, context, [name], "/opt/x/", unpack=True) == {
        "opt": "700 9:0 /",
        "opt/x": "755 0:0 /",
        "opt/x/in": "755 0:0 /",
        "opt/x/in/side": "644 0:0 packed",
        "opt/x/in/hard": "644 0:0 packed",
        "opt/x/up": "777 0:0 ../x",
    }
    assert list(copied(store, image, context, [name], "/x/")) == ["x", f"x/{name}"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("harm", ["cut off", "damaged"])
def test_broken_archives_are_the_callers_fault(store: LayerStore, tmp_path: Path, form: str, harm: str) -> None:
    """In ADD, as a build's context, as a layer."""
    whole = FORMS[form](tar(("a", b"1"), *((f"f{n}", random.Random(n).randbytes(9000)) for n in range(40))))
    half = len(whole) // 2
    bad = whole[:half] if harm == "cut off" else whole[:half] + bytes(2000) + whole[half + 2000 :]
    (tmp_path / "bad").write_bytes(bad)
    with (
        (tmp_path / "data").open("x+b") as data,
        pytest.raises(InvalidRequest, match=r"the context|the archive|early|damaged"),
    ):
        load_archive(tmp_path / "bad", data)
    (tmp_path / "context").write_bytes(tar(("bad", bad)))
    with (tmp_path / "more").open("x+b") as data:
        files = load_archive(tmp_path / "context", data)
        copy = Copy(files, find_sources(files, ["bad"]), b"/", into=True, unpack=True)
        with store.making() as maker, pytest.raises(InvalidRequest, match=r"the archive|early|damaged"):
            place_entries(Entries([copy], Files(directory(), lambda _: None)), maker.data, directory())
    with pytest.raises(InvalidRequest, match=r"the archive|early|damaged"):
        asyncio.run(
            LayerService(EnvironmentStore(tmp_path / "state", store)).build_archive(
                tmp_path / "bad", "base", lambda _: None
            )
        )


def test_what_is_no_archive_is_copied_by_add(store: LayerStore, image: Layers, context: Files) -> None:
    assert list(copied(store, image, context, ["text.gz", "c.md"], "/x/", unpack=True)) == ["x", "x/c.md", "x/text.gz"]


@pytest.mark.parametrize("name", ["absent", "../c.md", "src/../../c.md", "out", "*.none", "c.md/x"])
def test_what_can_not_be_copied(context: Files, name: str) -> None:
    with pytest.raises(ValueError, match=r"no |leads"):
        find_sources(context, [name])


def test_owners(image: Layers) -> None:
    for text, owner in (
        ("worker", (70, 70)),
        ("worker:staff", (70, 50)),
        ("5", (5, 5)),
        ("5:staff", (5, 50)),
        ("root", (0, 0)),
    ):
        assert owner_of(text, image.files) == owner
    for text in ("stranger", "worker:nobody", "", "4294967295"):
        with pytest.raises(ValueError, match=r"no |beyond"):
            owner_of(text, image.files)


def test_what_is_left_out(context: Files) -> None:
    leave_out(context, Ignored(["src", "!src/deep/b.txt", "*.md", "packed.*"]))
    assert [path.decode() for path, _ in walk(context.top)] == [
        "", "out", "plain.tar", "src", "src/deep", "src/deep/b.txt", "text.gz", "to-src",
    ]  # fmt: skip


def test_digests_are_of_content_not_of_time(tmp_path: Path) -> None:
    found = []
    variants: list[tuple[str, Any]] = [
        ("f", b"x"),
        ("f", {"data": b"x", "mtime": 5}),
        ("f", b"y"),
        ("g", b"x"),
        ("f", {"data": b"x", "mode": 0o600}),
        ("f", "x"),
    ]
    for number, entry in enumerate(variants):
        (tmp_path / f"{number}.tar").write_bytes(tar(entry))
        with (tmp_path / f"{number}").open("x+b") as data:
            files = load_archive(tmp_path / f"{number}.tar", data)
            found.append(files.digest(files.top))
    assert found[0] == found[1]
    assert len(set(found)) == 5
    one, two = (text_source("f", text) for text in ("x", "y"))
    assert one[0].digest(one[1].node) != two[0].digest(two[1].node)


def test_memory(store: LayerStore) -> None:
    memory = Memory(store)
    base = ["p", "run", ["l1"], ["sh", "-c", "x"], {"A": "1", "B": "2"}, "root", "/", {}]
    keys = {key_of(*base)}
    assert key_of(*base[:4], {"B": "2", "A": "1"}, *base[5:]) in keys
    for place, other in enumerate(
        ["q", "copy", ["l1", "l2"], ["sh", "-c", "y"], {"A": "1"}, "user", "/w", {"pypi": True}]
    ):
        keys.add(key_of(*base[:place], other, *base[place + 1 :]))
    assert len(keys) == 9
    layer, key = add(store, tar(("f", b"x"))), key_of("x")
    assert memory.recall(key) is None
    memory.keep(key, layer)
    assert memory.recall(key) == layer
    memory.keep(key_of("y"), NOTHING)
    store.remove(layer)
    memory.tidy()
    assert memory.recall(key) is None
    assert memory.recall(key_of("y")) == NOTHING


def test_a_path_leads_where_links_of_the_tree_lead() -> None:
    top = directory()
    top.children[b"usr"] = directory()
    top.children[b"lib"] = Node(stat.S_IFLNK | 0o777, target=b"usr/lib")
    top.children[b"up"] = Node(stat.S_IFLNK | 0o777, target=b"/../x")
    top.children[b"circle"] = Node(stat.S_IFLNK | 0o777, target=b"circle")
    files = Files(top, lambda _: None)
    assert files.real(b"/lib/./new//deep/") == b"usr/lib/new/deep"
    assert files.real(b"/usr/absent/../other") == b"usr/other"
    assert files.real(b"/") == b""
    for path in (b"/up", b"/..", b"/circle/x"):
        with pytest.raises(ValueError, match=r"leads out|circle"):
            files.real(path)


def test_what_is_read_below_a_path_is_never_behind_a_link(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "secret").write_text("secret")
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "f").write_text("ours")
    (top / "a" / "g").write_text("g")
    (top / "way").symlink_to(outside)
    (top / "a" / "back").symlink_to(outside / "b")
    with open(tmp_path / "data", "x+b") as file:
        reader = DirectoryReader(LayerData(file))
        for path in (b"way/b", b"a/back", b"a/g", b"a/g/x", b"absent/b", b".."):
            assert reader.read_below(top, path) is None
        below = reader.read_below(top, b"a/b")
        assert below is not None
        assert list(below.children) == [b"f"]
        rest = reader.read(top, without={b"a/b", b"way"})
        assert [path for path, _ in walk(rest)] == [b"", b"a", b"a/back", b"a/g"]

"""Layers against the kernel: every kind of file comes back as it was; the same input is the same layer."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from dsec.errors import InvalidRequest, LayerCorrupt, TooLarge
from dsec.kernel import mounts
from dsec.store.data import Budget
from dsec.store.directory import DirectoryReader
from dsec.store.erofs import read_image, write_image
from dsec.store.format import BLOCK, CHUNK_BYTES, Cutter, check_chunk, decode_manifest
from dsec.store.layers import LayerMounts, LayerStore
from dsec.store.tree import HOLE, OPAQUE, Node, directory, overlay, walk, whiteout

pytestmark = pytest.mark.root

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


def acl(user: int) -> bytes:
    """An access ACL that lets one user read."""
    entries = ((1, 6, 0xFFFFFFFF), (2, 4, user), (4, 4, 0xFFFFFFFF), (16, 6, 0xFFFFFFFF), (32, 4, 0xFFFFFFFF))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    (tmp_path / "state").mkdir()
    yield LayerStore(tmp_path / "state")
    mounts.unmount_under(tmp_path)


def odd_tree(top: Path) -> Path:
    """One of everything."""
    noise = random.Random(7)
    top.mkdir()
    for size in (0, 1, 1023, 1024, 1025, 4096, 4097, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1, 3_000_001):
        (top / f"size{size}").write_bytes(noise.randbytes(size))
    os.link(top / "size4097", top / "another name")
    (top / "many").mkdir(mode=0o1777)
    for number in range(600):
        (top / "many" / f"{number:04}-{'n' * (number % 90)}").write_bytes(b"%d" % number)
    (top / ("ü" * 127)).write_bytes(b"long name")
    (top / os.fsdecode(b"not\xff utf8\n")).write_bytes(b"x" * 5000)
    (top / "short").symlink_to("size1")
    (top / "long").symlink_to("/" + "t/" * 2040)
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / "sock"))
    os.mknod(top / "device", stat.S_IFCHR | 0o640, os.makedev(4095, 1_000_000))
    os.mknod(top / "disk", stat.S_IFBLK | 0o600, os.makedev(8, 1))
    os.mknod(top / "gone", stat.S_IFCHR, os.makedev(0, 0))
    (top / "opaque").mkdir()
    os.setxattr(top / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(top / "size1", "user.big", noise.randbytes(3000))
    os.setxattr(top / "size1", "user.empty", b"")
    os.setxattr(top / "size70000", "security.capability", CAPABILITY)
    os.setxattr(top / "size1025", "system.posix_acl_access", acl(1000))
    with open(top / "sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(20 << 20)
        file.write(noise.randbytes(100_000))
    with open(top / "only a hole", "wb") as file:
        file.truncate(5 << 20)
    deep = top
    for level in range(60):
        deep /= f"level{level}"
    deep.mkdir(parents=True)
    (deep / "bottom").write_bytes(b"b")
    os.chown(top / "size1023", 70_000, 4_000_000_000)
    (top / "size1024").chmod(0o6751)
    for number, (folder, names, files) in enumerate(os.walk(top, topdown=False)):
        for name in (*files, *names):
            os.utime(
                Path(folder, name), ns=(0, -1 if name == "size0" else number * 10**9 + len(name)), follow_symlinks=False
            )
    os.utime(top, ns=(0, 77))
    return top


def described(top: Path) -> dict[bytes, tuple[object, ...]]:
    """Everything that stat, xattrs and content say, with hard links by their first name."""
    found: dict[bytes, tuple[object, ...]] = {}
    first: dict[int, bytes] = {}
    for folder, names, files in os.walk(os.fsencode(top)):
        for name in sorted((*names, *files, b".")):
            path = folder + b"/" + name
            at = os.lstat(path)
            content = b""
            if stat.S_ISREG(at.st_mode):
                content = sha256(Path(os.fsdecode(path)).read_bytes()).digest()
            elif stat.S_ISLNK(at.st_mode):
                content = os.readlink(path)  # noqa: PTH115 (bytes)
            xattrs = {
                each: os.getxattr(path, each, follow_symlinks=False)
                for each in os.listxattr(path, follow_symlinks=False)
            }
            relative = os.path.relpath(path, os.fsencode(top))
            same = first.setdefault(at.st_ino, relative) if not stat.S_ISDIR(at.st_mode) else relative
            size = 0 if stat.S_ISDIR(at.st_mode) else at.st_size
            found[relative] = (
                at.st_mode, at.st_uid, at.st_gid, at.st_mtime_ns, size, at.st_nlink, at.st_rdev, content, xattrs, same,
            )  # fmt: skip
    return found


def test_every_kind_of_file_comes_back(store: LayerStore, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    meta = store.add(source, "directory")
    assert meta.size_bytes < 9 << 20, "holes take no room"
    layers = LayerMounts(tmp_path / "run", store)
    layers.open()
    there, here = described(source), described(layers.path(meta.digest))
    assert here.keys() == there.keys()
    for name in there:
        assert here[name] == there[name], name


def test_hot_files_lead_out_of_no_layer(store: LayerStore, tmp_path: Path) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside"
    source.mkdir()
    outside.write_bytes(bytes(50_000))
    (source / "hot").write_bytes(bytes(range(200)) * 50)
    (source / "link").symlink_to(outside)
    os.mkfifo(source / "fifo")
    hot = ["hot", "fifo", "link", str(outside), "../" * 30 + str(outside), "."]
    meta = store.add(source, "directory", hot=hot)
    layers = LayerMounts(tmp_path / "run", store)
    layers.open()
    layers.path(meta.digest)
    assert layers.warm(meta.digest) == 10_000


def test_the_image_is_read_back_as_it_was_written(store: LayerStore, tmp_path: Path) -> None:
    meta = store.add(odd_tree(tmp_path / "source"), "directory")
    manifest = store.manifest(meta.digest)
    image = store.files(meta.digest).image.read_bytes()
    top = read_image(image)
    assert write_image(top, manifest.data_bytes) == image
    assert manifest.files == sum(1 for _ in walk(top))
    data = (store.root / meta.digest / "data").read_bytes()
    for chunk in manifest.chunk_list():
        check_chunk(data[chunk.offset : chunk.offset + chunk.size], chunk)
    for cut in (0, 1100, 1300, 5000, len(image) // 2):
        with pytest.raises(LayerCorrupt):
            read_image(image[:cut])
    for seed in range(40):  # nothing but `LayerCorrupt`, whatever the damage
        noise = random.Random(seed)
        bad = bytearray(image[: 64 << 10])
        for _ in range(8):
            bad[noise.randrange(1024, len(bad))] = noise.randrange(256)
        with contextlib.suppress(LayerCorrupt):
            read_image(bytes(bad))


def test_the_same_input_is_the_same_layer_wherever_it_is_made(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found.append(LayerStore(tmp_path / name).add(odd_tree(tmp_path / name / "tree"), "directory").digest)
        raw = (tmp_path / name / "store" / "layers" / found[-1] / "manifest.json").read_bytes()
        assert decode_manifest(raw, found[-1]).digest == found[-1]
        with pytest.raises(LayerCorrupt):
            decode_manifest(raw + b" ", found[-1])
    assert found[0] == found[1]


def test_layers_that_share_files_share_chunks(store: LayerStore, tmp_path: Path) -> None:
    noise = random.Random(3)
    tops = [tmp_path / "one", tmp_path / "two"]
    for folder in range(20):
        for number in range(60):
            data = noise.randbytes(noise.randrange(2000, 30_000))
            for top in tops:
                (top / f"d{folder}").mkdir(parents=True, exist_ok=True)
                (top / f"d{folder}" / f"f{number}").write_bytes(data)
    (tops[1] / "d3" / "f7").write_bytes(noise.randbytes(9000))
    (tops[1] / "d11" / "new").write_bytes(noise.randbytes(90_000))
    sets = [{c.digest for c in store.manifest(store.add(top, "directory").digest).chunk_list()} for top in tops]
    assert len(sets[0] & sets[1]) > 0.85 * len(sets[0])


def test_contents_that_look_alike_are_told_apart_and_equal_ones_kept_once(store: LayerStore, tmp_path: Path) -> None:
    base = bytearray(random.Random(3).randbytes(200_000))
    large = bytearray(random.Random(4).randbytes(700_000))
    odd, other = bytes(base), bytes(large)
    base[20_000] ^= 1  # where no sample is taken
    large[20_000] ^= 1
    holes = bytes(1 << 18) + other[: 1 << 18] + bytes(1 << 18)
    moved = bytes(2 << 18) + other[: 1 << 18]
    contents = [odd, bytes(base), odd, bytes(base), other, bytes(large), other, holes, moved, holes]
    for number, content in enumerate(contents):
        (tmp_path / "top" / f"d{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / f"d{number % 3}" / f"f{number}").write_bytes(content)
    meta = store.add(tmp_path / "top", "directory")
    manifest, files = store.manifest(meta.digest), store.files(meta.digest)
    assert files.data is not None
    data = files.data.read_bytes()
    assert len(data) < 2 * 204_800 + 2 * 704_512 + 4 * (1 << 18), "equal ones are kept once"
    for chunk in manifest.chunk_list():
        check_chunk(data[chunk.offset : chunk.offset + chunk.size], chunk)
    for path, node in walk(store.tree(meta.digest)):
        if node.is_file:
            size = 1 << node.content.piece_bits
            pieces = [bytes(size) if b == HOLE else data[b * BLOCK : b * BLOCK + size] for b in node.content.blocks]
            assert b"".join(pieces)[: node.content.size] == contents[int(path.rpartition(b"f")[2])], path


def test_cuts_are_blocks_and_bounded() -> None:
    noise = random.Random(1)
    cutter = Cutter()
    sizes = [BLOCK * noise.randrange(1, 400) for _ in range(2000)]
    for size in sizes:
        cutter.add(size, noise.randbytes(32))
    cuts = cutter.finish()
    assert sum(cuts) == sum(sizes)
    assert all(0 < cut <= CHUNK_BYTES and cut % BLOCK == 0 for cut in cuts)


def test_an_upper_directory_becomes_a_layer(store: LayerStore, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    os.chown(upper, 500_000, 500_000)
    (upper / "f").write_bytes(b"1")
    os.chown(upper / "f", 500_005, 500_006)
    os.setxattr(upper / "f", "security.capability", bytes.fromhex("010000030020000000000000000000000000000020a10700"))
    os.setxattr(upper / "f", "system.posix_acl_access", acl(501_000))
    (upper / "d").mkdir()
    for name, value in (("opaque", b"y"), ("origin", b"x" * 20), ("redirect", b"/etc"), ("impure", b"y")):
        os.setxattr(upper / "d", f"trusted.overlay.{name}", value)
    os.setxattr(upper / "d", "user.overlay.opaque", b"y")
    os.mknod(upper / "gone", stat.S_IFCHR, os.makedev(0, 0))
    with store.making() as maker:
        top = DirectoryReader(maker.data, id_base=500_000).read(upper)
        digest = maker.finish(top, "snapshot").digest
    tree = store.tree(digest)
    assert (tree.uid, tree.children[b"f"].uid, tree.children[b"f"].gid) == (0, 5, 6)
    assert tree.children[b"f"].xattrs[b"security.capability"] == bytes.fromhex(
        "0100000200200000000000000000000000000000"
    )
    assert tree.children[b"f"].xattrs[b"system.posix_acl_access"][16:20] == (1000).to_bytes(4, "little")
    assert tree.children[b"d"].xattrs == {OPAQUE: b"y"}
    assert tree.children[b"gone"].is_whiteout


def test_a_directory_that_is_swapped_for_a_link_leads_nowhere(store: LayerStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"host")
    (tmp_path / "top" / "a").mkdir(parents=True)
    (tmp_path / "top" / "f").write_bytes(b"mine")
    (tmp_path / "top" / "z").mkdir()
    real = os.stat

    def swap(name: str, **options: object) -> os.stat_result:
        found = real(name, **options)  # type: ignore[arg-type]
        if name in ("z", "f"):
            path = tmp_path / "top" / name
            path.rmdir() if path.is_dir() else path.unlink()
            path.symlink_to(secret / ("key" if name == "f" else ""))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", swap)
        with pytest.raises(OSError):  # noqa: PT011 (ELOOP or ENOTDIR)
            store.add(tmp_path / "top", "directory")
    assert store.all() == []


@pytest.mark.parametrize(
    ("limit", "what"),
    [("data_bytes", "content"), ("file_bytes", "holes"), ("entries", "entries"), ("metadata_bytes", "names")],
)
def test_a_layer_has_a_budget(store: LayerStore, tmp_path: Path, limit: str, what: str) -> None:
    (tmp_path / "t").mkdir()
    for number in range(50):
        (tmp_path / "t" / f"file{number}").write_bytes(b"%d" % number * 2000)
    with pytest.raises(TooLarge, match=what), store.making(Budget(**{limit: 49})) as maker:
        DirectoryReader(maker.data).read(tmp_path / "t")
    assert store.all() == []
    assert list((store.root.parent / "tmp").iterdir()) == []


def test_what_erofs_cannot_hold_is_refused() -> None:
    top = directory()
    top.xattrs = {b"system.nfs4_acl": b""}
    with pytest.raises(InvalidRequest, match="attribute"):
        write_image(top, 0)
    top.xattrs = {b"user.a": bytes(33 << 10)}
    with pytest.raises(InvalidRequest, match="attribute"):
        write_image(top, 0)


def test_two_trees_are_merged_as_overlayfs_shows_them() -> None:
    def leaf(text: bytes) -> Node:
        return Node(stat.S_IFLNK | 0o777, target=text)

    def tree(**names: Node) -> Node:
        top = directory()
        top.children = {name.encode(): node for name, node in names.items()}
        return top

    lower = tree(
        kept=leaf(b"1"), over=leaf(b"1"), gone=leaf(b"1"), dir=tree(a=leaf(b"1"), b=leaf(b"1")),
        wiped=tree(x=leaf(b"1")), back=whiteout(),
    )  # fmt: skip
    wiped = tree(y=leaf(b"2"))
    wiped.xattrs = {OPAQUE: b"y"}
    upper = tree(
        over=leaf(b"2"), gone=whiteout(), dir=tree(b=leaf(b"2")), wiped=wiped, back=tree(z=leaf(b"2")),
        below=whiteout(),
    )  # fmt: skip
    merged = {path.decode(): node for path, node in walk(overlay(lower, upper)) if path}
    assert " ".join(sorted(merged)) == "back back/z below dir dir/a dir/b gone kept over wiped wiped/y"
    assert merged["over"].target == merged["dir/b"].target == b"2"
    assert merged["gone"].is_whiteout
    assert merged["below"].is_whiteout
    assert merged["wiped"].is_opaque
    assert merged["back"].is_opaque, "what the whiteout hid further below stays hidden"
    assert not merged["dir"].is_opaque

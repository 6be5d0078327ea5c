"""Archives of anybody's making: what they mean, and that none does harm."""

from __future__ import annotations

import io
import random
import tarfile
import tempfile
import tracemalloc
from typing import Any

import pytest
from image_kit import tar

from dsec.errors import CallerError, InvalidRequest, TooLarge, Unsupported
from dsec.store.archive import read_layer
from dsec.store.data import Budget, LayerData
from dsec.store.tree import Node, directory, find, walk


def read(archive: bytes, below: Node | None = None, budget: Budget | None = None) -> Node:
    with tempfile.TemporaryFile() as file:
        return read_layer(io.BytesIO(archive).read, LayerData(file, budget), below)  # type: ignore[arg-type]


def names(top: Node) -> list[str]:
    return [path.decode() for path, _ in walk(top) if path]


def at(top: Node, path: str) -> Node:
    node = find(top, path.encode())
    assert node is not None, path
    return node


def test_entries_become_what_they_say() -> None:
    top = read(
        tar(
            ("./", {"type": tarfile.DIRTYPE, "mode": 0o700, "uid": 7}),
            ("a/", None),
            ("a/file", {"data": b"x" * 3000, "mode": 0o4755, "uid": 1000, "gid": 70000, "mtime": 1.5}),
            ("./a/link", "../elsewhere"),
            ("/abs", b"absolute"),
            ("hard", {"type": tarfile.LNKTYPE, "linkname": "/a/file"}),
            ("null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
            ("pipe", {"type": tarfile.FIFOTYPE}),
            ("x" * 200 + "/" + "y" * 200, b"long"),
            (
                "caps",
                {"data": b"c", "pax_headers": {"SCHILY.xattr.user.a": "b", "SCHILY.xattr.security.selinux": "no"}},
            ),
        )
    )
    assert (top.mode & 0o7777, top.uid) == (0o700, 7)
    file = at(top, "a/file")
    assert (file.mode & 0o7777, file.uid, file.gid, file.mtime_ns) == (0o4755, 1000, 70000, 1_500_000_000)
    assert file.content.size == 3000
    assert at(top, "hard") is file
    assert at(top, "a/link").target == b"../elsewhere"
    assert at(top, "null").rdev == (1, 3)
    assert at(top, "abs").content.inline == b"absolute"
    assert at(top, "x" * 200 + "/" + "y" * 200).content.size == 4
    assert at(top, "caps").xattrs == {b"user.a": b"b"}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_all_forms_of_archives(form: int) -> None:
    out = io.BytesIO()
    name = "n" * 90 + "/" + "m" * 60 if form == tarfile.USTAR_FORMAT else "/".join(["p" * 90] * 20)
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        info = tarfile.TarInfo(name)
        info.size, info.uid = 5, 2_000_000 if form != tarfile.USTAR_FORMAT else 77
        archive.addfile(info, io.BytesIO(b"hello"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "t" * (90 if form == tarfile.USTAR_FORMAT else 900)
        archive.addfile(link)
    top = read(out.getvalue())
    assert at(top, name).content.inline == b"hello"
    assert at(top, name).uid == info.uid
    assert at(top, "link").target == link.linkname.encode()


def test_whiteouts_become_overlayfss_own() -> None:
    top = read(
        tar(
            ("d/.wh.gone", b""),
            ("d/kept", b""),
            ("all/.wh..wh..opq", b""),
            ("all/new", b""),
            ("again/", None),
            (".wh.again", b""),
            (".wh.back", b""),
            ("back", b"a file"),
            (".wh..wh.plnk", b""),
        )
    )
    assert at(top, "d/gone").is_whiteout
    assert not at(top, "d").is_opaque
    assert at(top, "all").is_opaque
    assert at(top, "again").is_opaque, "what was there below is gone, then there is a new one"
    assert at(top, "back").content.inline == b"a file"
    assert sorted(names(top)) == ["again", "all", "all/new", "back", "d", "d/gone", "d/kept"]


def test_lower_layers_say_what_isnt_listed() -> None:
    below = directory()
    below.children = {b"tmp": directory(0o1777), b"lib": Node(0o120777, target=b"usr/lib"), b"usr": directory(0o711)}
    below.children[b"usr"].children[b"lib"] = directory(0o750)
    top = read(tar(("lib/x.so", b"1"), ("tmp/f", b"2"), ("fresh/f", b"3")), below)
    assert sorted(names(top)) == ["fresh", "fresh/f", "tmp", "tmp/f", "usr", "usr/lib", "usr/lib/x.so"]
    assert at(top, "tmp").mode & 0o7777 == 0o1777
    assert at(top, "usr").mode & 0o7777 == 0o711
    assert at(top, "usr/lib").mode & 0o7777 == 0o750
    hidden = read(tar((".wh.lib", b""), ("lib/x.so", b"1")), below)
    assert at(hidden, "lib/x.so").content.size == 1
    assert at(hidden, "lib").is_opaque


def test_a_later_entry_replaces_an_earlier_one() -> None:
    top = read(
        tar(
            ("f", b"1"), ("f", b"22"),
            ("d/x", b""), ("d", b"file now"),
            ("e", b""), ("e/y", b""),
            ("s/z", b""), ("s", None), ("s", {"type": tarfile.DIRTYPE, "mode": 0o711}),
        )
    )  # fmt: skip
    assert at(top, "f").content.inline == b"22"
    assert at(top, "d").is_file
    assert at(top, "e/y").is_file
    assert at(top, "s").mode & 0o777 == 0o711
    assert at(top, "s/z").is_file


LEAD_OUT: dict[str, list[tuple[str, Any]]] = {
    "dots": [("../evil", b"")],
    "dots inside": [("a/../../evil", b"")],
    "absolute dots": [("/../evil", b"")],
    "hard link to outside": [("h", {"type": tarfile.LNKTYPE, "linkname": "../../etc/passwd"})],
    "hard link to the host": [("h", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})],
    "hard link to a directory": [("d/", None), ("h", {"type": tarfile.LNKTYPE, "linkname": "d"})],
    "hard link to the root": [("h", {"type": tarfile.LNKTYPE, "linkname": "."})],
    "hard link to what comes later": [("h", {"type": tarfile.LNKTYPE, "linkname": "f"}), ("f", b"")],
    "whiteout of dots": [("a/.wh...", b"")],
    "whiteout of nothing": [(".wh.", b"")],
    "name too long": [("n" * 256, b"")],
    "path too long": [("/".join(["n" * 200] * 21), b"")],
    "too deep": [("/".join(["n"] * 600), b"")],
    "link in a circle": [("a", "b"), ("b", "a"), ("a/x", b"")],
    "link to itself": [("a", "a"), ("a/x", b"")],
    "link with an empty target": [("a", {"type": tarfile.SYMTYPE, "linkname": ""})],
    "link too long": [("a", "t" * 5000)],
    "owner out of range": [("a", {"uid": 1 << 33})],
    "device out of range": [("a", {"type": tarfile.CHRTYPE, "devmajor": 9000, "devminor": 3})],
    "NUL in a name": [("a", {"pax_headers": {"path": "a\0b"}})],
    "attribute too large": [("a", {"pax_headers": {"SCHILY.xattr.user.a": "v" * 2_000_000}})],
}


@pytest.mark.parametrize("what", LEAD_OUT)
def test_what_leads_out_or_cannot_be_is_refused(what: str) -> None:
    with pytest.raises(InvalidRequest, match="the archive"):
        read(tar(*LEAD_OUT[what]))


def test_links_that_lead_out_stay_inside() -> None:
    top = read(
        tar(
            ("up", "../../../.."), ("up/etc/passwd", b"mine"),
            ("abs", "/etc"), ("abs/shadow", b"mine"),
            ("root", "/"), ("root/tmp/x", b"mine"),
        )
    )  # fmt: skip
    assert at(top, "etc/passwd").content.inline == at(top, "etc/shadow").content.inline == b"mine"
    assert at(top, "tmp/x").content.inline == b"mine"
    assert at(top, "root").is_link


@pytest.mark.parametrize("mtime", [-(10**15), 10**15, 2**63, -(2**63)])
def test_times_out_of_range_become_the_nearest(mtime: int) -> None:
    node = at(read(tar(("f", {"mtime": mtime}))), "f")
    assert -(1 << 31) <= node.mtime_ns / 10**9 <= 1 << 34


def test_absurd_headers_cost_nothing() -> None:
    whole = tar(("f", b"x" * 100))
    tracemalloc.start()
    for kind in b"LKxg":
        bomb = bytearray(whole[:512])
        bomb[124:136] = b"77777777777\0"
        bomb[156] = kind
        _sign(bomb)
        with pytest.raises(InvalidRequest, match="limit"):
            read(bytes(bomb) + bytes(10_000))
    huge = bytearray(whole[:512])
    huge[124:136] = b"\x80" + bytes(3) + b"\x7f" * 8
    _sign(huge)
    with pytest.raises(InvalidRequest, match="out of range"):
        read(bytes(huge))
    huge[124:136] = b"77777777777\0"
    _sign(huge)
    with pytest.raises(InvalidRequest, match="early"):
        read(bytes(huge) + bytes(5000))
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def _sign(block: bytearray) -> None:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])


@pytest.mark.parametrize(
    "record", ["9 path", "99999 path=a\n", "0 a=b\n", "-5 a=b\n", "x a=b\n", "7 a=bcd\n", "8 path\n\n"]
)
def test_broken_pax_records_are_refused(record: str) -> None:
    block = bytearray(tar(("f", b""))[:512])
    block[156] = ord("x")
    block[124:136] = b"%011o\0" % len(record)
    _sign(block)
    with pytest.raises(InvalidRequest, match="extended header"):
        read(bytes(block) + record.encode().ljust(512, b"\0") + tar(("f", b"")))


def test_sparse_files_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="sparse"):
        read(tar(("f", {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 50)}})))
    with pytest.raises(Unsupported, match="sparse"):
        read(tar(("f", {"type": tarfile.GNUTYPE_SPARSE})))
    with pytest.raises(Unsupported, match="unknown kind"):
        read(tar(("f", {"type": b"V"})))


def test_a_budget_bounds_everything() -> None:
    many = tar(*[(f"f{n}", b"%d" % n * 2000) for n in range(100)])
    for budget in (Budget(entries=50), Budget(data_bytes=5000), Budget(file_bytes=5000), Budget(metadata_bytes=100)):
        with pytest.raises(TooLarge):
            read(many, budget=budget)
    deep = tar(*[(f"{n}/" * 400 + "f", b"") for n in range(100)])
    with pytest.raises(TooLarge, match="entries"):
        read(deep, budget=Budget(entries=1000))


METADATA: dict[str, tuple[list[tuple[str, Any]], dict[str, str]]] = {
    "links": ([(f"l{n}", "t" * 4000) for n in range(60)], {}),
    "tiny files": ([(f"f{n}", b"x" * 1000) for n in range(400)], {}),
    "attributes of each": ([(f"f{n}", {"pax_headers": {"SCHILY.xattr.user.a": "v" * 30_000}}) for n in range(20)], {}),
    "attributes of all": ([(f"f{n}", b"") for n in range(20)], {f"SCHILY.xattr.user.{n}": "" for n in range(300)}),
    "attributes that are dropped": (
        [(f"f{n}", b"") for n in range(20)],
        {f"SCHILY.xattr.security.{n}": "" for n in range(300)},
    ),
}


@pytest.mark.parametrize("what", METADATA)
def test_what_is_held_in_memory_is_bounded_together(what: str) -> None:
    """A small archive, packed smaller still, must not become gigabytes of the server's memory."""
    entries, everywhere = METADATA[what]
    archive = tar(*entries, everywhere=everywhere)
    assert read(archive) is not None
    with pytest.raises(TooLarge, match="attributes"):
        read(archive, budget=Budget(metadata_bytes=200_000))


def test_attributes_beyond_what_a_file_can_have_are_refused_at_once() -> None:
    archive = tar(
        *[(f"f{n}", b"") for n in range(50)], everywhere={f"SCHILY.xattr.user.{n}": "" for n in range(25_000)}
    )
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="attributes"):
        read(archive)
    assert tracemalloc.get_traced_memory()[1] < 30 << 20
    tracemalloc.stop()


def test_what_is_cut_off_or_nonsense_says_so() -> None:
    whole = tar(("f", b"x" * 5000), ("g", b"y" * 700))
    for cut in (100, 511, 700, 3000, 5632 + 100, 5632 + 512 + 100):
        with pytest.raises(InvalidRequest, match=r"cut off|early"):
            read(whole[:cut])
    with pytest.raises(InvalidRequest, match="not a tar archive"):
        read(b"nonsense" * 1000)
    assert names(read(b"")) == []


def test_random_damage_gives_an_error_or_a_tree() -> None:
    whole = tar(*LEAD_OUT["link in a circle"][:2], ("d/", None), ("d/f", b"x" * 900), ("l" * 150, b"y"), ("h", {
        "type": tarfile.LNKTYPE, "linkname": "d/f"}), ("p", {"pax_headers": {"SCHILY.xattr.user.q": "1"}}))  # fmt: skip
    for seed in range(400):
        noise = random.Random(seed)
        bad = bytearray(whole)
        start = noise.randrange(0, len(bad) // 512) * 512
        for _ in range(noise.randrange(1, 12)):
            bad[start + noise.randrange(512)] = noise.randrange(256)
        if noise.random() < 0.8:
            bad[start + 148 : start + 156] = b" " * 8
            bad[start + 148 : start + 156] = b"%06o\0 " % sum(bad[start : start + 512])
        try:
            top = read(bytes(bad), budget=Budget(data_bytes=1 << 20, file_bytes=1 << 20, entries=1000))
        except CallerError:
            continue
        assert all(b".." not in path.split(b"/") for path, _ in walk(top))

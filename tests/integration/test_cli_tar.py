"""Archives: what is packed is read by others, what others pack is unpacked, a hostile one writes nothing outside."""

from __future__ import annotations

import contextlib
import io
import os
import random
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.cli.tarstream import BadArchive, header, pack, shown, walk
from dsec.cli.unpack import Unpacker
from trees import state_of

LONG = b"d" * 120 + b"/" + b"f" * 200


def tree(root: Path) -> None:
    """A bit of everything."""
    raw = os.fsencode(root)
    (root / "empty").mkdir(parents=True)
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "script").write_bytes(b"#!/bin/sh\n")
    (root / "sub" / "script").chmod(0o755)
    (root / "sub" / "secret").write_bytes(b"s" * 511)
    (root / "sub" / "secret").chmod(0o600)
    (root / "sub" / "deep" / "block").write_bytes(b"b" * 512)
    (root / "sub" / "deep" / "big").write_bytes(random.Random(7).randbytes(3_000_001))
    (root / "nothing").write_bytes(b"")
    (root / "link").symlink_to("sub/script")
    (root / "dangling").symlink_to("/no/such/" + "x" * 150)
    Path(os.fsdecode(raw + b"/not-utf8-\xff\xfe")).write_bytes(b"bytes")
    long = Path(os.fsdecode(raw + b"/" + LONG))
    long.parent.mkdir()
    long.write_bytes(b"long")
    (root / "sub" / "deep").chmod(0o500)
    os.utime(root / "sub" / "script", (1e9, 1e9))


def packed(root: Path, skip: Callable[[bytes, os.stat_result], bool] = lambda _, __: False) -> bytes:
    notes: list[str] = []
    data = b"".join(map(bytes, pack(walk(os.fsencode(root), b"top", notes.append, skip), notes.append)))
    assert notes == []
    return data


def unpack(target: Path, archive: bytes, step: int = 10_007) -> list[str]:
    notes: list[str] = []
    target.mkdir(exist_ok=True)
    unpacker = Unpacker(os.fsencode(target), notes.append)
    try:
        for i in range(0, len(archive), step):
            unpacker.feed(archive[i : i + step])
        unpacker.finish()
    finally:
        unpacker.close()
    assert unpacker.refused == len(notes)
    return notes


@pytest.mark.parametrize("step", [1 << 30, 10_007, 333])
def test_a_tree_comes_out_as_it_went_in(tmp_path: Path, step: int) -> None:
    tree(tmp_path / "in")
    assert unpack(tmp_path / "out", packed(tmp_path / "in"), step) == []
    assert state_of(tmp_path / "out" / "top") == state_of(tmp_path / "in")


def test_the_standard_library_reads_what_is_packed(tmp_path: Path) -> None:
    tree(tmp_path / "in")
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path / "in")), errorlevel=2, errors="surrogateescape") as archive:
        archive.extractall(tmp_path / "out", filter="fully_trusted")
    assert state_of(tmp_path / "out" / "top") == state_of(tmp_path / "in")


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_the_standard_library_packs_is_unpacked(tmp_path: Path, form: int) -> None:
    tree(tmp_path / "in")
    (tmp_path / "in" / "same").hardlink_to(tmp_path / "in" / "sub" / "script")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=form, errors="surrogateescape") as archive:
        archive.add(tmp_path / "in", "./")
    assert unpack(tmp_path / "out", data.getvalue()) == []
    left, right = state_of(tmp_path / "out"), state_of(tmp_path / "in")
    assert {name: entry[:2] + entry[3:] for name, entry in left.items()} == {
        name: entry[:2] + entry[3:] for name, entry in right.items()
    }
    assert (tmp_path / "out" / "same").samefile(tmp_path / "out" / "sub" / "script")


def member(name: bytes, kind: bytes = b"0", content: bytes = b"", link: bytes = b"", mode: int = 0o644) -> bytes:
    return header(name, mode, len(content), 1, kind, link) + content + bytes(-len(content) % 512)


END = bytes(1024)


@pytest.mark.parametrize(
    "members",
    [
        [member(b"../outside", content=b"x")],
        [member(b"/{tmp}/outside", content=b"x")],
        [member(b"a/../../outside", content=b"x")],
        [member(b"a", b"2", link=b".."), member(b"a/outside", content=b"x")],
        [member(b"a", b"2", link=b"/{tmp}"), member(b"a/outside", content=b"x"), member(b"a/b/outside", b"5")],
        [member(b"a", b"2", link=b"../outside"), member(b"a", content=b"x")],
        [member(b"a", b"2", link=b"../victim"), member(b"a", content=b"x")],
        [member(b"a", b"1", link=b"../victim"), member(b"a", content=b"x")],
        [member(b"l", b"2", link=b"../victim"), member(b"a", b"1", link=b"l"), member(b"a", content=b"x")],
        [member(b"d", b"5"), member(b"d", b"2", link=b".."), member(b"d/outside", content=b"x")],
        [member(b"a", b"2", link=b".."), member(b"a", b"5", mode=0o777), member(b"a/victim", b"5", mode=0o777)],
        [member(b"a", b"2", link=b"../directory"), member(b"a/", b"5", mode=0o777)],
        [member(b"old/outside", content=b"x")],
        [member(b"old", b"5", mode=0o777), member(b"old/x/outside", content=b"x")],
        [member(b"a.dsec-part", b"2", link=b"../victim"), member(b"a", content=b"x")],
        [member(b"f", b"3"), member(b"p", b"6"), member(b"s", b"4")],
        [member(b"", content=b"x"), member(b".", content=b"x"), member(b"..", b"5"), member(b"./..", b"2", link=b"x")],
        [member(b"x" * 5000, content=b"x")],
    ],
)
def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path, members: list[bytes]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "victim").write_bytes(b"untouched")
    (tmp_path / "victim").chmod(0o600)
    (tmp_path / "directory").mkdir(mode=0o700)
    (target / "old").symlink_to(tmp_path / "directory")
    before = {name: entry for name, entry in state_of(tmp_path).items() if not name.startswith(b"target/")}
    archive = b"".join(members).replace(b"/{tmp}", os.fsencode(tmp_path)) if b"{tmp}" in b"".join(members) else None
    if archive is not None:  # the head's checksum covers the name: pack it again
        place = os.fsencode(tmp_path)
        archive = b"".join([member(b"a", b"2", link=place), member(b"a/outside", content=b"x"), member(place + b"/o")])
    notes = unpack(target, (archive or b"".join(members)) + END)
    after = {name: entry for name, entry in state_of(tmp_path).items() if not name.startswith(b"target/")}
    before.pop(b"target", None)
    after.pop(b"target", None)
    assert after == before
    assert not list((tmp_path / "directory").iterdir())
    assert isinstance(notes, list)


def test_no_file_gets_more_rights_than_its_permissions(tmp_path: Path) -> None:
    members = [member(b"s", content=b"x", mode=0o6755), member(b"d", b"5", mode=0o7777)]
    assert unpack(tmp_path / "out", b"".join(members) + END) == []
    assert stat.S_IMODE((tmp_path / "out" / "s").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out" / "d").stat().st_mode) == 0o777


def test_numbers_and_links_of_any_size(tmp_path: Path) -> None:
    extended = b"28 linkpath=nowhere\0nowhere\n"
    members = [
        header(b"late", 0o644, 0, 1 << 80, b"0"),
        member(b"x", b"x", content=extended),
        member(b"l", b"2"),
        member(b"K", b"K", content=b"y" * 5000),
        member(b"m", b"2"),
    ]
    notes = unpack(tmp_path / "out", b"".join(members) + END)
    assert len(notes) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["late"]


def test_what_can_not_be_written_does_not_stop_the_rest(tmp_path: Path) -> None:
    (tmp_path / "out" / "a").mkdir(parents=True)
    members = [member(b"a", content=b"x" * 1000), member(b"c/x", b"1", link=b"nothing"), member(b"b", content=b"y")]
    notes = unpack(tmp_path / "out", b"".join(members) + END)
    assert len(notes) == 2
    assert (tmp_path / "out" / "b").read_bytes() == b"y"


def test_a_cut_archive_leaves_no_half_file(tmp_path: Path) -> None:
    archive = member(b"whole", content=b"w") + member(b"half", content=b"h" * 5000)[:3000]
    with pytest.raises(BadArchive, match="cut"):
        unpack(tmp_path / "out", archive)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


@pytest.mark.parametrize("garbage", [b"no archive at all " * 100, b"\xff" * 1024, header(b"x", 0, 1 << 40, 0, b"L")])
def test_garbage_is_told_from_an_archive(tmp_path: Path, garbage: bytes) -> None:
    with pytest.raises(BadArchive):
        unpack(tmp_path / "out", garbage)
    assert not list((tmp_path / "out").iterdir())


def test_any_bytes_at_all(tmp_path: Path) -> None:
    """Damage in a real archive: refused or unpacked, never anything else, never outside."""
    tree(tmp_path / "in")
    (tmp_path / "in" / "sub" / "deep" / "big").unlink()
    archive = packed(tmp_path / "in")
    dice = random.Random(11)
    outside = state_of(tmp_path / "in")
    for number in range(300):
        damaged = bytearray(archive)
        for _ in range(dice.randint(1, 8)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        place = dice.randrange(0, len(damaged) // 512) * 512
        block = bytes(damaged[place : place + 512])
        fixed = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
        damaged[place + 148 : place + 156] = fixed
        with contextlib.suppress(BadArchive):
            unpack(tmp_path / f"out{number}", bytes(damaged))
    assert state_of(tmp_path / "in") == outside
    assert {path.name for path in tmp_path.iterdir()} == {"in", *(f"out{number}" for number in range(300))}


def test_a_file_that_changes_while_it_is_packed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "f").write_bytes(b"x" * 9_000_000)
    notes: list[str] = []
    pieces = pack(walk(os.fsencode(tmp_path / "in"), b"t", notes.append, lambda _, __: False), notes.append)
    first = bytes(next(pieces))
    (tmp_path / "in" / "f").write_bytes(b"")
    assert unpack(tmp_path / "out", first + b"".join(map(bytes, pieces))) == []
    assert (tmp_path / "out" / "t" / "f").stat().st_size == 9_000_000
    assert "shorter" in notes[0]


def test_names_can_not_control_the_terminal() -> None:
    assert shown(b"a\x1b[2Jb\n\xff") == "a\\x1b[2Jb\\n\\xff"
    assert shown("späße".encode()) == "späße"

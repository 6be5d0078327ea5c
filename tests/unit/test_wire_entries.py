"""Directory entries: any name survives, bytes cut anywhere, malformed ones are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.spec.sandbox import FileInfo
from dsec.wire.entries import ENTRY_SIZE, EntryDecoder, encode_entry, from_json, json_safe, to_bytes, to_text
from dsec.wire.frames import ProtocolError

NAMES = st.binary(min_size=1, max_size=40).map(to_text)


@st.composite
def infos(draw: st.DrawFn) -> FileInfo:
    name = draw(NAMES)
    kinds: list[Any] = ["file", "directory", "symlink", "fifo", "socket", "char", "block"]
    kind = draw(st.sampled_from(kinds))
    info = FileInfo(
        name=name,
        type=kind,
        size=draw(st.integers(0, (1 << 63) - 1)),
        mode=draw(st.integers(0, 0o7777)),
        uid=draw(st.integers(0, (1 << 32) - 1)),
        gid=draw(st.integers(0, (1 << 32) - 1)),
        nlink=draw(st.integers(0, (1 << 32) - 1)),
        mtime=draw(st.integers(-(10**9), 9 * 10**9)),
        target=draw(NAMES) if kind == "symlink" else None,
    )
    return EntryDecoder().feed(encode_entry(info))[0]


@given(st.lists(infos(), max_size=5), st.lists(st.integers(0, 500), max_size=10))
def test_entries_survive_cut_anywhere(sent: list[FileInfo], cuts: list[int]) -> None:
    data = b"".join(map(encode_entry, sent))
    decoder, got, at = EntryDecoder(), [], 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        got += decoder.feed(data[at:cut])
        at = cut
    decoder.end()
    assert got == sent


@given(infos())
def test_any_name_survives_json(info: FileInfo) -> None:
    text = msgspec.json.encode(json_safe(info))
    assert to_bytes(from_json(msgspec.json.decode(text, type=FileInfo)).name) == to_bytes(info.name)


def test_a_name_that_is_no_utf8_has_its_bytes_beside_it() -> None:
    data = encode_entry(FileInfo(name="a\udcff", type="file", size=0, mode=0, uid=0, gid=0, nlink=1, mtime=0))
    (info,) = EntryDecoder().feed(data)
    assert info.name_b64 == "Yf8="
    assert json_safe(info).name == "a\ufffd"


@given(infos(), st.data())
def test_mutated_entries_decode_or_are_refused(info: FileInfo, data: st.DataObject) -> None:
    raw = bytearray(encode_entry(info))
    raw[data.draw(st.integers(0, ENTRY_SIZE - 1))] = data.draw(st.integers(0, 255))
    decoder = EntryDecoder()
    try:
        decoder.feed(bytes(raw))
        decoder.end()
    except ProtocolError:
        return


@pytest.mark.parametrize("letter", [b"x", b"\0"])
def test_an_unknown_type_is_refused(letter: bytes) -> None:
    with pytest.raises(ProtocolError):
        EntryDecoder().feed(letter + bytes(ENTRY_SIZE - 1))

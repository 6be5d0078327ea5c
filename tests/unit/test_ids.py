"""Sandbox ids."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from dsec.spec.ids import EPOCH_MASK, SandboxId, decode_id, encode_id

KEY = bytes(range(32))
PARTS = st.builds(SandboxId, st.integers(0, 0xFFFF), st.integers(0, EPOCH_MASK), st.integers(0, 0xFFFFFFFF))


@given(PARTS)
def test_an_id_says_where_it_is_from(parts: SandboxId) -> None:
    text = encode_id(parts, KEY)
    assert re.fullmatch(r"[a-z0-9]{24}", text)
    assert decode_id(text, KEY) == parts


@given(PARTS, st.integers(0, 23), st.sampled_from("0123456789abcdefghijklmnopqrstuv"))
def test_a_changed_id_is_nobodys(parts: SandboxId, at: int, letter: str) -> None:
    text = encode_id(parts, KEY)
    changed = text[:at] + letter + text[at + 1 :]
    assert (decode_id(changed, KEY) is None) == (changed != text)


@given(PARTS)
def test_another_nodes_key_makes_another_id(parts: SandboxId) -> None:
    other = bytes(32)
    assert decode_id(encode_id(parts, other), KEY) is None


@given(PARTS, PARTS)
def test_ids_of_one_epoch_sort_as_they_were_made(one: SandboxId, two: SandboxId) -> None:
    two = SandboxId(one.edge, one.epoch, two.sequence)
    ids = [encode_id(one, KEY), encode_id(two, KEY)]
    assert (ids[0] < ids[1]) == (one.sequence < two.sequence)


@given(
    st.one_of(st.text(max_size=40), st.text(alphabet="0123456789abcdefghijklmnopqrstuvwxyzV", min_size=24, max_size=24))
)
def test_anything_else_is_no_id(text: str) -> None:
    assert decode_id(text, KEY) is None


def test_the_case_counts() -> None:
    text = encode_id(SandboxId(1, 2, 3), KEY)
    assert decode_id(text.upper(), KEY) is None or text == text.upper()

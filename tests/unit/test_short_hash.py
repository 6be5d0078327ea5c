"""The small SHA-256 gives what hashlib's gives."""

from __future__ import annotations

import hashlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.spec import short_hash


@given(st.binary(max_size=500))
def test_digests_are_hashlibs(data: bytes) -> None:
    assert short_hash.sha256(data).digest() == hashlib.sha256(data).digest()
    assert short_hash.sha256(data).hexdigest() == hashlib.sha256(data).hexdigest()


def test_without_cpythons_own_it_is_hashlibs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_sha2", "_sha256"):
        monkeypatch.setitem(sys.modules, name, None)
    assert short_hash._smallest() is hashlib.sha256

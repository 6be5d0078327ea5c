"""What a log names by digest, in the shared store: each node's own, whatever others write of the same sandbox."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dsec.cluster.logs import body_key, encrypt, kept_body, key_of
from dsec.store.blobs import DirectoryStore

AT, BOX, DATA = 1_000_000.0, "0" * 24, b"what it printed" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


async def test_who_makes_it_anew_takes_nothing_away(tmp_path: Path) -> None:
    """A rebuild may fail after it has written: the log of before must still be good for another."""
    store = DirectoryStore(tmp_path)
    first, second = key_of(b"1" * 32, BOX), key_of(b"2" * 32, BOX)
    await store.put(body_key(AT, BOX, DIGEST), encrypt(DATA, first, DIGEST))
    assert await kept_body(store, AT, BOX, DIGEST, second) is None
    await store.put(body_key(AT, BOX, DIGEST, second), encrypt(DATA, second, DIGEST))
    for key in (first, second):
        assert await kept_body(store, AT, BOX, DIGEST, key) == DATA
    assert await kept_body(store, AT + 86400, BOX, DIGEST, first) is None
    await store.put(body_key(AT, BOX, DIGEST), b"nonsense")
    assert await kept_body(store, AT, BOX, DIGEST, first) is None

"""Which environments a shield gets."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsec.backends.microvm.shield_store import others, stored
from dsec.store.environments import EnvironmentStore
from dsec.store.layers import Entry


def test_one_that_lacks_a_layer_is_left_out_and_changes_are_named(tmp_path: Path) -> None:
    store = EnvironmentStore(tmp_path)
    first, second = (store.layers.add_tree({name: Entry(b"x")}, "directory").digest for name in ("one", "two"))
    store.put("whole", [first])
    store.put("a/part", [first, second], project="p")
    before = stored(tmp_path, store.layers)
    assert before.layers.keys() == {first, second, store.runtime()}
    assert before.texts.keys() == {"store/environments/whole.json", "store/environments/=p/a%2Fpart.json"}
    shutil.rmtree(store.layers.root / second)
    after = stored(tmp_path, store.layers)
    assert after.layers.keys() == {first, store.runtime()}
    assert others(before.marks(), after.marks()) == ["=p/a%2Fpart"]
    files = after.files()
    assert files[f"store/layers/{first}/meta.erofs"] == f"disk m{first[:18]}"
    assert not [name for name in files if second in name]
    store.put("whole", [store.runtime()])
    store.put("new", [first])
    assert others(after.marks(), stored(tmp_path, store.layers).marks()) == ["new", "whole"]
    assert others(after.marks(), after.marks()) == []

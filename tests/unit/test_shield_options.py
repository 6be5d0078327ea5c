"""What a server in a machine of its own can't be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.app_cluster import Joining, Listening
from dsec.app_shield import ShieldShape, serve_in_vm
from dsec.app_shield_edge import serve_edge_in_vm
from dsec.errors import Unsupported

SHAPE = ShieldShape(vcpus=1, memory_bytes=1 << 30, state_bytes=2 << 30)


@pytest.mark.parametrize("store", ["/somewhere", "s3://bucket/prefix?endpoint=http://127.0.0.1:9000"])
def test_a_shared_store_is_refused_and_not_silently_left_out(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_STORE", store)
    with pytest.raises(Unsupported, match="no shared store"):
        serve_in_vm(host="127.0.0.1", port=0, shape=SHAPE, keep=False, state=tmp_path / "state")
    joining = Joining(urls=["nats://127.0.0.1:4222"], credentials=tmp_path / "edge.json")
    with pytest.raises(Unsupported, match="no shared store"):
        serve_edge_in_vm(joining, Listening(), shape=SHAPE, state=tmp_path / "state")
    assert not (tmp_path / "state").exists()

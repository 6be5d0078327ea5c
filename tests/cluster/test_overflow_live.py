"""A cluster that grows by a node when it is full, and shrinks again; by deploy/overflow/local as it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import PATIENCE_S, SOURCES, Cluster, running, until

from dsec.app import read_config
from dsec.spec.ids import edge_of

pytestmark = pytest.mark.root
HOOK = SOURCES.parent / "deploy" / "overflow" / "local"


@pytest.fixture
def cluster(state_over: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    (tmp_path / "overflow").mkdir()
    state_over(tmp_path / "overflow" / "2")
    monkeypatch.setenv("DSEC_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("DSEC_OVERFLOW", str(tmp_path / "overflow"))
    monkeypatch.setenv("DSEC_COMMAND", f"{sys.executable} -m dsec.cli.main")
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    policy = {"edges": [2], "wait_s": 1, "idle_s": 1, "ready_s": 300}
    config = tmp_path / "overflow.json"
    config.write_text(json.dumps({"hook": str(HOOK), "policy": policy}))
    with running(
        tmp_path, [state_over(tmp_path / "state")], servers=1, apiservers=1, arguments=["--overflow", str(config)]
    ) as made:
        try:
            yield made
        finally:
            os.spawnl(os.P_WAIT, HOOK, str(HOOK), "stop", "2")


async def test_a_full_cluster_gets_a_node_and_lets_it_go_again(cluster: Cluster, tmp_path: Path) -> None:
    run = read_config(tmp_path / "overflow" / "2").run
    async with cluster.client() as client:
        (node,) = cluster.get("/v1/nodes")["nodes"]
        most = int(node["memory_capacity_bytes"] * 0.85)
        big: dict[str, Any] = {"memory_bytes": most, "disk_bytes": 64 << 20, "labels": {"node/burst": "allow"}}
        boxes = [await client.create("debian", **big)]
        assert edge_of(boxes[0].id) == 1
        until(lambda: len(cluster.healths()) == 2, "a second node is started")
        boxes.append(await client.create("debian", deadline_s=PATIENCE_S, **big))
        assert edge_of(boxes[1].id) == 2
        assert (await boxes[1].commands.run(["echo", "there"])).stdout == "there\n"
        for box in boxes:
            await box.kill()
        until(lambda: not run.exists(), "it is let go, and leaves nothing on its host")

"""Nodes that were given the credentials of all, and find out which of them they are."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import Cluster, running

from dsec.cluster.credentials import Credentials
from dsec.cluster.numbers import settle
from dsec.errors import Conflict, InvalidRequest
from free_port import free_port
from server_kit import PATIENCE_S


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without edges; its keys are for two."""
    with running(tmp_path_factory.mktemp("cluster"), [], servers=1, apiservers=1) as made:
        yield made


async def test_each_node_gets_a_number_of_its_own_and_keeps_it(cluster: Cluster, tmp_path: Path) -> None:
    states = [tmp_path / name for name in "abc"]
    for state in states:
        state.mkdir()
    keys = cluster.directory / "keys"

    async def settled(state: Path) -> Credentials | Conflict:
        try:
            return await settle(cluster.urls, keys, state, host=state.name)
        except Conflict as error:
            return error

    cluster.apis[0].kill()
    settling = asyncio.gather(*map(settled, states))
    await asyncio.sleep(2.0)
    assert not settling.done(), "they wait for an apiserver"
    await asyncio.to_thread(cluster.apis[0].start)
    found = await settling
    given = {state: each.edge for state, each in zip(states, found, strict=True) if isinstance(each, Credentials)}
    assert sorted(number for number in given.values() if number) == [1, 2]
    (refused,) = [each for each in found if isinstance(each, Conflict)]
    assert "all 2 numbers" in refused.message
    for state, number in given.items():
        again = await settled(state)
        assert isinstance(again, Credentials)
        assert again.edge == number

    one = next(state for state, number in given.items() if number == 1)
    few = tmp_path / "few"
    few.mkdir()
    shutil.copy(keys / "edge-2.json", few)
    with pytest.raises(InvalidRequest, match="no credentials of edge 1"):
        await settle(cluster.urls, few, one, host="a")
    (one / "number").write_text("x")
    with pytest.raises(InvalidRequest, match="holds no number"):
        await settle(cluster.urls, keys, one, host="a")
    with pytest.raises(InvalidRequest, match=r"holds no edge-N\.json"):
        await settle(cluster.urls, tmp_path, one, host="a")


def test_an_apiserver_whose_nats_server_is_alone_says_so_at_once(tmp_path: Path) -> None:
    """It said nothing for half a minute, and then something about `dsec_members`."""
    with running(tmp_path, [], servers=1, apiservers=0) as fresh:
        command = [*fresh.command("apiserver", "apiserver"), "--port", str(free_port())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "is alone" in done.stderr
    assert "--replicas 1" in done.stderr

"""Messages between apiservers and edges of one release apart: what the release before said is read, and what the next
one may add is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from nats.aio.client import Client

from dsec.bench.cluster_edges import Fleet, SimEdge
from dsec.cluster.bus import Bus
from dsec.cluster.logs import Shipment, pack, unpack
from dsec.cluster.member import Membership
from dsec.cluster.wire import Heartbeat, Join, Joined, Member
from dsec.spec.cluster import NodeFacts

BEFORE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "cluster_wire.json").read_text())
KINDS: dict[str, Any] = {"join": Join, "joined": Joined, "member": Member, "heartbeat": Heartbeat}


@pytest.mark.parametrize("name", KINDS)
def test_what_the_release_before_said(name: str) -> None:
    found = msgspec.json.decode(json.dumps(BEFORE[name]), type=KINDS[name])
    again = json.loads(msgspec.json.encode(found))
    assert {key: again[key] for key in BEFORE[name] if key not in ("report", "claim", "facts")} == {
        key: value for key, value in BEFORE[name].items() if key not in ("report", "claim", "facts")
    }


@pytest.mark.parametrize("name", KINDS)
def test_what_the_next_release_may_add(name: str) -> None:
    later = BEFORE[name] | {"v": 2, "later": {"deep": [1]}}
    assert isinstance(msgspec.json.decode(json.dumps(later), type=KINDS[name]), KINDS[name])


def test_an_apiserver_of_the_release_before_keeps_no_logs() -> None:
    assert msgspec.json.decode(json.dumps(BEFORE["joined"]), type=Joined).shards == 0


async def test_an_apiserver_of_the_release_before_is_told_all(tmp_path: Path) -> None:
    """It would take the details that a brief heartbeat leaves out for none: no quota's share would be used."""
    edge = SimEdge(Fleet(3), 3)
    member = Membership(edge, Bus(Client(), []), NodeFacts(edge=3), url="http://127.0.0.1:1", state=tmp_path)
    before = msgspec.json.decode(json.dumps(BEFORE["joined"]), type=Joined)
    await member.accept(before)
    assert [member.heartbeat().brief for _ in range(3)] == [False] * 3
    await member.accept(replace(before, brief=True))
    assert [member.heartbeat().brief for _ in range(3)] == [True] * 3
    await member.accept(before)
    assert not member.heartbeat().brief


def test_a_shipment_of_the_next_release() -> None:
    message = b'{"v":2,"incarnation":5,"later":1}\n{"seq":1}\n'
    assert unpack(message) == (Shipment(v=2, incarnation=5), [b'{"seq":1}\n'])
    assert unpack(pack(Shipment(key="ab"), [b"x\n"])) == (Shipment(key="ab"), [b"x\n"])

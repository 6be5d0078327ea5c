"""The parts of the cluster that need no server: bearers, credentials, URLs, how a sandbox's wishes are read."""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from typing import cast

import msgspec
import pytest

from dsec.cluster.asking import ask_of, name_key, record_key
from dsec.cluster.credentials import check_urls, make_cluster, read_credentials
from dsec.cluster.nodes import Nodes, said_facts
from dsec.cluster.upstream import Upstream
from dsec.cluster.wire import Member, sign, verify
from dsec.edge.client import Principal
from dsec.errors import InvalidRequest, Unauthenticated
from dsec.plan.fencing import Claim
from dsec.spec.cluster import NodeFacts
from dsec.spec.ids import SandboxId, edge_of, encode_id
from dsec.spec.network import KeyPolicy
from dsec.spec.sandbox import SandboxSpec

SECRET = "s" * 64


def test_bearers() -> None:
    who = Principal("lab/team", None, "key", KeyPolicy(internet=True))
    bearer = sign(who, secret=SECRET, incarnation=4, until=100.0, holder="api-1")
    good = verify(bearer, secret=SECRET, incarnation=4, now=100.0)
    assert (good.principal, good.holder) == (who, "api-1")
    text, _, tag = bearer.removeprefix("dsx_").partition(".")
    payload = msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    payload["project"] = "other"
    forged = base64.urlsafe_b64encode(msgspec.json.encode(payload)).decode().rstrip("=")
    for wrong, secret, incarnation, now in [
        (bearer, SECRET, 4, 100.1),
        (bearer, SECRET, 5, 1.0),
        (bearer, "t" * 64, 4, 1.0),
        (f"dsx_{forged}.{tag}", SECRET, 4, 1.0),
        (f"dsx_{text}.", SECRET, 4, 1.0),
        (f"dsx_{text}", SECRET, 4, 1.0),
        (bearer.removeprefix("dsx_"), SECRET, 4, 1.0),
        ("dsx_é.é", SECRET, 4, 1.0),
        ("", SECRET, 4, 1.0),
    ]:
        with pytest.raises(Unauthenticated):
            verify(wrong, secret=secret, incarnation=incarnation, now=now)


def test_credentials(tmp_path: Path) -> None:
    written = make_cluster(tmp_path / "keys", 3)
    assert {path.name for path in written} == {
        "nats.conf",
        "apiserver.json",
        "edge-1.json",
        "edge-2.json",
        "edge-3.json",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
    two = read_credentials(tmp_path / "keys" / "edge-2.json")
    assert (two.edge, two.user) == (2, "edge-2")
    conf = (tmp_path / "keys" / "nats.conf").read_text()
    assert all(read_credentials(path).seed not in conf for path in written if path.suffix == ".json")
    line = next(line for line in conf.splitlines() if line.endswith("# edge-2"))
    assert '"dsec.edge.2.>"' in line
    assert '"dsec.heard"' in line
    assert "dsec.edge.1" not in line
    assert '">"' not in line
    with pytest.raises(InvalidRequest, match="already"):
        make_cluster(tmp_path / "keys", 3)
    (tmp_path / "bad.json").write_text('{"user": "root", "seed": "x"}')
    for name in ("bad.json", "missing.json"):
        with pytest.raises(InvalidRequest):
            read_credentials(tmp_path / name)


def test_urls_without_tls_are_for_this_machine() -> None:
    check_urls(["nats://127.0.0.1:4222", "nats://localhost:1", "tls://nats-0:4222"], plain=False)
    check_urls(["nats://10.0.0.1:4222"], plain=True)
    for url in (
        "nats://10.0.0.1:4222",
        "http://127.0.0.1",
        "nats://127.0.0.1.example:4222",
        "nats://user:pw@127.0.0.1",
    ):
        with pytest.raises(InvalidRequest):
            check_urls([url], plain=False)


def test_what_a_sandbox_asks_of_a_node() -> None:
    labels = {"node/disk": "nvme", "node/burst": "allow", "team": "a"}
    ask = ask_of(SandboxSpec(environment="e", labels=labels, run="r"), "p")
    assert ask.labels == {("disk", "nvme")}
    assert ask.burst
    assert ask.run == "p\0r"
    assert not ask_of(SandboxSpec(environment="e"), "p").burst
    assert ask_of(SandboxSpec(environment="e"), "p").features == frozenset()
    required = SandboxSpec(environment="e", backend="microvm", require_kvm=True, require_features=["landlock"])
    assert ask_of(required, "p").features == {"landlock", "kvm"}


def test_a_node_of_the_release_before_is_asked_for_kvm() -> None:
    """It names no features, and refuses by itself what it can't do."""
    assert said_facts(NodeFacts(edge=1)).features == ("kvm",)
    assert said_facts(NodeFacts(edge=1, features=("fuse",))).features == ("fuse",)


def test_keys_of_records_are_told_apart() -> None:
    plain, named = SandboxSpec(environment="e"), SandboxSpec(environment="e", name="n", run="r")
    assert record_key("p", plain, None) is None
    assert record_key("p", named, "k") == record_key("p", named, None) == name_key("p", "r", "n")
    keys = [record_key("p", plain, "k"), record_key("q", plain, "k"), name_key("p", "r", "n"), name_key("p", None, "n")]
    assert len(set(keys)) == 4


def test_the_edge_of_an_id() -> None:
    assert edge_of(encode_id(SandboxId(513, 7, 9), b"key")) == 513
    for wrong in ("", "x" * 24, "0" * 23, "0" * 25, "0" * 23 + "\n", "A" * 24):
        assert edge_of(wrong) is None


@pytest.mark.parametrize("key", ["a\r\nX-Evil: 1", "a\nb", "a\rb", "a\0b"])
async def test_no_key_becomes_a_header_of_its_own(key: str) -> None:
    claim = Claim(edge=1, incarnation=1, instance="i", host="h")
    member = Member(claim=claim, facts=NodeFacts(edge=1), url="http://127.0.0.1:1", secret=SECRET)
    upstream = Upstream(cast(Nodes, None), "api")
    with pytest.raises(InvalidRequest):
        await upstream.call(member, "POST", "/v1/sandboxes", {"idempotency-key": key})
    await upstream.close()

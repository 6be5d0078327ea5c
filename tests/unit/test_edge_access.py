"""API keys and sandbox tokens."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from edge_kit import Kit, spec

from dsec.errors import InvalidRequest, NotFound, PermissionDenied, SandboxNotFound, Unauthenticated


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


async def test_a_key_is_its_projects_until_it_is_revoked_also_after_a_restart(kit: Kit) -> None:
    async with kit.edge() as edge:
        key = await edge.create_key("team/a", "laptop")
        other = await edge.create_key("team/b")
        principal = edge.authenticate(key)
        assert (principal.project, principal.sandbox_id, principal.label) == ("team/a", None, "laptop")
        assert edge.authenticate(other).project == "team/b"
        assert {listed.project for listed in edge.list_keys()} == {"team/a", "team/b"}
    async with kit.edge() as edge:
        assert edge.authenticate(key).project == "team/a"
        (listed,) = edge.list_keys("team/a")
        await edge.revoke_key(listed.id)
        await edge.revoke_key(listed.id)
        with pytest.raises(Unauthenticated):
            edge.authenticate(key)
    async with kit.edge() as edge:
        with pytest.raises(Unauthenticated):
            edge.authenticate(key)
        with pytest.raises(NotFound):
            await edge.revoke_key("0" * 16)


async def test_secrets_are_not_on_disk(kit: Kit) -> None:
    async with kit.edge(keep=True) as edge:
        key = await edge.create_key("p")
        token = (await edge.create(spec(), project="p")).sandbox.token
        assert token is not None
    raw = b"".join(path.read_bytes() for path in kit.state.rglob("*") if path.is_file())
    for secret in (key, token):
        assert secret.encode() not in raw
        assert secret.rpartition("_")[2].encode() not in raw
    with sqlite3.connect(kit.state / "edge.db") as database:
        (kept,) = database.execute("select token from sandboxes").fetchone()
    assert len(bytes.fromhex(kept)) == 32
    async with kit.edge() as edge:
        assert edge.authenticate(token).sandbox_id is not None


@pytest.mark.parametrize(
    "bearer", ["", "x", "dsk_", "dst_", "dst_x_y", "dsk_" + "A" * 43, "\udcff", "dst_" + "0" * 24 + "_x"]
)
async def test_anything_else_is_nobody(kit: Kit, bearer: str) -> None:
    async with kit.edge() as edge:
        await edge.create_key("p")
        with pytest.raises(Unauthenticated):
            edge.authenticate(bearer)


async def test_a_token_reaches_its_sandbox_alone(kit: Kit) -> None:
    async with kit.edge() as edge:
        one = (await edge.create(spec(), project="p")).sandbox
        two = (await edge.create(spec(), project="p")).sandbox
        assert one.token is not None
        assert two.token is not None
        assert one.token != two.token
        principal = edge.authenticate(one.token)
        edge.authorize(principal, one.id)
        with pytest.raises(PermissionDenied):
            edge.authorize(principal, two.id)
        with pytest.raises(Unauthenticated):
            edge.authenticate(one.token.replace(one.id, two.id))
        with pytest.raises(Unauthenticated):
            edge.authenticate(one.token[:-1] + ("A" if one.token[-1] != "A" else "B"))
        await edge.delete(one.id)
        edge.authorize(edge.authenticate(one.token), one.id)  # it may still ask why its sandbox ended


async def test_other_projects_sandboxes_look_like_none(kit: Kit) -> None:
    async with kit.edge() as edge:
        mine, theirs = await edge.create_key("mine"), await edge.create_key("theirs")
        box = (await edge.create(spec(), project="mine")).sandbox.id
        edge.authorize(edge.authenticate(mine), box)
        messages = []
        for sandbox_id in (box, box[::-1]):
            with pytest.raises(SandboxNotFound) as caught:
                edge.authorize(edge.authenticate(theirs), sandbox_id)
            messages.append(caught.value.message.replace(sandbox_id, "ID"))
        assert messages[0] == messages[1]


async def test_bad_projects(kit: Kit) -> None:
    async with kit.edge() as edge:
        for project in ("", "-x", "a b", "x" * 201):
            with pytest.raises(InvalidRequest):
                await edge.create_key(project)

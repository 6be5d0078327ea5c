"""Environments in use: layers stacked by the dozen, what images say about commands, and whose names they are."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from dsec.errors import Conflict, EnvironmentNotFound, InvalidRequest, NotFound
from dsec.spec.sandbox import SandboxSpec
from dsec.store.environments import SCRATCH, Environment, EnvironmentStore, merged_config
from dsec.store.format import ImageConfig
from dsec.store.tree import Node, directory

pytestmark = pytest.mark.root


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    (tmp_path / "state").mkdir()
    return EnvironmentStore(tmp_path / "state")


def layer(store: EnvironmentStore, name: str, config: ImageConfig | None = None) -> str:
    top = directory()
    top.children[name.encode()] = Node(stat.S_IFREG | 0o644)
    with store.layers.making() as maker:
        return maker.finish(top, "workspace", config=config).digest


def test_configurations_merge_by_clear_rules() -> None:
    top = ImageConfig(env={"A": "top"}, workdir="/top")
    middle = ImageConfig(env={"A": "middle", "B": "middle"}, user="m", entrypoint=["/e"], cmd=["c"])
    bottom = ImageConfig(env={"B": "bottom", "C": "bottom"}, user="b", workdir="/bottom", cmd=["other"])
    assert merged_config([top, middle, bottom]) == ImageConfig(
        env={"A": "top", "B": "middle", "C": "bottom"}, user="m", workdir="/top", entrypoint=["/e"], cmd=["c"]
    )
    assert merged_config([]) == ImageConfig()


def test_a_spec_is_resolved(store: EnvironmentStore) -> None:
    base = layer(store, "base", ImageConfig(env={"A": "1", "PATH": "/p", "HOME": "/root"}, user="7:8", workdir="/w"))
    tool = layer(store, "tool", ImageConfig(env={"A": "2", "T": "t"}, workdir="/tool"))
    made = store.put("app", [base], env={"B": "own"}, project="p")
    assert (made.user, made.workdir, made.env["A"]) == ("7:8", "/w", "1")
    plain = store.resolve(SandboxSpec(environment="app"), "p")
    assert plain.layers == [base, store.runtime()]
    assert (plain.user, plain.workdir) == ("7:8", "/w")
    assert plain.env == {"A": "1", "B": "own", "PATH": "/p"}, "root's home is nobody else's"
    store.name_layer("tool@1", tool, project="p")
    asked = SandboxSpec(environment="app", layers=["tool@1"], env={"B": "mine"}, user="root")
    found = store.resolve(asked, "p")
    assert found.layers == [tool, base, store.runtime()]
    assert (found.user, found.workdir) == ("root", "/tool")
    assert found.env == {"A": "2", "T": "t", "B": "mine", "PATH": "/p", "HOME": "/root"}
    assert store.resolve(found, "p") == found
    assert store.resolve(SandboxSpec(environment=SCRATCH, layers=[tool]), "p").layers == [tool, store.runtime()]
    replaced = store.put("app", [tool], user="u", workdir="/x", project="p")
    assert (replaced.user, replaced.workdir) == ("u", "/x")
    with pytest.raises(InvalidRequest, match="limit"):
        store.put("many", [tool] * 401)


def test_hidden_layers_do_not_exist_for_others(store: EnvironmentStore) -> None:
    shown, hidden = layer(store, "shown"), layer(store, "hidden")
    store.put("both", [shown], project="agents")
    store.put("both", [hidden], project="graders")
    store.put("read", [shown], project="graders", readers=["agents"])
    store.put("all", [shown], project="graders", readers=["*"])
    store.put("node", [shown])
    store.name_layer("tests@1", hidden, project="graders")
    store.name_layer("tools@1", shown, project="graders", readers=["agents"])
    for again in (store, EnvironmentStore(store.layers.root.parents[1])):
        assert [e.name for e in again.list("agents")] == ["all", "both", "node", "read"]
        assert [e.name for e in again.list("strangers")] == ["all", "node"]
        assert again.get("both", "agents").layers[0] == shown
        assert again.get("both", "graders").layers[0] == hidden
        assert [n.name for n in again.layer_names("agents")] == ["tools@1"]
        assert again.find_layer("tools@1", "agents") == again.find_layer(shown, "agents") == shown
        for reference in ("tests@1", hidden):
            with pytest.raises(NotFound):
                again.find_layer(reference, "agents")
            with pytest.raises(NotFound):
                again.resolve(SandboxSpec(environment="both", layers=[reference]), "agents")
            assert again.find_layer(reference, "graders") == hidden
        with pytest.raises(EnvironmentNotFound) as error:
            again.get("read", "strangers")
        assert "read" not in error.value.remedy
    assert not store.remove("both", "strangers")
    assert store.remove("both", "graders")
    assert not store.remove("both", "graders")
    assert store.get("both", "agents").layers[0] == shown
    assert hidden not in store.unused_layers(), "its name is left"
    assert store.remove_layer_name("tests@1", "graders")
    assert store.unused_layers() == {hidden}


def test_a_layers_name_stays_what_it_is(store: EnvironmentStore) -> None:
    one, two = layer(store, "one"), layer(store, "two")
    store.name_layer("a/b@1.0", one, project="p")
    store.name_layer("a/b@1.0", one, project="p", readers=["q"])
    assert store.find_layer("a/b@1.0", "q") == one
    with pytest.raises(Conflict):
        store.name_layer("a/b@1.0", two, project="p")
    store.name_layer("a/b@1.0", two, project="q")
    assert store.find_layer("a/b@1.0", "q") == two
    for bad in ("", "a", "a@", "@1", "a b@1", "../a@1", "a@1/2", "x" * 300):
        with pytest.raises(InvalidRequest):
            store.name_layer(bad, one)
    with pytest.raises(NotFound):
        store.name_layer("c@1", "0" * 64)


def test_environments_of_the_first_version_are_read(store: EnvironmentStore, tmp_path: Path) -> None:
    path = tmp_path / "state" / "store" / "environments" / "old.json"
    path.write_text('{"name":"old","layers":["%s"],"env":{"A":"1"},"workdir":"/w","created_at":1.5}' % ("0" * 64))
    found: Any = EnvironmentStore(tmp_path / "state").get("old", "anybody")
    assert found == Environment(name="old", layers=("0" * 64,), env={"A": "1"}, workdir="/w", created_at=1.5)

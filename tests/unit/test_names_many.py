"""Names of projects: what is found, listed and refreshed, against the rules said plainly."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.store.environments import LayerName
from dsec.store.names import Names, may_read

PROJECTS = ["", "a", "b"]
NAMES = ["x@1", "y@1", "z/z@2"]
_ITEM = st.builds(
    LayerName,
    name=st.sampled_from(NAMES),
    layer=st.sampled_from(["1" * 64, "2" * 64]),
    project=st.sampled_from(PROJECTS),
    readers=st.sampled_from([[], ["b"], ["*"]]),
)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "learn", "forget", "refresh", "other"]), _ITEM), max_size=12
)


def _wanted(
    own: dict[tuple[str, str], LayerName], learnt: dict[tuple[str, str], LayerName], name: str, who: str
) -> object:
    for known in (own, learnt):
        for owner in (who, ""):
            if (owner, name) in known:
                return known[owner, name]
    rest = sorted((learnt | own).items())
    return next((item for (_, each), item in rest if each == name and may_read(item, who)), None)


@settings(max_examples=60, deadline=None)
@given(_STEPS)
def test_names_are_what_was_put_learnt_and_made_by_others(steps: list[tuple[str, LayerName]]) -> None:
    with tempfile.TemporaryDirectory() as top:
        names, others = Names(Path(top), LayerName), Names(Path(top), LayerName)
        disk: dict[tuple[str, str], LayerName] = {}
        learnt: dict[tuple[str, str], LayerName] = {}
        for step, item in steps:
            key, version = (item.project, item.name), names.version
            match step:
                case "put":
                    names.put(item)
                    disk[key] = item
                case "other":  # another process replaces one
                    others.put(item)
                    disk[key] = item
                    names.refresh()
                case "remove":
                    assert names.remove(item.name, item.project) == (key in disk)
                    disk.pop(key, None)
                case "learn":
                    names.learn(item)
                    learnt[key] = item
                case "forget":
                    names.forget(item.name, item.project)
                    learnt.pop(key, None)
                case _:
                    names.refresh()
            assert names.version != version or step in ("refresh", "other")
            for who in PROJECTS[1:]:
                for name in NAMES:
                    assert names.find(name, who) == _wanted(disk, learnt, name, who)
                assert {(each.project, each.name) for each in names.list(who)} == {
                    each for each, item in (learnt | disk).items() if may_read(item, who)
                }
                own = {name for project, name in disk | learnt if project in ("", who)}
                assert set(names.some(who, 10)) == own
        others.refresh()
        assert {(each.project, each.name): each for each in others.list(None)} == disk


def test_what_another_process_removed_is_gone_after_a_refresh(tmp_path: Path) -> None:
    one, other = Names(tmp_path, LayerName), Names(tmp_path, LayerName)
    one.put(LayerName(name="x@1", layer="1" * 64, project="a"))
    other.refresh()
    assert other.find("x@1", "a") is not None
    assert one.remove("x@1", "a")
    other.refresh()
    assert other.find("x@1", "a") is None
    assert other.list(None) == []

"""The bounded cache of lazy layers, on the real kernel: what goes, and that nothing wrong is ever read or kept."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lazy_kit import Node, node
from test_store_lazy import digest, filled, published

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZES = [MIB] * 6


def blocks(made: Node, layer: str) -> int:
    """Bytes on the disk of a layer's data."""
    return (made.cache / layer / "data").stat().st_blocks * 512


def fetched(made: Node) -> int:
    """Bytes of all layers that were fetched so far."""
    return sum(each["fetched_bytes"] for each in made.call("status")["ok"]["layers"].values())  # type: ignore[index]


def until(condition: object, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_longest_unread_layer_that_nothing_mounts_goes_first(tmp_path: Path) -> None:
    with node(tmp_path, most_bytes=9 * MIB, idle_s=1.0) as made:
        layers = [published(made, seed, SIZES) for seed in range(2)]
        for layer, digests in layers:
            assert "ok" in made.call("attach", layer)
            top = made.mount(layer)
            assert {name: digest(top / name) for name in digests} == digests
            made.unmount_last()
            made.call("release", layer)
            time.sleep(0.1)
        until(lambda: not (made.cache / layers[0][0]).exists())
        assert (made.cache / layers[1][0]).exists()
        top = made.mount(layers[0][0])  # and it comes back
        assert digest(top / "f0") == layers[0][1]["f0"]


def test_a_mounted_layer_at_rest_is_emptied_and_comes_back_right(tmp_path: Path) -> None:
    with node(tmp_path, most_bytes=MIB, idle_s=1.0) as made:
        layer, digests = published(made, 1, SIZES)
        top = made.mount(layer)
        names = list(digests)[:0:-1]  # not all: one that is here whole asks no more. Backwards: nothing ahead
        assert {name: digest(top / name) for name in names} == {name: digests[name] for name in names}
        assert fetched(made) >= 5 * MIB
        until(lambda: blocks(made, layer) == 0)
        made.forget_pages(top)
        assert {name: digest(top / name) for name in digests} == digests


@pytest.mark.parametrize("delay_s", [0.005, 0.0], ids=["by the filler", "by the copier"])
def test_no_byte_is_wrong_while_layers_are_emptied_under_their_readers(tmp_path: Path, delay_s: float) -> None:
    with node(tmp_path, most_bytes=MIB, idle_s=0.4, delay_s=delay_s) as made:
        layers = [
            (made.mount(layer), digests) for layer, digests in (published(made, seed, SIZES) for seed in range(2))
        ]
        wrong: list[str] = []
        over = threading.Event()

        def read(number: int) -> None:
            dice = random.Random(number)
            while not over.is_set():
                top, digests = layers[number % 2]
                name = dice.choice(list(digests)[:-1])
                if digest(top / name) != digests[name]:
                    wrong.append(name)
                made.forget_pages(top, name)
                time.sleep(dice.choice([0, 0.01, 1.5]))

        readers = [threading.Thread(target=read, args=[number]) for number in range(4)]
        for reader in readers:
            reader.start()
        try:
            time.sleep(6)
            until(lambda: fetched(made) > 10 * MIB)  # some of it twice: it had been emptied
        finally:
            over.set()
            for reader in readers:
                reader.join(240)
        assert wrong == []


def test_a_complete_layer_that_is_mounted_asks_again_when_room_is_needed(tmp_path: Path) -> None:
    with node(tmp_path, most_bytes=MIB, idle_s=1.0) as made:
        layer, digests = published(made, 1, SIZES)
        top = made.mount(layer)
        assert "ok" in made.call("complete", layer)
        again = made.mount(layer)  # while it is complete
        with ThreadPoolExecutor(2) as pool:  # nothing is taken away while it is read
            for _ in range(15):
                made.forget_pages(top)
                assert list(pool.map(lambda at: digest(at / "f3"), (top, again))) == [digests["f3"]] * 2
                time.sleep(0.2)
        until(lambda: blocks(made, layer) == 0)
        for at in (top, again):
            made.forget_pages(at)
            assert {name: digest(at / name) for name in digests} == digests


def test_a_complete_layer_of_an_older_version_is_not_emptied(tmp_path: Path) -> None:
    """It may be mounted where its reads can't ask, also after the filler that knew that is gone."""
    with node(tmp_path, most_bytes=MIB, idle_s=0.4) as made:
        layer, digests = published(made, 1, SIZES)
        made.call("attach", layer)
        assert "ok" in made.call("complete", layer)
        (made.cache / layer / "asks").unlink()
        made.stop_filler()
        made.start_filler()
        answer = made.call("attach", layer)["ok"]
        assert answer["complete"]  # type: ignore[index]
        top = made.mount(layer, marked=False)
        time.sleep(3)  # several looks at what to evict
        made.forget_pages(top)
        assert {name: digest(top / name) for name in digests} == digests


def test_what_a_dead_filler_left_counts_and_goes_when_nothing_mounts_it(tmp_path: Path) -> None:
    with node(tmp_path, most_bytes=MIB, idle_s=0.4) as made:
        layer, _ = published(made, 1, SIZES)
        made.call("attach", layer)
        made.kill_filler()
        made.start_filler()
        made.call("release", layer)
        time.sleep(1)
        assert (made.cache / layer).exists()  # it is small: the bound is for data
        made.call("attach", layer)
        assert "ok" in made.call("complete", layer)
        made.kill_filler()
        made.start_filler()
        made.call("release", layer)
        until(lambda: not (made.cache / layer).exists())


def test_a_full_disk_is_an_error_and_nothing_wrong_stays(tmp_path: Path) -> None:
    with node(tmp_path, cache_bytes=4 * MIB) as made:
        layer, digests = published(made, 1, SIZES)
        top = made.mount(layer)
        failed = 0
        for name in digests:
            try:
                read = digest(top / name)
            except OSError:
                failed += 1
            else:
                assert read == digests[name]
        assert 2 <= failed < len(digests)
        assert filled(made, layer) <= 4 * MIB
        made.grow_disk()
        made.forget_pages(top)
        assert {name: digest(top / name) for name in digests} == digests


def test_many_reads_that_wait_do_not_hold_up_what_is_there(tmp_path: Path) -> None:
    """A sandbox reads, with as many threads as it may have, what a slow store doesn't hand out."""
    with node(tmp_path) as made:
        wanted, truth = published(made, 1, [65_536] * 400)
        filled_layer, digests = published(made, 2, [MIB] * 2)
        slow, there = made.mount(wanted), made.mount(filled_layer)
        assert digest(there / "f0") == digests["f0"]
        made.forget_pages(there)
        made.stop_filler()  # a store that doesn't answer at all
        ended: list[str] = []
        readers = [
            threading.Thread(target=lambda name=name: ended.append(digest(slow / name)))  # type: ignore[misc]
            for name in truth
        ]
        for reader in readers:
            reader.start()
        until(lambda: made.waiting() >= 300)
        assert digest(there / "f0") == digests["f0"]
        assert not ended
        made.start_filler()
        for reader in readers:
            reader.join(240)
        assert sorted(ended) == sorted(truth.values())

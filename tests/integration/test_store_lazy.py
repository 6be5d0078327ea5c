"""Layers filled on demand, on the real kernel: every byte that is read is the layer's, whoever dies in between."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native_guest
import pytest
from lazy_kit import Node, make_tree, node, older_holder, publish

pytestmark = pytest.mark.root

SIZES = [300_000, 1 << 20, 5_000, 70_000, 64_000, 2_000_000, 131_072] * 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def published(made: Node, seed: int = 1, sizes: list[int] | None = None) -> tuple[str, dict[str, str]]:
    digests = make_tree(made.root / f"tree{seed}", seed, sizes or SIZES)
    scratch = made.root / f"scratch{seed}"
    scratch.mkdir()
    return publish(made.root / f"tree{seed}", scratch, made.store), digests


def digest(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def filled(made: Node, layer: str) -> int:
    status = made.call("status")
    return status["ok"]["layers"][layer]["filled_bytes"]  # type: ignore[index, no-any-return]


def settled(made: Node, layer: str) -> dict[str, int]:
    """A layer's status once all that is fetched ahead is written too: what was fetched twice stays too much."""
    deadline = time.monotonic() + 120
    while True:
        status: dict[str, int] = made.call("status")["ok"]["layers"][layer]  # type: ignore[index]
        if status["fetched_bytes"] == status["filled_bytes"] or time.monotonic() > deadline:
            return status
        time.sleep(0.02)


def test_only_what_is_read_is_fetched_and_it_is_right(root: Path) -> None:
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        assert filled(made, layer) == 0
        assert digest(top / "f2") == digests["f2"]
        assert 0 < filled(made, layer) <= 131_072
        assert {name: digest(top / name) for name in digests} == digests
        status = made.call("status")["ok"]
        assert status["layers"][layer]["filled_bytes"] == status["layers"][layer]["bytes"]  # type: ignore[index]
        assert status["holder"]["failed"] == 0  # type: ignore[index]


def test_readers_of_one_chunk_fetch_it_once(root: Path) -> None:
    with node(root, delay_s=0.05) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        with ThreadPoolExecutor(20) as pool:
            assert set(pool.map(lambda _: digest(top / "f5"), range(20))) == {digests["f5"]}
        status = settled(made, layer)
        assert status["fetched_bytes"] == status["filled_bytes"]


@pytest.mark.parametrize("delay_s", [0.01, 0.0], ids=["by the filler", "by the copier"])
def test_the_filler_is_killed_under_fifty_readers(root: Path, delay_s: float) -> None:
    with node(root, delay_s=delay_s) as made:
        layers = [published(made, seed) for seed in range(2)]
        tops = [(made.mount(layer), digests) for layer, digests in layers]
        wrong: list[str] = []

        def read(number: int) -> None:
            rng = random.Random(number)
            for _ in range(6):
                top, digests = rng.choice(tops)
                name = rng.choice(list(digests))
                if digest(top / name) != digests[name]:
                    wrong.append(f"{top}/{name}")

        readers = [threading.Thread(target=read, args=[number]) for number in range(50)]
        for reader in readers:
            reader.start()
        for _ in range(5):
            time.sleep(10 * delay_s)
            made.kill_filler()
            made.start_filler()
        for reader in readers:
            reader.join(240)
        assert not any(reader.is_alive() for reader in readers)
        assert wrong == []
        assert made.call("status")["ok"]["holder"]["failed"] == 0  # type: ignore[index]


def test_the_copier_is_killed_under_fifty_readers(root: Path) -> None:
    """It is stopped first, so that there are reads which it was to answer."""
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        stopped = made.copiers()
        assert stopped
        for pid in stopped:
            native_guest.stop(pid)
        with ThreadPoolExecutor(50) as pool:
            results = [(name, pool.submit(digest, top / name)) for name in [*digests, *digests, *digests][:50]]
            while not made.waiting():
                time.sleep(0.01)
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            assert [name for name, result in results if result.result(240) != digests[name]] == []
        assert made.call("status")["ok"]["holder"]["failed"] == 0  # type: ignore[index]


def test_the_filler_is_killed_and_its_copier_is_late(root: Path) -> None:
    """What it had been told to write it writes beside the next filler; then it ends."""
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        late = made.copiers()
        for pid in late:
            native_guest.stop(pid)
        with ThreadPoolExecutor(20) as pool:
            results = [(name, pool.submit(digest, top / name)) for name in [*digests][:20]]
            while not made.waiting():
                time.sleep(0.01)
            made.kill_filler()
            made.start_filler()
            for pid in late:
                os.kill(pid, signal.SIGCONT)
            assert [name for name, result in results if result.result(240) != digests[name]] == []
        made.forget_pages(top)
        assert {name: digest(top / name) for name in digests} == digests
        assert all(native_guest.gone(pid) for pid in late)


def test_nothing_is_taken_away_while_the_copier_of_a_dead_filler_is_late(root: Path) -> None:
    """It may be about to note a chunk that it has written: taken away before that, it would be zeros."""
    with node(root, most_bytes=0, idle_s=0.4) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        assert digest(top / "f1") == digests["f1"]
        late = made.copiers()
        for pid in late:
            native_guest.stop(pid)
        made.kill_filler()
        made.start_filler()
        time.sleep(3)  # several looks at what to evict
        assert filled(made, layer) >= SIZES[1]
        for pid in late:
            os.kill(pid, signal.SIGCONT)
        while filled(made, layer):
            time.sleep(0.1)
        made.forget_pages(top)
        assert {name: digest(top / name) for name in digests} == digests


@pytest.mark.parametrize("trouble", ["changed", "shorter", "gone"])
def test_an_object_that_is_not_what_it_was(root: Path, trouble: str) -> None:
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        (pack,) = (made.store / "packs").iterdir()
        content = pack.read_bytes()
        match trouble:
            case "changed":
                pack.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            case "shorter":
                pack.write_bytes(content[:1000])
            case _:
                pack.unlink()
        with pytest.raises(OSError, match="Input/output error"):
            digest(top / "f0")
        assert filled(made, layer) == 0 or trouble == "changed"  # its other chunks are right
        pack.write_bytes(content)
        assert {name: digest(top / name) for name in digests} == digests


def test_the_holder_is_killed_and_its_successor_answers(root: Path) -> None:
    with node(root, delay_s=0.02) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        made.keep()
        with ThreadPoolExecutor(30) as pool:
            results = [pool.submit(digest, top / name) for name in digests]
            for _ in range(3):
                time.sleep(0.1)
                made.kill_holder()
                time.sleep(0.05)
                made.succeed_holder()
                assert made.filler is not None
                made.filler.wait(120)  # it ends with its holder; the server starts another
                made.control_path.unlink(missing_ok=True)
                made.start_filler()
            found = []
            for result, name in zip(results, digests, strict=True):
                try:
                    assert result.result(240) == digests[name]
                except OSError:  # the one event that was between the kernel and the table
                    found.append(name)
            assert len(found) <= 3
        assert {name: digest(top / name) for name in digests} == digests


def test_a_successor_inherits_an_older_holders_smaller_table(root: Path, tmp_path: Path) -> None:
    """An upgrade: who waited at the older one is answered by the new one."""
    with node(root, program=older_holder(tmp_path)) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        made.keep()
        made.kill_filler()
        with ThreadPoolExecutor(len(digests)) as pool:
            results = {name: pool.submit(digest, top / name) for name in digests}
            until = time.monotonic() + 120
            while made.waiting() < len(digests):
                assert time.monotonic() < until
                time.sleep(0.01)
            assert made.kept is not None
            older = os.fstat(made.kept[1]).st_size
            made.kill_holder()
            made.succeed_holder()
            assert os.fstat(made.kept[1]).st_size > older
            assert made.waiting() == len(digests)
            made.start_filler()
            assert {name: result.result(240) for name, result in results.items()} == digests


def test_a_layer_that_can_not_be_attached_leaves_nothing(root: Path) -> None:
    with node(root) as made:
        layer, digests = published(made)
        for part in ("manifests", "placements", "metadata"):
            (path,) = (made.store / part).iterdir()
            content = path.read_bytes()
            for fault in ("gone", "wrong"):
                path.unlink()
                if fault == "wrong":
                    path.write_bytes(content[:-1] + b"?")
                assert "error" in made.call("attach", layer), (part, fault)
                assert not (made.cache / layer).exists()
                begun = list(made.cache.glob(".begun-*"))
                assert begun
                assert not any((each / "meta.erofs").stat().st_size for each in begun), (part, fault)
                path.write_bytes(content)
        top = made.mount(layer)
        assert {name: digest(top / name) for name in digests} == digests


@pytest.mark.parametrize("table", ["empty", "of another form", "of a newer one"])
def test_readers_in_a_table_that_a_holder_does_not_know_do_not_wait_for_ever(root: Path, table: str) -> None:
    """A downgrade, with reads that wait: they fail, unless the kernel tries once more what it read ahead."""
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        made.keep()
        made.kill_filler()
        with ThreadPoolExecutor(5) as pool:
            results = [pool.submit(digest, top / name) for name in list(digests)[:5]]
            while made.waiting() < len(results):
                time.sleep(0.01)
            made.kill_holder()
            assert made.kept is not None
            content = os.pread(made.kept[1], os.fstat(made.kept[1]).st_size, 0)
            other = os.memfd_create("table")
            if table != "empty":
                os.write(other, bytes(8) + content[8:] if table == "of another form" else content + bytes(4096))
            os.close(made.kept[1])
            made.kept = (made.kept[0], other)
            made.succeed_holder()
            made.start_filler()
            for name, result in zip(digests, results, strict=False):
                error = result.exception(240)  # before the deadline
                assert error is None or (isinstance(error, OSError) and error.errno == errno.EIO)
                assert error or result.result() == digests[name]
        made.forget_pages(top)
        assert {name: digest(top / name) for name in digests} == digests


def test_a_store_that_is_gone_is_an_error_in_time_and_nothing_wrong_stays(root: Path) -> None:
    with node(root, deadline_s=5.0) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        (pack,) = (made.store / "packs").iterdir()
        content = pack.read_bytes()
        for trouble in ("gone", "wrong"):
            pack.unlink()
            if trouble == "wrong":
                pack.write_bytes(bytes(byte ^ 1 for byte in content))
            began = time.monotonic()
            with pytest.raises(OSError, match="Input/output error"):
                digest(top / "f1")
            assert time.monotonic() - began < 300
            pack.write_bytes(content)
        assert filled(made, layer) == 0
        assert {name: digest(top / name) for name in digests} == digests


def test_without_any_filler_readers_fail_at_the_deadline(root: Path) -> None:
    with node(root, deadline_s=0.5) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        made.kill_filler()
        with pytest.raises(OSError, match="Input/output error"):
            digest(top / "f0")
        made.start_filler()
        until = time.monotonic() + 120
        while True:  # it may be late again
            try:
                assert digest(top / "f0") == digests["f0"]
                break
            except OSError:
                assert time.monotonic() < until


def test_the_second_node_fetches_what_the_first_one_read(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        assert digest(top / "f3") == digests["f3"]
        made.call("release", layer)
    second = tmp_path_factory.mktemp("second")
    (second / "store").symlink_to(root / "store")
    with node(second) as made:
        made.mount(layer)
        deadline = time.monotonic() + 120
        while not filled(made, layer) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert 0 < filled(made, layer) <= 196_608


def test_a_complete_layer_asks_no_more(root: Path) -> None:
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        assert "ok" in made.call("complete", layer)
        before = made.call("status")["ok"]["holder"]  # type: ignore[index]
        assert {name: digest(top / name) for name in digests} == digests
        assert made.call("status")["ok"]["holder"] == before  # type: ignore[index]


def test_a_power_loss_forgets_what_was_not_on_disk(root: Path) -> None:
    with node(root) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        assert digest(top / "f0") == digests["f0"]
        made.stop_filler()  # syncs
        made.start_filler()
        made.call("attach", layer)
        synced = filled(made, layer)
        assert synced > 0
        assert digest(top / "f1") == digests["f1"]
        assert filled(made, layer) > synced
        made.kill_filler()
    path = root / "cache" / layer / "synced"
    path.write_bytes(b"0" * 36 + path.read_bytes()[36:])  # as if in an earlier boot
    with node(root) as made:
        made.call("attach", layer)
        assert filled(made, layer) == synced

"""Sandboxes on layers that are filled on demand: one can't make the reads of others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lazy_kit import Node, make_tree, node, publish
from security_box import Box, Nursery

pytestmark = pytest.mark.root

MOST = 2048
"""Reads of one sandbox that may wait: PER_READER of native/holder."""
PAGES = MOST + 200


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def mounted(made: Node, seed: int, size: int) -> Path:
    """A layer with one file, of which nothing is here."""
    scratch = made.root / f"scratch{seed}"
    scratch.mkdir()
    make_tree(made.root / f"tree{seed}", seed, [size])
    return made.mount(publish(made.root / f"tree{seed}", scratch, made.store))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_sandbox_does_not_make_the_reads_of_another_wait(
    made: Node, make_box: Callable[..., Box], nursery: Nursery
) -> None:
    theirs, ours = mounted(made, 1, PAGES * 4096), mounted(made, 2, 50_000)
    (pack,) = (path.name for path in (made.store / "packs").iterdir() if path.stat().st_size == PAGES * 4096)
    truth = (made.root / "tree2" / "f0").read_bytes().decode(errors="replace")
    attacker = make_box(pids=PAGES + 50, lowers=(str(theirs), str(nursery.layer)))
    victim = make_box(lowers=(str(ours), str(nursery.layer)))
    made.stop_filler()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(attacker.attack, "pages", "/f0", PAGES)
        until(lambda: made.waiting() == MOST)  # no more, however many it begins
        read = pool.submit(victim.attack, "cat", "/f0")
        until(lambda: made.waiting() == MOST + 1)
        (made.store / "held").write_text(pack)  # the attacker's own has to wait for its store
        made.start_filler()
        assert read.result().out == truth
        assert made.waiting() > MOST // 2  # the attacker's go on waiting: they had not been before it
        holder = made.call("status")["ok"]["holder"]  # type: ignore[index]
        assert holder["failed"] >= PAGES - MOST
        attacker.close()
    (made.store / "held").unlink()
    until(lambda: made.waiting() == 0)
    assert made.holder is not None
    assert made.holder.poll() is None

"""Layers filled on demand through a FUSE file: the way of kernels without pre-content events, on this one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lazy_kit import node
from test_store_lazy import digest, filled, published, settled

from dsec.kernel import loop, mounts
from dsec.kernel.mounts import ErofsMount

pytestmark = pytest.mark.root

MIB = 1 << 20


def test_only_what_is_read_is_fetched_once_and_it_is_right(tmp_path: Path) -> None:
    with node(tmp_path, fuse=True, delay_s=0.01) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        assert filled(made, layer) == 0
        with ThreadPoolExecutor(20) as pool:
            assert set(pool.map(lambda _: digest(top / "f5"), range(20))) == {digests["f5"]}
        status = settled(made, layer)
        assert 2_000_000 <= status["fetched_bytes"] == status["filled_bytes"] < status["bytes"] / 2
        assert {name: digest(top / name) for name in digests} == digests


def test_by_a_loop_device_too(tmp_path: Path) -> None:
    """Linux before 6.12 mounts no files."""
    with node(tmp_path, fuse=True) as made:
        layer, digests = published(made)
        assert "ok" in made.call("attach", layer)
        target = tmp_path / "looped"
        target.mkdir()
        image = made.cache / layer / "meta.erofs"
        with loop.attach(image, readonly=True) as meta, loop.attach(made.marked / layer, readonly=True) as data:
            ErofsMount(meta.path, target, data=data.path).mount()
        try:
            assert {name: digest(target / name) for name in digests} == digests
        finally:
            mounts.unmount(target)


def test_a_server_that_dies_is_an_error_at_once_and_a_new_mount_is_right(tmp_path: Path) -> None:
    with node(tmp_path, fuse=True) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        (made.store / "held").touch()
        outcomes: list[str] = []

        def read(name: str) -> None:
            try:
                outcomes.append("right" if digest(top / name) == digests[name] else "wrong")
            except OSError:
                outcomes.append("error")

        readers = [threading.Thread(target=read, args=[name]) for name in digests]
        for reader in readers:
            reader.start()
        time.sleep(0.2)
        made.kill_filler()
        for reader in readers:
            reader.join(200)  # before the deadline
        assert outcomes == ["error"] * len(digests)
        (made.store / "held").unlink()
        made.start_filler()
        again = made.mount(layer)
        assert {name: digest(again / name) for name in digests} == digests


def test_a_store_that_is_gone_or_wrong_is_an_error_and_nothing_wrong_stays(tmp_path: Path) -> None:
    with node(tmp_path, fuse=True, deadline_s=5.0) as made:
        layer, digests = published(made)
        top = made.mount(layer)
        for trouble in ("gone", "wrong"):
            (made.store / trouble).touch()
            with pytest.raises(OSError, match="Input/output error"):
                digest(top / "f1")
            (made.store / trouble).unlink()
        assert filled(made, layer) == 0
        assert {name: digest(top / name) for name in digests} == digests


def test_what_was_emptied_comes_back_right(tmp_path: Path) -> None:
    with node(tmp_path, fuse=True, most_bytes=MIB, idle_s=0.6) as made:
        layer, digests = published(made, 1, [MIB] * 12)  # more than is read ahead: what is whole is never emptied
        top = made.mount(layer)
        assert {name: digest(top / name) for name in list(digests)[:3]} == dict(list(digests.items())[:3])
        deadline = time.monotonic() + 120
        while filled(made, layer):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        made.forget_pages(top)
        assert {name: digest(top / name) for name in digests} == digests

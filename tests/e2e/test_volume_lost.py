"""A data volume that the kernel has given up, or whose state directory was removed: said plainly, and whole again with
the next server. Real sandboxes, on a small disk of the test's own."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.errors import Unavailable
from dsec.kernel import loop, mounts, syscalls
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec, State
from server_kit import PATIENCE_S, Server, serving, until

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=256 << 20, disk_bytes=256 << 20, pids=64)
WRITE = "dd if=/dev/urandom of=/more bs=1M count=8 2>/dev/null"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 GiB, of which nothing is taken from the host's disk before it is written."""
    image, top = tmp_path / "disk", tmp_path / "small"
    with image.open("wb") as file:
        file.truncate(2 << 30)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    top.mkdir()
    with loop.attach(image) as device:
        syscalls.mount(device.path, top, "ext4")
    yield top
    mounts.unmount(top)
    until(lambda: loop.attached(image) == [])


def fill(disk: Path) -> list[Path]:
    """Take all that is free, root's reserve too. The last file is small."""
    files = [disk / "large", disk / "rest"]
    stat = os.statvfs(disk)
    with files[0].open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - (4 << 20))
    top_up(files[1])
    return files


def top_up(path: Path) -> None:
    """Take what is left."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            pass


def read_only(server: Server) -> bool:
    return bool(os.statvfs(server.config.run / "volume").f_flag & os.ST_RDONLY)


def ready(server: Server) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{server.url}/readyz") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_a_full_disk_below_the_volume(small_disk: Path, state_over: Callable[[Path], Path]) -> None:
    state = state_over(small_disk / "state")
    with serving(state) as server:
        async with server.client() as client:
            kept = await client.create(SMALL)
            assert (await kept.commands.run(["sh", "-c", "echo precious >/kept; sync"])).exit_code == 0
            # One command that is on record already: a full disk has no room for another's record.
            await kept.commands.start(["sh", "-c", f"while :; do {WRITE}; sync; sleep 0.2; done"])
            fillers = fill(small_disk)
            await asyncio.to_thread(until, lambda: read_only(server))
            fillers[1].unlink()
            failed = await kept.commands.run(["sh", "-c", "echo x >/more"])
            assert (failed.exit_code, failed.infra, failed.cause) == (2, True, Cause.INFRA_IMAGE)
            with pytest.raises(Unavailable, match="the data volume has failed"):
                await kept.fork(1)
            status, why = ready(server)
            assert (status, "the data volume has failed" in why) == (503, True)
        server.kill()
        top_up(fillers[1])
        said = len(server.log())
        refused = server.spawn()
        assert refused.wait(PATIENCE_S) == 3
        assert "No space left on device" in server.log()[said:]
        assert "Traceback" not in server.log()[said:]
        for filler in fillers:
            filler.unlink()
        server.start()
        async with server.client() as client:
            info = (await client.connect(kept.id)).info
            assert (info.state, info.cause, info.infra) == (State.ENDED, Cause.NODE_LOST, True)
            assert ready(server)[0] == 200
            async with await client.create(SMALL) as sandbox:
                assert (await sandbox.commands.run(["sh", "-c", "echo x >/more"])).exit_code == 0
                assert server.subvolumes() == {sandbox.id}, "what was lost is gone from the disk too"


async def test_a_state_directory_that_is_removed(debian_state: Path, state_over: Callable[[Path], Path]) -> None:
    with serving(debian_state, on_exit="keep") as server:
        async with server.client() as client:
            await client.create(SMALL)
        server.stop()
        shutil.rmtree(debian_state)
        state_over(debian_state)
        server.start()
        assert "was removed" in server.log()
        assert server.guests() == []
        async with server.client() as client, await client.create(SMALL) as sandbox:
            assert (await sandbox.commands.run(["true"])).exit_code == 0
        mount = mounts.find_mount(server.config.run / "volume")
        assert mount is not None
        assert loop.backing_file(mount.source) == debian_state / "volume.btrfs"
        server.stop()
        shutil.rmtree(debian_state)
        state_over(debian_state)  # else it would compile its programs, which takes long
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "dsec.cli.main", "host", "undo"],
            env=server.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert not server.config.run.exists(), done.stdout

"""The zygote and its client: attach, ends that nobody heard, refusals that leave nothing, one edge at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from security_box import ID_BASE, MIB, Box, Nursery

from dsec.backends.container.zygote import ZygoteClient, start_zygote
from dsec.channel import SocketChannel
from dsec.edge.config import SystemClock
from dsec.errors import CreateFailed, SandboxNotFound, Unavailable
from dsec.spec.operations import OpEnd, OpRequest
from server_kit import until

pytestmark = pytest.mark.root


@pytest.fixture
def own(native_programs: Path) -> Any:
    """A nursery of the test's own: these tests take its connection or its zygote away."""
    name = f"dsec-zygote-{os.getpid()}"
    nursery = Nursery(Path("/run/dsec") / name, name, native_programs)
    yield nursery
    if not nursery.gone:
        nursery.close()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def wait_for_end(pid: int) -> None:
    """Of a process that isn't ours to wait for; a zombie counts as ended."""
    deadline = time.monotonic() + 120
    while os.path.lexists(f"/proc/{pid}/exe") and time.monotonic() < deadline:
        try:
            Path(f"/proc/{pid}/exe").readlink()
        except OSError:
            return
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_phases_are_measured(make_box: Callable[..., Box]) -> None:
    spawned = make_box().spawned
    assert 0 < spawned.mount_ns < spawned.total_ns
    assert 0 < spawned.clone_ns < spawned.total_ns
    assert 0 < spawned.setup_ns < spawned.total_ns
    assert spawned.pidfd >= 0


def test_a_fresh_channel_takes_over(make_box: Callable[..., Box], nursery: Nursery) -> None:
    box = make_box()

    async def take_over() -> bytes:
        spawned = await nursery.client.attach(box.sandbox)
        assert spawned.pid == box.spawned.pid
        os.close(spawned.pidfd)
        channel = await SocketChannel.open(spawned.channel, clock=SystemClock())
        operation = await channel.start(OpRequest(argv=(b"/bin/attack", b"ids")))
        out = b"".join([piece.data async for piece in operation.read() if not isinstance(piece, OpEnd)])
        await operation.release()
        await box.channel.close()
        box.channel = channel
        return out

    assert nursery.wait(take_over()) == b"0 0 0 0\n"
    assert box.attack("exit", 6).exit == 6


def test_a_new_edge_learns_what_lives_and_what_ended_meanwhile(own: Nursery) -> None:
    lives, dies = own.make(), own.make()
    own.client.close()
    os.kill(dies.spawned.pid, signal.SIGKILL)

    async def again() -> tuple[Any, Any]:
        own.client = ZygoteClient(on_exit=own.exited)
        first = await own.client.connect(own.socket)
        if dies.sandbox not in first.ended:
            await own.end_of(dies.sandbox)
        own.client.close()  # not forgotten: told again
        own.client = ZygoteClient(on_exit=own.exited)
        second = await own.client.connect(own.socket)
        own.ended[dies.sandbox] = second.ended[dies.sandbox][1]
        return first, second

    first, second = own.wait(again())
    assert first.epoch == second.epoch == own.zygote.epoch
    assert second.live == {lives.sandbox: lives.spawned.pid}
    assert second.ended == {dies.sandbox: (dies.spawned.pid, signal.SIGKILL)}
    with pytest.raises(SandboxNotFound):
        own.wait(own.client.attach(dies.sandbox))
    with pytest.raises(Unavailable):
        own.wait(own.client.forget(lives.sandbox))
    own.wait(own.client.forget(dies.sandbox))
    own.wait(own.client.forget(dies.sandbox))
    assert lives.attack("exit", 0).exit == 0, "the channel outlived the connection to the zygote"


def test_a_second_edge_replaces_the_first(own: Nursery) -> None:
    lost = asyncio.Event()

    async def replace() -> None:
        own.client._on_lost = lost.set
        newer = ZygoteClient(on_exit=own.exited)
        await newer.connect(own.socket)
        await asyncio.wait_for(lost.wait(), 110)
        with pytest.raises(Unavailable):
            await own.client.forget("box1")
        own.client = newer

    own.wait(replace())
    assert own.make().attack("exit", 0).exit == 0


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"id_base": 0}, "id range"),
        ({"id_base": 1000}, "id range"),
        ({"id_count": 0}, "id range"),
        ({"sandbox": "UPPER"}, "not acceptable"),
        ({"sandbox": "../x"}, "not acceptable"),
        ({"hostname": "a b"}, "not acceptable"),
        ({"upper": "relative"}, "not acceptable"),
        ({"lowers": ()}, "all needed"),
        ({"lowers": ("/run/dsec/none",)}, "overlay"),
        ({"dev": "/run/dsec/none"}, "/dev"),
        ({"view": "/run/dsec/none"}, "generated"),
        ({"cgroup2": "/run/dsec/none"}, "cgroup v2"),
        ({"cgroups": ("/run/dsec/none",)}, "v1 cgroup"),
        ({"cpus": (8000,)}, "affinity"),
        ({"oom_score_adj": 2000}, "not acceptable"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing(nursery: Nursery, change: dict[str, Any], stage: str) -> None:
    nursery.make().close()
    before = descriptors(nursery.zygote.pid)
    for _ in range(3):
        with pytest.raises(CreateFailed, match=stage):
            nursery.make(**change)
    nursery.make().close()
    assert descriptors(nursery.zygote.pid) <= before + 32, "at most the pool of net namespaces grew"
    children = Path(f"/proc/{nursery.zygote.pid}/task/{nursery.zygote.pid}/children")
    until(lambda: len(children.read_text().split()) == len(nursery.boxes))


def test_an_id_is_used_once(make_box: Callable[..., Box], nursery: Nursery) -> None:
    box = make_box()
    with pytest.raises(CreateFailed, match="exists"):
        nursery.make(sandbox=box.sandbox)


def test_many_layers(make_box: Callable[..., Box], nursery: Nursery, tmp_path: Path) -> None:
    """A request of more than one frame would need paths that no mount takes; a long one is fine."""
    layers = []
    for number in range(60):
        layer = nursery.root / f"extra-{'x' * 100}-{number}"
        layer.mkdir(exist_ok=True)
        (layer / f"from{number}").write_text(f"{number}\n")
        layers.append(str(layer))
    box = make_box(lowers=(*layers, str(nursery.layer)))
    assert box.attack("cat", "/from0").out == "0\n"
    assert box.attack("cat", "/from59").out == "59\n"


def test_affinity(make_box: Callable[..., Box]) -> None:
    cpu = max(os.sched_getaffinity(0))
    text = make_box(cpus=(cpu,)).attack("cat", "/proc/self/status").out
    assert f"Cpus_allowed_list:\t{cpu}\n" in text


def test_descriptors_of_the_zygote_do_not_leak(nursery: Nursery) -> None:
    boxes = [nursery.make(memory_bytes=32 * MIB) for _ in range(3)]
    many = descriptors(nursery.zygote.pid)
    for box in boxes:
        box.close()
    deadline = time.monotonic() + 120
    while descriptors(nursery.zygote.pid) > many - 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(5):
        nursery.make().close()
    assert descriptors(nursery.zygote.pid) <= many + 32


def test_the_socket_is_roots(nursery: Nursery) -> None:
    assert nursery.socket.stat().st_mode & 0o777 == 0o600
    assert nursery.socket.stat().st_uid == 0
    pid = os.fork()
    if pid == 0:
        os.setuid(ID_BASE)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            os._exit(0 if sock.connect_ex(str(nursery.socket)) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_nonsense_ends_the_connection_only(own: Nursery) -> None:
    box = own.make()
    own.client.close()
    for packet in (b"x", b"\0" * 16, b"\0" * 15 + b"\x82", bytes.fromhex("00000000820000000100000000000000")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(120)
            sock.connect(str(own.socket))
            sock.send(packet)
            assert sock.recv(100) == b""
    own.client = ZygoteClient(on_exit=own.exited)
    assert own.wait(own.client.connect(own.socket)).live == {box.sandbox: box.spawned.pid}


def test_one_zygote_a_socket(nursery: Nursery) -> None:
    native = nursery.native
    with pytest.raises(Unavailable, match="does another zygote serve there"):
        nursery.wait(start_zygote(native, nursery.socket, unit="dsec-test"))
    alone = nursery.root / "alone"
    alone.mkdir()
    (alone / "zygote").symlink_to(native / "zygote")
    with pytest.raises(Unavailable, match="a program for inside"):
        nursery.wait(start_zygote(alone, nursery.root / "other.sock", unit="dsec-test"))
    assert nursery.make().attack("exit", 0).exit == 0


def test_shutdown_ends_all(own: Nursery) -> None:
    boxes = [own.make() for _ in range(5)]
    own.wait(own.client.shutdown())
    assert not own.socket.exists()
    wait_for_end(own.zygote.pid)
    assert not any(Path(f"/proc/{box.spawned.pid}").exists() for box in boxes)
    own.abandon()


def test_sigterm_is_a_shutdown(own: Nursery) -> None:
    box = own.make()
    os.kill(own.zygote.pid, signal.SIGTERM)
    wait_for_end(own.zygote.pid)
    assert not Path(f"/proc/{box.spawned.pid}").exists()
    own.abandon()

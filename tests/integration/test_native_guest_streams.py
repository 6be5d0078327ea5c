"""The guest watches directories and connects to ports: what is told, what is followed, what is bounded; both directions
of a connection, half-closed ones, refused ones. As it ships and with sanitizers."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from native_guest import CONNECT, EXITED, KILLED, START_FAILED, WATCH, Guest, Op, built, gone, running

from dsec.spec.sandbox import FileEvent
from dsec.wire.events import ConnectDecoder, EventDecoder
from dsec.wire.frames import MAX_WATCHES, FrameType
from free_port import free_port

pytestmark = pytest.mark.root
RECURSIVE = 2
FILE_STAGE, CONNECT_STAGE = 6, 9


@pytest.fixture(params=["static", "sanitized"])
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    with running(built(request.param), cgroup=False) as found:
        yield found


class Watched:
    """A watch and what it has told."""

    def __init__(self, guest: Guest, path: Path | str, *, recursive: bool = True, **fields: object) -> None:
        self.guest = guest
        self.decoder = EventDecoder()
        self.events: list[FileEvent] = []
        self._taken = 0
        flags = {"file_flags": RECURSIVE} if recursive else {}
        self.op: Op = guest.start(WATCH, path=str(path), **flags, **fields)
        while not self.decoder.began and self.op.end is None:
            self.step()

    def step(self) -> None:
        if self._taken == len(self.op.out):  # it may have come while another one was waited for
            assert self.guest.step() is not None
        self.events += self.decoder.feed(bytes(self.op.out[self._taken :]))
        self._taken = len(self.op.out)

    def until(self, kind: str, path: str) -> FileEvent:
        """The first such event."""
        while True:
            for event in self.events:
                if (event.kind, event.path) == (kind, path):
                    return event
            self.step()

    def end(self) -> tuple[int, int]:
        while self.op.end is None:
            self.step()
        return self.op.end.end, self.op.end.code

    def told(self) -> list[str]:
        """Kinds and paths, without repetitions of `write` and `chmod`."""
        told: list[str] = []
        for event in self.events:
            line = f"{event.kind} {event.path}{'/' if event.directory else ''}"
            line += f" from {event.from_path}" if event.from_path is not None else ""
            if not told or told[-1] != line:
                told.append(line)
        return told


def sync(watched: Watched, top: Path) -> list[str]:
    """Everything that was told until now."""
    (top / "sync").write_bytes(b"")
    watched.until("create", "sync")
    (top / "sync").unlink()
    watched.until("remove", "sync")
    told = [line for line in watched.told() if line.split()[1] != "sync"]
    watched.events.clear()
    return told


def test_what_is_told(guest: Guest, tmp_path: Path) -> None:
    watched = Watched(guest, tmp_path)
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "f").chmod(0o600)
    (tmp_path / "f").rename(tmp_path / "g")
    (tmp_path / "g").unlink()
    assert sync(watched, tmp_path) == ["create f", "write f", "chmod f", "rename g from f", "remove g"]
    (tmp_path / "d").mkdir()
    watched.until("create", "d")
    guest.ping()
    (tmp_path / "d" / "f").write_bytes(b"")
    watched.until("create", "d/f")
    (tmp_path / "d").rename(tmp_path / "e")
    watched.until("rename", "e")
    (tmp_path / "e" / "f").write_bytes(b"again")
    watched.until("write", "e/f")
    shutil.rmtree(tmp_path / "e")
    told = sync(watched, tmp_path)
    assert [line for line in told if "chmod" not in line] == [
        "create d/", "create d/f", "rename e/ from d", "write e/f", "remove e/f", "remove e/",
    ]  # fmt: skip


def test_without_recursion(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    watched = Watched(guest, tmp_path, recursive=False)
    (tmp_path / "d" / "f").write_bytes(b"")
    (tmp_path / "d" / "e").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "f").write_bytes(b"")
    assert sync(watched, tmp_path) == ["create new/"]


def test_an_atomic_write_shows_as_a_write(guest: Guest, tmp_path: Path) -> None:
    watched = Watched(guest, tmp_path)
    assert guest.write_file(str(tmp_path / "f"), b"one").end is not None
    assert sync(watched, tmp_path) == ["create f", "write f"]
    assert guest.write_file(str(tmp_path / "f"), b"two").end is not None
    assert sync(watched, tmp_path) == ["write f"]


def test_moves_out_of_and_into_the_tree(guest: Guest, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "d" / "e").mkdir(parents=True)
    outside.mkdir()
    watched = Watched(guest, inside)
    (inside / "d").rename(outside / "d")
    assert sync(watched, inside) == ["remove d/"]
    (outside / "d" / "e" / "f").write_bytes(b"")
    assert sync(watched, inside) == []
    (outside / "d").rename(inside / "back")
    watched.until("create", "back/e/f")
    (inside / "back" / "e" / "g").write_bytes(b"")
    watched.until("create", "back/e/g")
    assert sync(watched, inside) == ["create back/", "create back/e/", "create back/e/f", "create back/e/g"]


def test_nothing_is_lost_in_directories_that_appear(guest: Guest, tmp_path: Path) -> None:
    watched = Watched(guest, tmp_path)
    made = set()
    for number in range(60):
        deep = tmp_path / f"d{number}" / "a" / "b" / "c"
        deep.mkdir(parents=True)
        (deep / "f").write_bytes(b"")
        (tmp_path / f"d{number}").rename(tmp_path / f"e{number}") if number % 3 == 0 else None
        made.add(f"{'e' if number % 3 == 0 else 'd'}{number}/a/b/c/f")
    for path in made:
        moved = path[0] == "e"
        while not any(
            event.kind == "create" and event.path in (path, "d" + path[1:] if moved else path)
            for event in watched.events
        ):
            watched.step()
    late = sorted(made)[0]
    (tmp_path / late).write_bytes(b"late")
    watched.until("write", late)


def test_names_that_are_not_text(guest: Guest, tmp_path: Path) -> None:
    watched = Watched(guest, tmp_path)
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))).write_bytes(b"")
    assert watched.until("create", "\udcff").path_b64 == "/w=="
    (tmp_path / ("n" * 255)).write_bytes(b"")
    watched.until("create", "n" * 255)


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_it_ends_with_its_directory(guest: Guest, tmp_path: Path, how: str) -> None:
    top = tmp_path / "top"
    (top / "d").mkdir(parents=True)
    watched = Watched(guest, top)
    if how == "removed":
        shutil.rmtree(top)
    else:
        top.rename(tmp_path / "elsewhere")
        if how == "replaced":
            top.mkdir()
    assert watched.end() == (EXITED, 0)
    assert watched.told()[-1] == "remove /"


def test_what_can_not_be_watched(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "closed").mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    for path, error in (("missing", errno.ENOENT), ("f", errno.ENOTDIR)):
        watched = Watched(guest, tmp_path / path)
        assert watched.op.end is not None
        assert (watched.op.end.end, watched.op.end.stage, watched.op.end.code) == (START_FAILED, FILE_STAGE, error)
    assert Watched(guest, "/proc").end() == (START_FAILED, errno.EACCES)
    for parent in (tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    assert Watched(guest, tmp_path / "closed", user="65534").end() == (START_FAILED, errno.EACCES)
    guest.release(Watched(guest, tmp_path, user="65534").op)  # what is closed in it is left out


def test_symbolic_links_are_not_followed(guest: Guest, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(outside)
    watched = Watched(guest, top)
    (top / "later").symlink_to(outside)
    (outside / "f").write_bytes(b"")
    assert sync(watched, top) == ["create later"]


def test_too_many_directories(guest: Guest, tmp_path: Path) -> None:
    for number in range(MAX_WATCHES // 64 + 1):
        for each in range(64):
            (tmp_path / str(number) / str(each)).mkdir(parents=True)
    assert Watched(guest, tmp_path).end() == (START_FAILED, errno.ENOSPC)
    assert Watched(guest, tmp_path, recursive=False).decoder.began


def test_a_reader_that_sleeps_hears_of_lost_events(guest: Guest, tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    watched = Watched(guest, tmp_path)
    kept = guest.ack
    guest.ack = lambda op: None  # type: ignore[method-assign]
    script = (
        "import os,sys\n"
        f"for n in range({limit} * 3):\n"
        "    p = sys.argv[1] + '/' + str(n % 7) + 'x' * 200\n"
        "    os.close(os.open(p, os.O_CREAT)); os.unlink(p)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    guest.ack = kept  # type: ignore[method-assign]
    guest.ack(watched.op)
    watched.until("overflow", "")
    watched.events.clear()
    (tmp_path / "after").write_bytes(b"")
    watched.until("create", "after")


def test_many_watches_and_their_end(guest: Guest, tmp_path: Path) -> None:
    many = [Watched(guest, tmp_path) for _ in range(40)]
    pids = [watched.op.pid for watched in many]
    (tmp_path / "f").write_bytes(b"")
    for watched in many:
        watched.until("create", "f")
        guest.release(watched.op)
    for pid in pids:
        assert pid is not None
        assert gone(pid)


# --- connections -----------------------------------------------------------------------------------------------------


class Server:
    """Serves one connection at a time in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None], *, family: int = socket.AF_INET, path: str = "") -> None:
        self.socket = socket.socket(family)
        address: object = path or ("127.0.0.1" if family == socket.AF_INET else "::1", 0)
        self.socket.bind(address)
        self.socket.listen()
        self.port = 0 if path else self.socket.getsockname()[1]
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        self._thread.start()

    def _run(self, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(150)
                try:
                    serve(connection)
                except OSError:
                    continue

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(handler: Callable[[socket.socket], None], **options: object) -> Server:
        made.append(Server(handler, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        server.close()


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def connected(guest: Guest, **fields: object) -> Op:
    op = guest.start(CONNECT, **fields)
    while not op.err and op.end is None:
        assert guest.step() is not None
    return op


def state(op: Op) -> tuple[bool, int | None]:
    decoder = ConnectDecoder()
    decoder.feed(bytes(op.err))
    return decoder.state.connected, decoder.state.stdout_bytes


def test_both_directions(guest: Guest, serve: Callable[..., Server]) -> None:
    op = connected(guest, port=serve(echo).port)
    data = os.urandom(2_000_000)
    guest.feed(op, data)
    guest.wait(op)
    assert bytes(op.out) == data
    assert state(op) == (True, len(data))
    assert op.end is not None
    assert (op.end.end, op.end.code) == (EXITED, 0)


def test_other_families(guest: Guest, serve: Callable[..., Server], tmp_path: Path) -> None:
    for fields in (
        {"port": serve(echo, family=socket.AF_INET6).port},
        {"path": str(tmp_path / "s")},
    ):
        if "path" in fields:
            serve(echo, family=socket.AF_UNIX, path=str(tmp_path / "s"))
        op = connected(guest, **fields)
        guest.feed(op, b"hello")
        guest.wait(op)
        assert bytes(op.out) == b"hello"


def test_our_side_ends_first(guest: Guest, serve: Callable[..., Server]) -> None:
    def after_the_end(connection: socket.socket) -> None:
        taken = 0
        while data := connection.recv(65536):
            taken += len(data)
        connection.sendall(b"%d" % taken)

    op = connected(guest, port=serve(after_the_end).port)
    guest.feed(op, b"x" * 100_000)
    guest.wait(op)
    assert bytes(op.out) == b"100000"


def test_their_side_ends_first(guest: Guest, serve: Callable[..., Server]) -> None:
    heard: list[bytes] = []
    over = threading.Event()

    def before_the_end(connection: socket.socket) -> None:
        connection.sendall(b"y" * 300_000)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(65536):
            heard.append(data)
        over.set()

    op = connected(guest, port=serve(before_the_end).port)
    while state(op)[1] is None:
        guest.step()
    assert state(op)[1] == 300_000
    assert op.end is None
    guest.feed(op, b"still")
    guest.wait(op)
    assert len(op.out) == 300_000
    assert over.wait(150)
    assert b"".join(heard) == b"still"


def test_a_reset_is_an_error(guest: Guest, serve: Callable[..., Server]) -> None:
    def reset(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    op = connected(guest, port=serve(reset).port)
    guest.feed(op, b"go", eof=False)
    guest.wait(op)
    assert op.end is not None
    assert (op.end.end, op.end.stage, op.end.code) == (START_FAILED, CONNECT_STAGE, errno.ECONNRESET)


def test_nobody_listens(guest: Guest, tmp_path: Path) -> None:
    port = free_port()
    for fields, error in (
        ({"port": port}, errno.ECONNREFUSED),
        ({"path": str(tmp_path / "missing")}, errno.ENOENT),
        ({"path": "/" + "n" * 200}, errno.ENAMETOOLONG),
    ):
        op = guest.wait(guest.start(CONNECT, **fields))
        assert op.end is not None
        assert (op.end.end, op.end.stage, op.end.code) == (START_FAILED, CONNECT_STAGE, error)
        assert state(op) == (False, None)


def test_requests_that_make_no_sense(guest: Guest) -> None:
    for fields in ({}, {"port": 0}, {"port": 65536}, {"port": 1, "path": "/x"}):
        op = guest.wait(guest.start(CONNECT, **fields))  # type: ignore[arg-type]
        assert op.refused is not None
        assert op.refused[0] == errno.EINVAL


def test_release_closes_the_connection(guest: Guest, serve: Callable[..., Server]) -> None:
    ended = threading.Event()

    def until_the_end(connection: socket.socket) -> None:
        try:
            connection.sendall(b"z" * 1000)
            while connection.recv(65536):
                pass
        finally:  # a reset, where it had not taken everything
            ended.set()

    op = connected(guest, port=serve(until_the_end).port)
    pid = op.pid
    assert pid is not None
    guest.release(op)
    assert ended.wait(150)
    assert gone(pid)


def test_a_reader_that_sleeps_slows_the_sender(guest: Guest, serve: Callable[..., Server]) -> None:
    sent = []

    def flood(connection: socket.socket) -> None:
        while True:
            sent.append(connection.send(b"x" * 65536))

    kept = guest.ack
    guest.ack = lambda op: None  # type: ignore[method-assign]
    op = connected(guest, port=serve(flood).port)
    while len(op.out) + len(op.err) < 256 << 10:
        guest.step()
    with pytest.raises(TimeoutError):
        guest.step(patience_s=1)
    assert len(op.out) + len(op.err) == 256 << 10
    assert sum(sent) < 32 << 20
    guest.ack = kept  # type: ignore[method-assign]
    guest.release(op)


def test_a_signal_ends_a_connection(guest: Guest, serve: Callable[..., Server]) -> None:
    op = connected(guest, port=serve(echo).port)
    guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", 9, 2))
    guest.wait(op)
    assert op.end is not None
    assert op.end.end == KILLED

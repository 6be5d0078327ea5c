"""A guest as a plain subprocess, driven over socket pairs by blocking code: for the tests of the C guest.

Owns: the built variants, the guest's process, its channel, and a cgroup of its own where the host has a v2 hierarchy.
`close()` leaves nothing behind.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsec.wire import frames
from dsec.wire.frames import Flag, Frame, FrameType, Tag

NATIVE = Path(__file__).parents[2] / "native"
UNIFIED = next(
    (p for p in map(Path, ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")) if (p / "cgroup.procs").exists()), None
)
PATIENCE_S = float(os.environ.get("DSEC_TEST_PATIENCE_S", "150"))
EXEC, READ, WRITE, STAT, LIST, MOVE, REMOVE, MKDIR, WATCH, CONNECT = range(10)
EXITED, SIGNALED, START_FAILED, TIMEOUT, OUTPUT_LIMIT, KILLED = range(6)
SANITIZER_ENV = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
}


@functools.cache
def _out() -> Path:
    """Kept between runs, for these sources."""
    digest = hashlib.sha256()
    for path in sorted(NATIVE.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(NATIVE)}\0".encode() + path.read_bytes())
    return NATIVE.parent / "build" / "tests" / "programs" / digest.hexdigest()[:16]


@functools.cache
def built(variant: str, name: str = "guest") -> Path:
    """The path of a program, compiled once for all workers, with the sanitizers or as it ships."""
    out = _out() / variant
    out.mkdir(parents=True, exist_ok=True)
    san = ["SAN=1"] if variant == "sanitized" else []
    whole = out / f"{name}.whole"
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            done = subprocess.run(
                ["make", "-s", "-C", str(NATIVE), f"OUT={out}", *san, str(out / name)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            whole.touch()
    return out / name


def gone(pid: int) -> bool:
    """Within patience; a zombie counts as gone."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.005)
    return False


def stop(pid: int) -> None:
    """All of its threads stand still on return."""
    os.kill(pid, signal.SIGSTOP)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return text
        time.sleep(0.005)
    raise TimeoutError(path)


@dataclass
class End:
    """An EXIT frame."""

    end: int
    stage: int
    flags: int
    code: int
    cpu_us: int
    wall_us: int
    max_rss: int
    stdout_end: int
    stderr_end: int
    dropped: int


def parse_exit(payload: bytes) -> End:
    end, stage, flags, _zero, code, *numbers = struct.unpack("<BBBBiQQQQQQQ", payload)
    return End(end, stage, flags, code, *numbers[:6])


@dataclass
class Op:
    """What the test, as an edge, knows of one operation. Output survives channels as an edge's spool does."""

    id: int
    pid: int | None = None
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    stdin_acked: int = 0
    end: End | None = None
    refused: tuple[int, bytes] | None = None
    started_count: int = 0
    states: list[dict[Tag, bytes]] = field(default_factory=list)


class Cgroup:
    """A directory of this test's in the v2 hierarchy, removed at the end with everything in it."""

    _sequence = 0

    def __init__(self) -> None:
        assert UNIFIED is not None
        Cgroup._sequence += 1
        self.path = UNIFIED / f"dsec-test-{os.getpid()}-{Cgroup._sequence}"
        self.path.mkdir()

    def children(self) -> list[str]:
        return sorted(p.name for p in self.path.iterdir() if p.is_dir())

    def empties(self) -> bool:
        """Within patience: those that are kept for later commands are given up too, when none has come for a moment."""
        deadline = time.monotonic() + PATIENCE_S
        while self.children():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                for child in self.children():
                    (self.path / child).rmdir()
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


class Guest:
    """One guest and the edge's side of its channel."""

    def __init__(
        self, program: Path, *, cgroup: bool = True, kind: int = socket.SOCK_SEQPACKET, prefix: Sequence[str] = ()
    ) -> None:
        self.cgroup = Cgroup() if cgroup and UNIFIED is not None else None
        self.kind = kind
        self.ops: dict[int, Op] = {}
        self.released: set[int] = set()
        self.frames_seen = 0
        self.synced = False
        self.pongs: list[tuple[bytes, int]] = []
        self.welcome: tuple[int, int, int, int] | None = None
        self.hung_up: tuple[int, bytes] | None = None
        self._next_op = 1
        self._decoder = frames.StreamDecoder()
        self._queue: list[Frame] = []
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel, channel = socket.socketpair(socket.AF_UNIX, kind)
        high = [fcntl.fcntl(s.fileno(), fcntl.F_DUPFD_CLOEXEC, 100) for s in (control, channel)]
        actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        if self.cgroup:
            directory = os.open(self.cgroup.path, os.O_RDONLY | os.O_DIRECTORY)
            high.append(fcntl.fcntl(directory, fcntl.F_DUPFD_CLOEXEC, 100))
            os.close(directory)
            actions.append((os.POSIX_SPAWN_DUP2, high[2], 5))
        argv = [*prefix, str(program), *([] if self.cgroup else ["--no-cgroup"])]
        self.pid = os.posix_spawn(argv[0], argv, SANITIZER_ENV, file_actions=actions, setsid=True)
        for fd in high:
            os.close(fd)
        control.close()
        channel.close()

    # --- the channel ---

    def attach(self, kind: int | None = None) -> None:
        """Drops the channel and passes in a fresh one."""
        self.channel.close()
        self.kind = self.kind if kind is None else kind
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, self.kind)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
        self.control.sendmsg([b"A"], rights)
        theirs.close()
        self._decoder = frames.StreamDecoder()
        self._queue.clear()
        self.synced = False
        self.hung_up = None

    def send(self, kind: FrameType, op: int = 0, payload: bytes = b"", flags: int = 0) -> None:
        self.send_raw(frames.encode(kind, op, payload, flags))

    def send_raw(self, data: bytes) -> None:
        """One packet, or these bytes of a stream."""
        self.channel.settimeout(PATIENCE_S)
        self.channel.sendall(data)

    def receive(self, patience_s: float = PATIENCE_S) -> Frame | None:
        """The next frame, or None where the guest closed the channel. Raises TimeoutError."""
        while not self._queue:
            if not select.select([self.channel], [], [], patience_s)[0]:
                raise TimeoutError(f"no frame within {patience_s} s; operations: {self.ops}")
            try:
                data = self.channel.recv(frames.MAX_FRAME)
            except ConnectionResetError:
                continue  # said once, before what the guest sent last: it closed with frames of ours unread
            if not data:
                return None
            self._queue += frames.decode_all(data) if self.kind == socket.SOCK_SEQPACKET else self._decoder.feed(data)
        self.frames_seen += 1
        return self._queue.pop(0)

    def step(self, *, ack: bool = True, patience_s: float = PATIENCE_S) -> Frame | None:
        """Receives one frame and takes note of it, as an edge does; acknowledges output."""
        frame = self.receive(patience_s)
        if frame is None:
            return None
        op = self.ops.get(frame.op)
        if op is None and frame.op in self.released:
            return frame  # it crossed with the RELEASE
        match frame.type:
            case FrameType.WELCOME:
                version, _zero, count, incarnation, highest = struct.unpack("<HHIQQ", frame.payload)
                self.welcome = (version, count, incarnation, highest)
            case FrameType.SYNCED:
                self.synced = True
            case FrameType.PONG:
                self.pongs.append((frame.payload[:8], struct.unpack("<Q", frame.payload[8:])[0]))
            case FrameType.REFUSED:
                reason = (struct.unpack("<II", frame.payload[:8])[0], frame.payload[8:])
                if frame.op == 0:
                    self.hung_up = reason
                else:
                    self.ops.setdefault(frame.op, Op(frame.op)).refused = reason
            case FrameType.OPSTATE:
                state = dict(frames.decode_fields(frame.payload))
                self.ops.setdefault(frame.op, Op(frame.op)).states.append(state)
            case FrameType.STARTED:
                assert op
                op.pid = struct.unpack("<II", frame.payload)[0]
                op.started_count += 1
            case FrameType.STDIN_ACK:
                assert op
                op.stdin_acked = struct.unpack("<Q", frame.payload)[0]
            case FrameType.OUT:
                assert op
                self._output(op, frame, ack)
            case FrameType.EXIT:
                assert op
                op.end = parse_exit(frame.payload)
            case _:
                raise AssertionError(f"a guest doesn't send {frame.type.name}")
        return frame

    def _output(self, op: Op, frame: Frame, ack: bool) -> None:
        (offset,) = struct.unpack("<Q", frame.payload[:8])
        have = op.err if frame.flags & Flag.STDERR else op.out
        assert offset <= len(have), "a gap in the output"
        data = frame.payload[8:]
        again = min(len(have) - offset, len(data))
        assert have[offset : offset + again] == data[:again], "output was re-sent differently"
        have += data[again:]
        if ack:
            with contextlib.suppress(OSError):  # a channel that the guest closed meanwhile: noticed by the next receive
                self.ack(op)

    def ack(self, op: Op) -> None:
        self.send(FrameType.ACK, op.id, struct.pack("<QQ", len(op.out), len(op.err)))

    def hello(self, incarnation: int = 7) -> None:
        """HELLO up to SYNCED."""
        self.send(FrameType.HELLO, 0, struct.pack("<HHIQ", frames.PROTOCOL_VERSION, 0, 0, incarnation))
        while not self.synced:
            assert self.step() is not None, self.hung_up

    # --- operations ---

    def request(self, kind: int, **fields: object) -> list[tuple[Tag, int | bytes]]:
        """Fields by their lower-case tag names; lists and tuples repeat."""
        result: list[tuple[Tag, int | bytes]] = [(Tag.KIND, kind)]
        for name, value in fields.items():
            for item in value if isinstance(value, list | tuple) else (value,):
                result.append((Tag[name.upper()], item.encode() if isinstance(item, str) else item))
        return result

    def start(self, kind: int = EXEC, *, op: int | None = None, **fields: object) -> Op:
        number = self._next_op if op is None else op
        self._next_op = max(self._next_op, number + 1)
        started = self.ops.setdefault(number, Op(number))
        payload = frames.encode_fields(self.request(kind, **fields))
        for frame in frames.split_request(FrameType.START, number, payload):
            self.send_raw(frame)
        return started

    def wait(self, op: Op) -> Op:
        """Until it ended or was refused."""
        while op.end is None and op.refused is None:
            assert self.step() is not None, "the guest closed the channel"
        return op

    def until(self, op: Op, word: bytes) -> None:
        """Until `word` came on stdout."""
        while word not in op.out:
            assert self.step() is not None, "the guest closed the channel"

    def run(self, *argv: str | bytes, **fields: object) -> Op:
        """A command to its end."""
        return self.wait(self.start(EXEC, argv=list(argv), **fields))

    def file(self, kind: int, path: str | bytes, **fields: object) -> Op:
        """A file call without input, to its end."""
        return self.wait(self.start(kind, path=path, **fields))

    def feed(self, op: Op, data: bytes, *, start: int = 0, eof: bool = True) -> None:
        """Sends stdin within the window, reading whatever comes meanwhile."""
        sent = start
        end = start + len(data)
        while sent < end or eof:
            while sent < end and sent + 1 > op.stdin_acked + frames.WINDOW - frames.MAX_DATA:
                assert self.step() is not None
            part = data[sent - start : sent - start + frames.MAX_DATA]
            last = sent + len(part) == end
            self.send(FrameType.STDIN, op.id, struct.pack("<Q", sent) + part, Flag.EOF if last and eof else 0)
            sent += len(part)
            if last:
                return

    def write_file(self, path: str | bytes, data: bytes, **fields: object) -> Op:
        op = self.start(WRITE, path=path, **fields)
        self.feed(op, data)
        return self.wait(op)

    def release(self, op: Op) -> None:
        self.send(FrameType.RELEASE, op.id)
        self.ops.pop(op.id, None)
        self.released.add(op.id)

    def ping(self) -> int:
        """Until everything that was sent before has been handled. Returns the guest's clock, ns."""
        token = os.urandom(8)
        self.send(FrameType.PING, 0, token)
        while not self.pongs or self.pongs[-1][0] != token:
            assert self.step() is not None, "the guest closed the channel"
        return self.pongs[-1][1]

    # --- the process ---

    def alive(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def private_kib(self) -> int:
        """Private dirty memory."""
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_Dirty"))

    def close(self) -> None:
        """Ends it by its control socket, as a zygote's death would; it has to end properly."""
        self.channel.close()
        self.control.close()
        deadline = time.monotonic() + PATIENCE_S
        try:
            while (found := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    raise TimeoutError("the guest didn't end with its control socket")
                time.sleep(0.002)
        finally:
            if self.cgroup:
                self.cgroup.close()
        assert found[1] == 0, f"the guest ended with wait status {found[1]:#x}"


@contextlib.contextmanager
def running(program: Path, **options: object) -> Iterator[Guest]:
    """A guest that has been greeted."""
    guest = Guest(program, **options)  # type: ignore[arg-type]
    try:
        guest.hello()
        yield guest
    finally:
        guest.close()

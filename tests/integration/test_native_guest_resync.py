"""The guest and a channel that is lost: at every frame boundary an operation is neither lost nor repeated, and its
output arrives byte for byte. What breaks the protocol closes the channel and nothing else."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_guest import EXITED, TIMEOUT, UNIFIED, Guest, Op, built, running

from dsec.wire import frames
from dsec.wire.frames import Flag, FrameType, Tag

pytestmark = pytest.mark.root
STDIN, PATIENT = 1, 16
MODES = [
    pytest.param(("static", socket.SOCK_SEQPACKET), id="static"),
    pytest.param(("static", socket.SOCK_STREAM), id="static-stream"),
    pytest.param(("sanitized", socket.SOCK_SEQPACKET), id="sanitized"),
]


@pytest.fixture(params=MODES)
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    variant, kind = request.param
    with running(built(variant), cgroup=UNIFIED is not None, kind=kind) as found:
        yield found


def number(state: dict[Tag, bytes], tag: Tag) -> int:
    return int.from_bytes(state[tag], "little")


class Script:
    """A command with output on both streams and stdin, which runs to its end over channels that are cut."""

    OUT = b"".join(b"%06d\n" % i for i in range(30_000))  # 210,000 bytes: several frames
    ERR = b"e" * 70_000
    INPUT = os.urandom(300_000)

    def __init__(self, guest: Guest, directory: Path, name: str) -> None:
        self.guest = guest
        self.ran = directory / f"{name}.ran"
        self.got = directory / f"{name}.got"
        self.command = (
            f"echo run >> {self.ran}; seq -f %06g 0 29999; head -c 70000 /dev/zero | tr '\\0' e >&2;"
            f" cat > {self.got}; exit 7"
        )

    def start_frames(self, op: int) -> list[bytes]:
        fields = self.guest.request(
            0, argv=["sh", "-c", self.command], flags=STDIN, key=b"key", env=["PAD=" + "p" * 90_000]
        )
        return list(frames.split_request(FrameType.START, op, frames.encode_fields(fields)))

    def check(self, op: Op) -> None:
        assert self.ran.read_text() == "run\n", "it ran exactly once"
        assert self.got.read_bytes() == self.INPUT
        assert bytes(op.out) == self.OUT
        assert bytes(op.err) == self.ERR
        assert op.end is not None
        assert (op.end.end, op.end.code) == (EXITED, 7)
        assert (op.end.stdout_end, op.end.stderr_end) == (len(self.OUT), len(self.ERR))


def drive(script: Script, op_id: int, lifetimes: Iterator[int]) -> Op:
    """An edge whose channel is cut after every so many frames that it sent or received; after each cut it goes by what
    the guest says that it knows, as an edge that was restarted does."""
    guest = script.guest
    op = guest.ops.setdefault(op_id, Op(op_id))
    while op.end is None:
        left = next(lifetimes)
        guest.attach()
        op.states.clear()
        op.started_count = 0
        guest.hello()
        sent = 0
        if op.states:
            sent = number(op.states[-1], Tag.STDIN_OFFSET)
            op.stdin_acked = sent
            assert op.states[-1][Tag.KEY] == b"key"
        else:
            for frame in script.start_frames(op_id):
                if left == 0:
                    break
                guest.send_raw(frame)
                left -= 1
        while left > 0 and op.end is None:
            if sent < len(script.INPUT) and sent < op.stdin_acked + frames.WINDOW - 20_000:
                part = script.INPUT[sent : sent + 20_000]
                last = sent + len(part) == len(script.INPUT)
                guest.send(FrameType.STDIN, op_id, struct.pack("<Q", sent) + part, Flag.EOF if last else 0)
                sent += len(part)
                left -= 1
                if left == 0:
                    break
            if guest.step() is None:
                break
            left -= 1
    return op


def test_a_channel_lost_at_every_frame_boundary(guest: Guest, tmp_path: Path) -> None:
    """First a channel of n frames, then one that lasts: for every n, beyond where one channel is enough."""
    for n in range(1, 41):
        script = Script(guest, tmp_path, f"once-{n}")
        op = drive(script, n, itertools.chain([n], itertools.repeat(100_000)))
        script.check(op)
        guest.release(op)
        guest.ping()


@pytest.mark.parametrize("lifetime", [6, 7, 9, 13])
def test_channels_that_all_live_shortly(guest: Guest, tmp_path: Path, lifetime: int) -> None:
    """No shorter: two frames of a request and an answer, or STARTED, STDIN_ACK and OUT, must have room."""
    script = Script(guest, tmp_path, "shortly")
    script.check(drive(script, 1, itertools.repeat(lifetime, 1000)))


def test_output_of_a_command_that_nobody_listens_to(guest: Guest) -> None:
    """It goes on till the window is full, waits, and goes on with the next channel."""
    op = guest.start(argv=["head", "-c", "1000000", "/dev/zero"], timeout_ms=600_000)
    guest.step()
    guest.attach()
    guest.hello()
    state = op.states[-1]
    assert number(state, Tag.STATE) == 1
    assert number(state, Tag.STDOUT_END) - number(state, Tag.STDOUT_BASE) <= frames.WINDOW
    guest.wait(op)
    assert len(op.out) == 1_000_000


def test_a_result_is_kept_until_its_release(guest: Guest) -> None:
    op = guest.run("sh", "-c", "echo kept; exit 5", key=b"a key")
    for _ in range(3):
        guest.attach()
        op.end = None
        guest.hello()
        assert guest.welcome is not None
        assert guest.welcome[1:] == (1, 7, 1)
        assert op.states[-1][Tag.KEY] == b"a key"
        assert number(op.states[-1], Tag.STATE) == 2
        guest.wait(op)
        assert op.end is not None
        assert op.end.code == 5
    assert bytes(op.out) == b"kept\n"
    guest.release(op)
    guest.ping()
    guest.attach()
    guest.hello(9)
    assert guest.welcome is not None
    assert guest.welcome[1:] == (0, 9, 1)


def test_unacknowledged_output_comes_again(guest: Guest) -> None:
    op = guest.start(argv=["printf", "0123456789"])
    while op.end is None:
        guest.step(ack=False)
    guest.send(FrameType.ACK, op.id, struct.pack("<QQ", 4, 0))
    guest.ping()
    guest.attach()
    guest.hello()
    assert number(op.states[-1], Tag.STDOUT_BASE) == 4
    frame = guest.receive()
    while frame is not None and frame.type is not FrameType.OUT:
        frame = guest.receive()
    assert frame is not None
    assert frame.payload == struct.pack("<Q", 4) + b"456789"


def test_an_edge_may_acknowledge_what_it_had_before_it_comes_again(guest: Guest) -> None:
    op = guest.start(argv=["printf", "0123456789"])
    while op.end is None:
        guest.step(ack=False)
    guest.attach()
    guest.send(FrameType.HELLO, 0, struct.pack("<HHIQ", frames.PROTOCOL_VERSION, 0, 0, 1))
    guest.send(FrameType.ACK, op.id, struct.pack("<QQ", 10, 0))
    op.end = None
    guest.wait(op)
    assert bytes(op.out) == b"0123456789"


def test_a_timeout_strikes_without_a_channel(guest: Guest) -> None:
    for timeout_ms in (300, 5000, 60_000):  # a host that stands still may write nothing for so long
        op = guest.start(argv=["sh", "-c", "echo before; sleep 1000"], timeout_ms=timeout_ms)
        guest.step()
        guest.channel.close()
        guest.attach()
        guest.hello()
        guest.wait(op)
        assert op.end is not None
        assert op.end.end == TIMEOUT
        if op.out:
            break
    assert bytes(op.out) == b"before\n"


def test_start_again_is_answered_with_its_state(guest: Guest, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    op = guest.run("sh", "-c", f"echo run >> {ran}", key=b"k")
    guest.start(op=op.id, argv=["sh", "-c", f"echo run >> {ran}"])
    guest.start(op=op.id, argv=["sh", "-c", f"echo run >> {ran}; # {'x' * 100_000}"])
    guest.ping()
    assert len(op.states) == 2
    assert ran.read_text() == "run\n"


def test_a_new_channel_takes_over_from_one_that_is_open(guest: Guest) -> None:
    op = guest.start(argv=["sh", "-c", "sleep 0.2; echo late"])
    guest.step()
    old = guest.channel.dup()
    guest.attach()
    guest.hello()
    while old.recv(frames.MAX_FRAME):
        pass
    old.close()
    assert bytes(guest.wait(op).out) == b"late\n"


def test_another_kind_of_channel_next(guest: Guest) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        guest.attach(kind)
        guest.hello()
        assert bytes(guest.run("echo", "hi").out) == b"hi\n"


def test_a_stream_cut_inside_frames(guest: Guest) -> None:
    guest.attach(socket.SOCK_STREAM)
    hello = frames.encode(FrameType.HELLO, 0, struct.pack("<HHIQ", frames.PROTOCOL_VERSION, 0, 0, 3))
    payload = frames.encode_fields([(Tag.KIND, 0), (Tag.ARGV, b"echo"), (Tag.ARGV, b"piecemeal")])
    op = guest.ops.setdefault(1, Op(1))
    for at in hello + frames.encode(FrameType.START, 1, payload):
        guest.send_raw(bytes([at]))
    assert bytes(guest.wait(op).out) == b"piecemeal\n"


def test_pings(guest: Guest) -> None:
    first = guest.ping()
    assert guest.ping() > first


def test_an_edge_that_asks_and_does_not_read(guest: Guest) -> None:
    """The guest takes no more than it can answer, and doesn't stop with that channel."""
    guest.channel.settimeout(0.5)
    ping = frames.encode(FrameType.PING, 0, bytes(8))
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 1_000_000:
            guest.channel.sendall(ping)
            sent += 1
    assert sent < 1_000_000, "it went on taking what it couldn't answer"
    assert guest.private_kib() < 20_000
    guest.attach()
    guest.hello()
    assert bytes(guest.run("echo", "hi").out) == b"hi\n"


def test_frames_for_operations_that_are_not_there(guest: Guest) -> None:
    guest.send(FrameType.ACK, 5, bytes(16))
    guest.send(FrameType.RELEASE, 5)
    guest.send(FrameType.STDIN, 6, bytes(8))
    guest.send(FrameType.SIGNAL, 7, struct.pack("<II", 9, 0))
    guest.ping()
    assert sorted(guest.ops) == [6, 7]
    assert {op.refused[0] for op in guest.ops.values() if op.refused} == {errno.ESRCH}


def raw(
    kind: int, payload: bytes = b"", *, op: int = 1, flags: int = 0, zero: int = 0, size: int | None = None
) -> bytes:
    return struct.pack("<IBBHQ", len(payload) if size is None else size, kind, flags, zero, op) + payload


VIOLATIONS = {
    "unknown type": raw(50),
    "frame of the other direction": raw(FrameType.SYNCED),
    "zygote frame": raw(FrameType.Z_HELLO, bytes(8)),
    "second hello": raw(FrameType.HELLO, struct.pack("<HHIQ", frames.PROTOCOL_VERSION, 0, 0, 1)),
    "short ack": raw(FrameType.ACK, bytes(8)),
    "unknown flag": raw(FrameType.PING, bytes(8), flags=8),
    "reserved bytes": raw(FrameType.PING, bytes(8), zero=1),
    "start of operation 0": raw(FrameType.START, op=0),
    "ack of what never was": raw(FrameType.ACK, struct.pack("<QQ", 1 << 40, 0)),
    "gap in stdin": raw(FrameType.STDIN, struct.pack("<Q", 1) + b"x"),
    "stdin offset that wraps": raw(FrameType.STDIN, struct.pack("<Q", (1 << 64) - 1) + b"xx"),
    "huge size": raw(FrameType.START, b"", size=0xFFFFFFFF),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations_close_the_channel_and_nothing_else(guest: Guest, name: str) -> None:
    op = guest.start(argv=["sh", "-c", "read line; echo $line"], flags=STDIN)
    while op.pid is None:
        guest.step()
    guest.send_raw(VIOLATIONS[name])
    while guest.step() is not None:
        pass
    assert guest.hung_up is not None
    assert guest.hung_up[0] == errno.EPROTO
    guest.attach()
    guest.hello()
    guest.feed(op, b"still here\n")
    assert bytes(guest.wait(op).out) == b"still here\n"


def test_more_stdin_than_the_window(guest: Guest) -> None:
    op = guest.start(argv=["sleep", "1000"], flags=STDIN)
    while op.pid is None:
        guest.step()
    part = bytes(frames.MAX_DATA)
    whole = frames.WINDOW // frames.MAX_DATA
    for i in range(whole):
        guest.send(FrameType.STDIN, op.id, struct.pack("<Q", i * len(part)) + part)
    while op.stdin_acked < frames.WINDOW:  # the pipe takes a window
        guest.step()
    with contextlib.suppress(BrokenPipeError):
        for i in range(whole, 2 * whole + 1):
            guest.send(FrameType.STDIN, op.id, struct.pack("<Q", i * len(part)) + part)
    while guest.step() is not None:
        pass
    assert guest.hung_up is not None


def test_frames_before_hello_and_another_version(guest: Guest) -> None:
    guest.attach()
    guest.send(FrameType.PING, 0, bytes(8))
    while guest.step() is not None:
        pass
    assert guest.hung_up is not None
    guest.attach()
    guest.send(FrameType.HELLO, 0, struct.pack("<HHIQ", frames.PROTOCOL_VERSION + 1, 0, 0, 1))
    while guest.step() is not None:
        pass
    assert guest.hung_up is not None
    assert guest.hung_up[0] == errno.EPROTONOSUPPORT


def test_frames_in_one_packet(guest: Guest) -> None:
    """As many as come together are taken one after the other, each with its own bytes; what is said together comes
    together."""
    first = guest.run("true")
    together = guest.frames_seen
    start = frames.encode(
        FrameType.START, 2, frames.encode_fields([(Tag.KIND, 0), (Tag.ARGV, b"/bin/echo"), (Tag.ARGV, b"x" * 300)])
    )
    ping = frames.encode(FrameType.PING, 0, b"together")
    guest.send_raw(frames.encode(FrameType.RELEASE, first.id) + ping + start + ping + start + ping)
    op = guest.ops[2] = Op(2)
    guest.wait(op)
    assert bytes(op.out) == b"x" * 300 + b"\n"
    while len(guest.pongs) < 3:
        assert guest.step() is not None
    assert len(op.states) == 1, "the second START of one number is answered by its state"
    assert guest.frames_seen - together == 3 + 1 + 3


def test_a_patient_start_is_told_with_what_follows_it(guest: Guest) -> None:
    for argv in (["true"], ["echo", "x"], ["/no/such/command"]):
        op = guest.wait(guest.start(argv=argv, flags=PATIENT))
        assert op.started_count == (0 if argv[0].startswith("/no") else 1)
    op = guest.start(argv=["sleep", "1000"], flags=PATIENT)
    while op.pid is None:  # within DSEC_PATIENCE_MS of its start
        assert guest.step() is not None
    guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", 9, 0))
    guest.wait(op)
    op = guest.start(argv=["sh", "-c", "echo x; sleep 1000"], flags=PATIENT)
    guest.until(op, b"x\n")
    assert op.started_count == 1, "output follows the start"


def test_another_request_within_a_request(guest: Guest) -> None:
    guest.send_raw(raw(FrameType.START, b"", op=1, flags=Flag.MORE))
    guest.send_raw(raw(FrameType.START, b"", op=2))
    while guest.step() is not None:
        pass
    assert guest.hung_up is not None


def test_a_packet_that_is_no_frame(guest: Guest) -> None:
    for packet in (b"x", bytes(15), frames.encode(FrameType.PING, 0, bytes(8)) + b"x", bytes(100_000)):
        guest.attach(socket.SOCK_SEQPACKET)
        guest.hello()
        guest.send_raw(packet)
        while guest.step() is not None:
            pass
    guest.attach()
    guest.hello()


def test_control_messages_that_are_none(guest: Guest) -> None:
    guest.control.send(b"A")  # no descriptor
    guest.control.send(b"B")
    with Path("/dev/null").open() as null:
        socket.send_fds(guest.control, [b"B"], [null.fileno()])
        socket.send_fds(guest.control, [b"A"], [null.fileno(), null.fileno()])  # two
    guest.ping()
    assert bytes(guest.run("echo", "hi").out) == b"hi\n"

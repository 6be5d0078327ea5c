"""Random and damaged frames against the guest: a bounded run of the in-process fuzzer (native/tests/fuzz_guest.c), and
a live guest in an empty root of its own, which must answer as ever afterwards. A failure says its seed."""

from __future__ import annotations

import random
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest
from native_guest import EXITED, Guest, built, running

from dsec.wire import frames
from dsec.wire.frames import FrameType, Tag

NAMES = [
    b"/f",
    b"/d",
    b"/d/f",
    b"/d/e/f",
    b"/../f",
    b"/link",
    b"/d/\xff",
    b"/",
    b".",
    b"/dev/null",
    b"/guest/x",
    b"/" + b"n" * 300,
]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fuzz_guest_core(seed: int) -> None:
    command = [built("sanitized", "fuzz_guest"), "2", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 100


def random_request(dice: random.Random) -> bytes:
    fields: list[tuple[Tag, int | bytes]] = [(Tag.KIND, dice.randrange(11))]
    choices: list[tuple[Tag, int | bytes]] = [
        (Tag.ARGV, b"/guest"), (Tag.ARGV, dice.randbytes(dice.randrange(20))), (Tag.ENV, b"A=1"),
        (Tag.CWD, dice.choice(NAMES)), (Tag.USER, dice.choice([b"0", b"1000", b"root", b"nobody", b":", b"1:2"])),
        (Tag.TIMEOUT_MS, dice.choice([0, 1, 50, 1 << 60])),
        (Tag.OUTPUT_CAP, dice.choice([0, 10, 1 << 63])), (Tag.KEY, dice.randbytes(dice.choice([0, 1, 128, 129]))),
        (Tag.FLAGS, dice.randrange(33)), (Tag.PATH, dice.choice(NAMES)), (Tag.PATH2, dice.choice(NAMES)),
        (Tag.MODE, dice.choice([0o644, 0o7777, 0o10000])), (Tag.OFFSET, dice.choice([0, 5, (1 << 64) - 1])),
        (Tag.LENGTH, dice.choice([0, 7, (1 << 64) - 1])), (Tag.DEPTH, dice.choice([0, 1, (1 << 64) - 1])),
        (Tag.FILE_FLAGS, dice.randrange(33)), (Tag.NOFILE, dice.choice([0, 3, 100, 1 << 30])),
        (Tag.PTY_SIZE, dice.choice([0, 80 << 16 | 24, 1 << 32])), (Tag.PORT, dice.choice([0, 1, 65535, 65536])),
    ]  # fmt: skip
    fields += dice.sample(choices, dice.randrange(3, len(choices)))
    dice.shuffle(fields)
    return frames.encode_fields(fields)


def random_frame(dice: random.Random, next_op: int) -> bytes:
    op = dice.choice([next_op, dice.randrange(max(1, next_op - 20), next_op + 1)])
    kind = dice.choice([2, 2, 2, 3, 3, 4, 5, 6, 6, 7, 8])
    payload = {
        FrameType.START: lambda: random_request(dice),
        FrameType.STDIN: lambda: (
            struct.pack("<Q", dice.choice([0, 0, 0, 5])) + dice.randbytes(dice.choice([0, 5, 1000]))
        ),
        FrameType.ACK: lambda: bytes(16),
        FrameType.SIGNAL: lambda: struct.pack("<II", dice.choice([9, 15, 0, 70]), dice.choice([0, 1, 2, 3])),
        FrameType.RELEASE: lambda: b"",
        FrameType.PING: lambda: dice.randbytes(8),
        FrameType.RESIZE: lambda: dice.randbytes(4),
    }[FrameType(kind)]()
    flags = dice.choice([0, 0, 0, 1 if kind == FrameType.START else 2 if kind == FrameType.STDIN else 0])
    packet = bytearray(struct.pack("<IBBHQ", len(payload), kind, flags, 0, op) + payload)
    if dice.random() < 0.15:
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(packet))
            if not 9 <= at < 16:  # a huge number would make all that follow stale
                packet[at] = dice.getrandbits(8)
    if dice.random() < 0.02:
        packet = packet[: dice.randrange(len(packet) + 1)]
    return bytes(packet) or b"\0"


def hear_all(guest: Guest) -> None:
    """Whatever is there, unread by the harness's rules: numbers are at random here."""
    guest.channel.settimeout(0)
    try:
        while guest.channel.recv(frames.MAX_FRAME):
            pass
    except OSError:
        return


@pytest.mark.root
@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM], ids=["packets", "stream"])
@pytest.mark.parametrize("seed", [11, 12])
def test_a_live_guest_outlasts_random_frames(tmp_path: Path, seed: int, kind: int) -> None:
    dice = random.Random(seed)
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "link").symlink_to("d/f")
    shutil.copy(built("static"), root / "guest")
    with running(Path("/guest"), kind=kind, prefix=("/usr/sbin/chroot", str(root))) as guest:
        next_op, lost = 1, 0
        end = time.monotonic() + 2
        while time.monotonic() < end or not lost or next_op < 60:
            try:
                guest.channel.settimeout(0.2)
                guest.channel.sendall(random_frame(dice, next_op))
            except OSError:  # it closed the channel, or waits for us to read
                lost += 1
                guest.attach()
                guest.send(FrameType.HELLO, 0, struct.pack("<HHIQ", frames.PROTOCOL_VERSION, 0, 0, 7))
            next_op += dice.random() < 0.3
            hear_all(guest)
        assert lost, f"seed {seed}: nothing was refused"
        guest.attach()
        guest.ops.clear()
        guest.hello()
        for op in list(guest.ops.values()):
            guest.release(op)
        guest.ping()
        assert guest.welcome is not None
        assert guest.welcome[3] > 20, "operations did start"
        (root / "after").unlink(missing_ok=True)
        shutil.copy(built("static"), root / "after")  # without its descriptors it ends at once with 71
        after = guest.run("/after", op=guest.welcome[3] + 1)
        assert after.end is not None, f"seed {seed}: {after}"
        assert (after.end.end, after.end.code) == (EXITED, 71), f"seed {seed}: {after}"

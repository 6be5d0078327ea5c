"""The C codec: its own tests, the shared vectors, the Python codec as its judge, and a bounded run of its fuzzer."""

from __future__ import annotations

import json
import random
import struct
import subprocess
from pathlib import Path

import pytest
from native_guest import built

from dsec.wire import frames
from dsec.wire.frames import _RULES, FrameType, ProtocolError, Tag

VECTORS = Path(__file__).parents[1] / "vectors" / "frames.json"
SEED = 20260929


def ask_c(lines: list[str]) -> list[str]:
    """What the C codec says to each line (native/tests/vectors.c)."""
    done = subprocess.run(
        [built("sanitized", "vectors")], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hexed(data: bytes) -> str:
    return data.hex() or "-"


def python_packet(packet: bytes) -> str:
    try:
        found = frames.decode(packet)
    except ProtocolError:
        return "error"
    return f"ok {int(found.type)} {found.flags} {found.op} {hexed(found.payload)}"


def test_unit_tests() -> None:
    done = subprocess.run([built("sanitized", "test_frames")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_shared_vectors() -> None:
    vectors = json.loads(VECTORS.read_text())
    packets = [bytes.fromhex(v["hex"]) for v in vectors]
    said = ask_c([f"packet {hexed(packet)}" for packet in packets])
    for vector, packet, answer in zip(vectors, packets, said, strict=True):
        assert answer == python_packet(packet), vector["name"]
        decoded = vector["decoded"]
        assert (answer == "error") == (decoded is None), vector["name"]
        if decoded is None:
            continue
        kind = FrameType[decoded["type"]]
        encoded, listed = ask_c(
            [
                f"frame {int(kind)} {decoded['flags']} {decoded['op']} {decoded['payload'] or '-'}",
                f"fields {decoded['payload'] or '-'}",
            ]
        )
        assert encoded == vector["hex"], vector["name"]
        if "fields" in decoded:
            assert listed == " ".join(["ok", *(f"{int(Tag[n])}:{v or '-'}" for n, v in decoded["fields"])])
        if kind is FrameType.EXIT:
            assert ask_c([f"exit {decoded['payload']}"]) == [decoded["payload"]]


def test_both_codecs_agree_on_mutated_frames() -> None:
    dice = random.Random(SEED)
    packets = []
    for _ in range(3000):
        kind = dice.choice(list(FrameType))
        least, most, flags = _RULES[kind]
        payload = dice.randbytes(dice.choice([least, min(most, least + dice.randrange(40))]))
        packet = bytearray(frames.encode(kind, dice.getrandbits(64), payload, dice.choice([0, int(flags)])))
        for _ in range(dice.randrange(3)):
            packet[dice.randrange(min(len(packet), 20))] = dice.getrandbits(8)
        packets.append(bytes(packet[: dice.choice([len(packet), dice.randrange(len(packet) + 1)])]))
    said = ask_c([f"packet {hexed(packet)}" for packet in packets])
    assert said == [python_packet(packet) for packet in packets]
    assert {"ok", "error"} == {answer.split()[0] for answer in said}


def test_both_codecs_agree_on_the_largest_frames() -> None:
    for kind, (_least, most, _flags) in _RULES.items():
        packet = frames.encode(kind, 1, bytes(most))
        longer = struct.pack("<IBBHQ", most + 1, kind, 0, 0, 1) + bytes(most + 1)
        assert ask_c([f"packet {packet.hex()}", f"packet {longer.hex()}"]) == [python_packet(packet), "error"]


def test_both_codecs_agree_on_mutated_fields() -> None:
    dice = random.Random(SEED)
    lists = []
    for _ in range(2000):
        parts = [
            struct.pack("<HHI", dice.choice(list(Tag)), 0, size) + dice.randbytes(size)
            for size in (dice.choice([0, 1, 8, 30]) for _ in range(dice.randrange(5)))
        ]
        data = bytearray(b"".join(parts))
        if data and dice.random() < 0.3:
            at = dice.randrange(len(data))
            data[at] = dice.getrandbits(8)
        lists.append(bytes(data[: dice.choice([len(data), dice.randrange(len(data) + 1)])]))
    for data, answer in zip(lists, ask_c([f"fields {hexed(data)}" for data in lists]), strict=True):
        try:
            expected = " ".join(["ok", *(f"{int(t)}:{hexed(v)}" for t, v in frames.decode_fields(data))])
        except ProtocolError as error:
            if "unknown field tag" in str(error):
                continue  # in C the codec doesn't know the tags; who reads a request does
            expected = "error"
        assert answer == expected, data.hex()


@pytest.mark.parametrize("seed", [1, 2])
def test_fuzz_frames(seed: int) -> None:
    done = subprocess.run(
        [built("sanitized", "fuzz_frames"), "1.5", str(seed)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 1000

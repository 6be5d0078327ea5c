"""Every constant of native/common/wire.h has the same value in Python; neither side has one that the other lacks."""

from __future__ import annotations

import re
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from dsec.spec import operations
from dsec.wire import entries, events, flows, frames, looks, session

HEADER = Path(__file__).parents[2] / "native" / "common" / "wire.h"
TEXT = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


def c_enum(name: str, prefix: str) -> dict[str, int]:
    body = re.search(rf"enum {name}\s*{{(.*?)}}", TEXT, re.S)
    assert body, name
    members = re.findall(r"(\w+)\s*=\s*(\d+)", body[1])
    assert members, name
    assert all(member.startswith(prefix) for member, _ in members)
    return {member.removeprefix(prefix): int(value) for member, value in members}


def members(enum: type[IntEnum] | type[IntFlag]) -> dict[str, int]:
    return {name: int(member) for name, member in enum.__members__.items()}


@pytest.mark.parametrize(
    ("name", "prefix", "ours"),
    [
        ("dsec_frame", "DSEC_", frames.FrameType),
        ("dsec_flag", "DSEC_F_", frames.Flag),
        ("dsec_tag", "TAG_", frames.Tag),
        ("dsec_kind", "DSEC_", operations.Kind),
        ("dsec_exec_flag", "EF_", operations.ExecFlag),
        ("dsec_end", "END_", operations.EndKind),
        ("dsec_stage", "STAGE_", operations.Stage),
        ("dsec_flow", "FLOW_", flows.FlowKind),
        ("dsec_look", "LOOK_", looks.LookKind),
    ],
)
def test_enums_agree(name: str, prefix: str, ours: type[IntEnum] | type[IntFlag]) -> None:
    assert c_enum(name, prefix) == members(ours)


def test_file_flags_agree() -> None:
    theirs = c_enum("dsec_file_flag", "FF_")
    theirs["EXCLUSIVE"] = theirs.pop("EXCL")
    assert theirs == members(operations.FileFlag)


def test_every_frame_type_has_a_rule() -> None:
    assert set(frames._RULES) == set(frames.FrameType)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("DSEC_PROTOCOL_VERSION", frames.PROTOCOL_VERSION),
        ("DSEC_HEADER_SIZE", frames.HEADER_SIZE),
        ("DSEC_MAX_PAYLOAD", frames.MAX_PAYLOAD),
        ("DSEC_MAX_DATA", frames.MAX_DATA),
        ("DSEC_MAX_REQUEST", frames.MAX_REQUEST),
        ("DSEC_WINDOW", frames.WINDOW),
        ("DSEC_MAX_OPS", frames.MAX_OPS),
        ("DSEC_MAX_KEY", frames.MAX_KEY),
        ("DSEC_MAX_TERMINAL", frames.MAX_TERMINAL),
        ("DSEC_MAX_WATCHES", frames.MAX_WATCHES),
        ("DSEC_ENTRY_SIZE", entries.ENTRY_SIZE),
        ("DSEC_EVENT_SIZE", events.EVENT_SIZE),
        ("DSEC_FLOW_HEADER", flows.HEADER_SIZE),
        ("DSEC_FLOW_DATA", flows.MAX_DATA),
        ("DSEC_FLOW_WINDOW", flows.WINDOW),
        ("DSEC_MAX_FLOWS", flows.MAX_FLOWS),
        ("DSEC_LOOK_HEADER", looks.HEADER_SIZE),
        ("DSEC_LOOK_TEXT", looks.MAX_TEXT),
        ("DSEC_LOOK_WORDS", looks.MAX_WORDS),
        ("EXIT_TRUNCATED", session.EXIT_TRUNCATED),
    ],
)
def test_defines_agree(name: str, ours: int) -> None:
    match = re.search(rf"#define {name}\s+(.+)", TEXT)
    assert match, name
    assert re.fullmatch(r"[\d()u< ]+", match[1].strip())
    assert eval(match[1].replace("u", "")) == ours


def test_exit_struct_is_as_in_c() -> None:
    body = re.search(r"struct dsec_exit {(.*?)};", TEXT, re.S)
    assert body
    codes = {"unsigned char": "B", "int": "i", "unsigned long long": "Q"}
    layout = ""
    for kind, names in re.findall(r"(unsigned char|unsigned long long|int)\s+([\w, ]+);", body[1]):
        layout += codes[kind] * len(names.split(","))
    assert session.EXIT_LAYOUT.format == "<" + layout
    assert session.EXIT_LAYOUT.size == 64

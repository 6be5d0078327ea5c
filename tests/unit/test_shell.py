"""The protocol of shell sessions, without a shell: marks in output, however it is cut; what is typed."""

from __future__ import annotations

import subprocess
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.edge.shell import Machine, Mark, Output, Parser, lines, quote, secret_of, setup

SECRET = "0123456789abcdef" * 2
LEAD = b"\x1b]8888;" + SECRET.encode() + b";"
RUN = "00000000000000aa"
BEGIN = LEAD + b"b;" + RUN.encode() + b"\x07"
END = LEAD + b"e;" + RUN.encode() + b";7\x07"
READY = LEAD + b"r\x07"

# Output that looks like marks, whole and in part, beside anything else.
pieces = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from([LEAD, LEAD[:-1], b"\x1b", b"\x1b]8888;", LEAD + b"b;", LEAD + b"e;" + b"0" * 40, b"\x07"]),
        st.sampled_from(
            [
                LEAD + b"e;" + b"1" * 16 + b";\x07",
                LEAD + b"r;\x07",
                LEAD + b"r;61\x07",
                LEAD + b"r;" + b"0" * 400,
                LEAD.replace(b"0", b"1"),
            ]
        ),
    ),
    max_size=8,
).map(b"".join)


def read(parser: Parser, parts: list[bytes]) -> tuple[bytes, list[tuple[str, str, int, int, int]]]:
    output, marks = b"", []
    for part in parts:
        for item in parser.feed(part):
            if isinstance(item, Output):
                output += item.data
            else:
                marks.append((item.kind, item.run, item.code, item.start, item.end))
    return output, marks


@given(pieces, pieces, pieces, st.lists(st.integers(0, 400), max_size=6))
def test_marks_are_found_wherever_the_output_is_cut(
    before: bytes, inside: bytes, after: bytes, cuts: list[int]
) -> None:
    log = before + BEGIN + inside + END + after + b"."
    ends = sorted({0, len(log), *(cut for cut in cuts if cut < len(log))})
    parts = [log[a:b] for a, b in pairwise(ends)]
    whole, split = read(Parser(SECRET), [log]), read(Parser(SECRET), parts)
    assert split == whole
    at = len(before)
    assert ("b", RUN, 0, at, at + len(BEGIN)) in split[1]
    at += len(BEGIN) + len(inside)
    assert ("e", RUN, 7, at, at + len(END)) in split[1]


def test_every_single_cut_and_every_single_byte() -> None:
    log = b"a" + READY + b"b" + BEGIN + b"\x1b]8888;c" + END + b"d."
    whole = read(Parser(SECRET), [log])
    assert whole[0] == b"ab\x1b]8888;cd."
    assert [mark[0] for mark in whole[1]] == ["r", "b", "e"]
    for cut in range(len(log) + 1):
        assert read(Parser(SECRET), [log[:cut], log[cut:]]) == whole
    assert read(Parser(SECRET), [log[i : i + 1] for i in range(len(log))]) == whole


@given(pieces)
def test_nothing_is_held_for_ever_and_nothing_is_lost(data: bytes) -> None:
    parser = Parser(SECRET)
    output, marks = read(parser, [data, b"." * 1000])
    marked = sum(mark[4] - mark[3] for mark in marks)
    assert len(output) + marked == len(data) + 1000
    assert parser.passed == len(data) + 1000


def test_a_machine_fed_from_the_beginning_knows_all() -> None:
    first = Machine(SECRET)
    log = b"echo" + READY
    first.feed(log)
    assert first.ready
    first.begin(RUN, 10)
    assert first.current is not None
    run = first.current
    first.feed(b"noise" + BEGIN + b"0123456789more" + END + b"late")
    assert first.current is None
    assert (run.code, bytes(run.output), run.dropped) == (7, b"0123456789", 4)
    log += b"noise" + BEGIN + b"0123456789more" + END + b"late"
    assert log[run.start : run.end] == b"0123456789more"
    again = Machine(SECRET)
    again.feed(log)
    found = again.runs[RUN]
    assert (found.start, found.end, found.code) == (run.start, run.end, 7)
    assert again.current is None


def test_another_commands_marks_end_nothing() -> None:
    machine = Machine(SECRET)
    machine.begin(RUN, 100)
    other = END.replace(RUN.encode(), b"1" * 16)
    machine.feed(other + BEGIN + other)
    assert machine.current is not None
    assert not machine.current.done
    machine.feed(END)
    assert machine.current is None
    machine.feed(BEGIN)
    assert machine.current is None, "a command begins once"


def test_an_end_without_a_beginning_ends_what_was_interrupted_before_it_began() -> None:
    machine = Machine(SECRET)
    machine.begin(RUN, 100)
    run = machine.current
    assert run is not None
    machine.feed(b"ab" + END)
    assert (run.done, run.start, run.end, run.code, bytes(run.output)) == (True, 2, 2, 7, b"")


def test_what_an_earlier_edge_typed_is_known_whether_its_beginning_came_or_not() -> None:
    machine = Machine(SECRET)
    machine.expect(RUN)
    machine.feed(b"ab" + BEGIN + b"cd" + END)
    machine.expect(RUN)
    assert machine.current is None
    assert machine.runs[RUN].size == 2
    cut = Machine(SECRET)
    cut.feed(END)  # it was interrupted before it began
    assert cut.runs[RUN].done
    cut.begin("1" * 16, 0)
    cut.expect(RUN)
    assert cut.current is cut.runs["1" * 16]


def test_what_is_typed_holds_no_mark() -> None:
    typed = setup(SECRET, "x") + lines(SECRET, RUN, b"echo '" + BEGIN + b"'")
    assert secret_of(typed) is None
    assert LEAD not in typed
    assert all(len(line) < 4096 for line in typed.split(b"\n"))
    assert set(typed) <= {10, *range(32, 127)}


@given(st.binary(max_size=300).filter(lambda data: b"\0" not in data))
def test_quoting_is_what_bash_reads(data: bytes) -> None:
    script = "".join(f"c+=$'{piece}'\n" for piece in quote(data)) + 'printf %s "$c"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={"LC_ALL": "C"})
    assert done.stdout == data


@pytest.mark.parametrize("size", [0, 1, 2999, 3000, 3001, 100_000])
def test_long_commands_are_lines_that_fit_a_terminal(size: int) -> None:
    assert max(len(line) for line in lines(SECRET, RUN, b"\xff" * size).split(b"\n")) < 4096


def test_a_mark_says_where_it_is() -> None:
    parser = Parser(SECRET, offset=100)
    items = parser.feed(b"ab" + BEGIN)
    assert items == [Output(b"ab", 102), Mark("b", RUN, 0, 102, 102 + len(BEGIN))]

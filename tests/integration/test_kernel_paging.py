"""Giving memory back from outside: what leaves and what stays, and what happens where the kernel lacks a way."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel import paging, zram
from dsec.kernel.cgroups import CgroupRoot, Shape, Slot
from dsec.kernel.ledger import Ledger

pytestmark = pytest.mark.root

HOLDS = (
    "input(); x = bytearray(b'some words that compress ' * 800_000); print('up', flush=True); input(); print(sum(x))"
)
SUM = sum(b"some words that compress ") * 800_000


@contextlib.contextmanager
def holding(slot: Slot | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program with 20 MB of its own, in a sandbox's groups where there is one."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if slot is not None:
            slot.attach(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "up\n"
        yield process
        answer, _ = process.communicate("go\n")
        assert answer == f"{SUM}\n", "everything comes back as it was"


@pytest.fixture
def slot() -> Iterator[Slot]:
    root = CgroupRoot.detect(f"dsec-paging-{os.getpid()}")
    root.prepare()
    slot = Slot(root, "s")
    slot.make(Shape(256 << 20, 1.0, 64))
    yield slot
    assert slot.remove()
    root.remove()


def anonymous_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[None]:
    """Compressed swap, of ours where there was none."""
    ledger = Ledger(tmp_path / "host.json")
    try:
        zram.ensure(lambda name: ledger.record("zram", name), 64 << 20)
        yield
    finally:
        said = list(ledger.undo())
    assert all("FAILED" not in line for line in said), said
    assert ledger.changes == ()


def test_memory_leaves_and_the_programs_text_stays(swap: None) -> None:
    with holding() as process:
        before = anonymous_kib(process.pid)
        paging.page_out(process.pid, paging.Text(), lambda: True)
        assert before > 18_000
        assert anonymous_kib(process.pid) < before / 4
        kept = paging.resident_bytes([process.pid])
        paging.page_out(process.pid, paging.Text(0), lambda: True)
        assert paging.resident_bytes([process.pid]) <= kept


def test_it_stops_when_it_is_told_to(swap: None) -> None:
    with holding() as process:
        before = anonymous_kib(process.pid)
        paging.page_out(process.pid, paging.Text(), lambda: False)
        assert anonymous_kib(process.pid) == before


def test_what_is_gone_is_no_error() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
        paging.page_out(process.pid, paging.Text(), lambda: True)


def test_a_cgroup_gives_back_where_there_is_no_process_madvise(slot: Slot, swap: None) -> None:
    with holding(slot) as process:
        began = anonymous_kib(process.pid)
        if paging.reclaim(slot, lambda: True):
            assert anonymous_kib(process.pid) < began
        else:
            assert anonymous_kib(process.pid) == began, "this kernel's cgroups can't"


def test_text_is_the_program_then_the_libraries_as_they_were_loaded() -> None:
    def area(start: int, inode: int, name: bytes, resident: int, *, written: bool = False) -> paging.Area:
        return paging.Area(start, start + (1 << 20), written, (b"00:01", inode), name, resident)

    areas = [
        area(0x1000, 1, b"/bin/program", 300),
        area(0x5000, 4, b"/lib/late.so", 10),
        area(0x6000, 3, b"/lib/big.so", 500),
        area(0x7000, 2, b"/lib/libc.so", 200),
        area(0x8000, 2, b"/lib/libc.so", 1 << 30, written=True),
        area(0x9000, 0, b"", 1 << 30),
    ]
    text = paging.Text(505)
    assert {inode for _, inode in text.keeps(areas, b"/bin/program")} == {1, 2}
    assert text.left == 5
    assert {inode for _, inode in text.keeps(areas, b"/bin/program")} == {1, 2}, "another process has the same"
    assert text.left == 5


def test_a_files_name_can_forge_no_area(tmp_path: Path) -> None:
    name = "evil\rRss:\r7f0000000000-7f0000001000 rw-p 0 00:01 1 x\nRss: a"
    (tmp_path / name).write_bytes(bytes(8192))
    program = (
        "import mmap,sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print('up', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        areas = list(paging._areas(Path(f"/proc/{process.pid}/smaps").read_bytes()))
        assert [each for each in areas if each.name.endswith(b"Rss: a")]
        assert 0x7F0000000000 not in [each.start for each in areas]
        paging.page_out(process.pid, paging.Text(), lambda: True)
        process.communicate("\n")

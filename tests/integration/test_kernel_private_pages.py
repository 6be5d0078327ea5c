"""Copies of what another process has mapped privately: a child that writes to some pages of a memfd of ours."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.kernel import private_pages
from dsec.kernel.private_pages import MOST_RANGES, Copy, Layer

pytestmark = pytest.mark.root

PAGES = 8192
PAGE = mmap.PAGESIZE
SIZE = PAGES * PAGE
F_SEAL_FUTURE_WRITE = 16
OWN, MINE = b"own page..", b"mine......"
processes: dict[int, int] = {}
"""Those that run: where they say that they have done something."""
WRITTEN = [0, 1, 2, 77, *range(100, 7000, 2), PAGES - 1]


def content(page: int) -> bytes:
    return b"base %d" % page


def expected(page: int) -> bytes:
    if page in WRITTEN:
        return OWN
    return b"" if page % 3 else content(page)


@contextmanager
def process(file: int, prepare: Callable[[mmap.mmap], None], go_on: Callable[[mmap.mmap], None]) -> Iterator[int]:
    """Its pid: it has the file mapped privately, is as `prepare` left it, and does `go_on` at SIGUSR1."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        memory = mmap.mmap(file, SIZE, flags=mmap.MAP_PRIVATE)
        for step in (prepare, go_on):
            step(memory)
            os.write(tell, b"x")
            signal.sigwait([signal.SIGUSR1])
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        processes[pid] = ready
        yield pid
    finally:
        processes.pop(pid)
        os.close(ready)
        os.close(tell)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGUSR1)
    assert os.read(processes[pid], 1) == b"x"


def write_most(memory: mmap.mmap) -> None:
    sum(memory[page * PAGE] for page in range(PAGES))
    for page in WRITTEN[:-1]:
        memory[page * PAGE : page * PAGE + 10] = OWN
    memory[PAGE : PAGE + 10] = b"not so yet"


def write_rest(memory: mmap.mmap) -> None:
    for page in (1, WRITTEN[-1]):
        memory[page * PAGE : page * PAGE + 10] = OWN


def make_base() -> int:
    """A memfd."""
    base = os.memfd_create("base", os.MFD_ALLOW_SEALING)
    os.ftruncate(base, SIZE)
    for page in range(0, PAGES, 3):
        os.pwrite(base, content(page), page * PAGE)
    return base


@pytest.fixture
def child() -> Iterator[int]:
    """Its pid: it has written "own" to most of the pages of WRITTEN, read all others, and writes the rest."""
    base = make_base()
    fcntl.fcntl(base, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
    with process(base, write_most, write_rest) as pid:
        os.close(base)
        yield pid


@pytest.fixture(params=[False, True], ids=["scan", "old kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:

        def scanned(fd: int, area: private_pages.Area) -> list[tuple[int, int]]:
            raise OSError(errno.ENOTTY, "as before Linux 6.7")

        monkeypatch.setattr(private_pages, "_scanned", scanned)


def check(fd: int, wanted: Callable[[int], bytes] = expected) -> None:
    assert os.fstat(fd).st_size == SIZE
    for page in range(PAGES):
        assert os.pread(fd, 10, page * PAGE).rstrip(b"\0") == wanted(page).rstrip(b"\0"), page


def check_sealed(fd: int) -> None:
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def extents(fd: int) -> list[tuple[int, int]]:
    """Where a file has data."""
    found, at = [], 0
    while at < SIZE:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, at))
    return found


def test_a_whole_copy_is_as_the_process_sees_it(child: int, kernel: None, tmp_path: Path) -> None:
    copy = Copy(child, SIZE, tmp_path / "memory")
    copy.begin()
    assert os.pread(copy.fd, 6, 3 * PAGE) == b"base 3"
    go_on(child)
    found = copy.finish()
    copy.close()
    try:
        assert copy.private_bytes == len(WRITTEN) * PAGE
        check(found)
    finally:
        os.close(found)


def test_a_layer_over_what_is_mapped_is_as_the_process_sees_it(child: int, kernel: None) -> None:
    layer = Layer(child, SIZE)
    layer.begin()
    go_on(child)  # it writes to a page that it had, and to another
    layer.finish()
    base, own = layer.detach()
    layer.close()
    both = private_pages.whole(base, own)
    try:
        check(both)
        for fd in (both, own):
            check_sealed(fd)
        data = extents(own)
        assert 1 < len(data) <= MOST_RANGES, "each is a mapping of who has it"
        assert all(any(start <= page * PAGE < end for start, end in data) for page in WRITTEN)
        for start, end in data:
            for page in range(start // PAGE, end // PAGE):
                assert os.pread(own, 10, page * PAGE).rstrip(b"\0") == expected(page).rstrip(b"\0")
        check(base, lambda page: b"" if page % 3 else content(page))
    finally:
        for fd in (both, base, own):
            os.close(fd)


def test_a_layer_of_who_has_one_has_both(child: int) -> None:
    """As of a fork's child that is forked."""
    go_on(child)
    first = Layer(child, SIZE)
    first.begin()
    first.finish()
    base, own = first.detach()
    first.close()

    def lay_over(memory: mmap.mmap) -> None:
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        call = ctypes.CDLL(None, use_errno=True).mmap
        call.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 5]
        call.restype = ctypes.c_void_p
        for start, end in extents(own):
            fixed, both = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
            assert call(at + start, end - start, both, mmap.MAP_PRIVATE | fixed, own, start) == at + start
        memory[77 * PAGE : 77 * PAGE + 10] = MINE

    def write_more(memory: mmap.mmap) -> None:
        memory[7777 * PAGE : 7777 * PAGE + 10] = MINE

    with process(base, lay_over, write_more) as pid:
        os.close(base)
        os.close(own)
        second = Layer(pid, SIZE)
        second.begin()
        go_on(pid)
        second.finish()
        both, none = second.whole()
        assert none < 0
        second.close()
    try:
        check(both, lambda page: MINE if page in {77, 7777} else expected(page))
    finally:
        os.close(both)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE])
def test_what_somebody_may_still_write_to_is_copied(seals: int) -> None:
    """A monitor that was taken over can change what it has mapped itself: not what its children begin with."""
    base = make_base()
    with mmap.mmap(base, SIZE) as still_writable, process(base, write_most, write_rest) as pid:
        fcntl.fcntl(base, fcntl.F_ADD_SEALS, seals)
        layer = Layer(pid, SIZE)
        layer.begin()
        go_on(pid)
        layer.finish()
        memory, own = layer.detach()
        layer.close()
        still_writable[3 * PAGE : 3 * PAGE + 4] = b"evil"
    os.close(base)
    try:
        assert own < 0
        check_sealed(memory)
        check(memory)
    finally:
        os.close(memory)


def test_what_is_not_mapped_so_is_refused(child: int, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="find the"):
        Copy(child, SIZE * 2, tmp_path / "memory")
    for pid, size in ((child, SIZE * 2), (os.getpid(), SIZE)):
        with pytest.raises(OSError, match="find the"):
            Layer(pid, size)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

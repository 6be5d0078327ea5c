"""A copy of what another process has mapped privately: a child that writes to some pages of a memfd of ours."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel import private_pages
from dsec.kernel.private_pages import Copy

pytestmark = pytest.mark.root

PAGES = 8192
PAGE = mmap.PAGESIZE
SIZE = PAGES * PAGE
WRITTEN = [0, 1, 2, 77, *range(100, 7000, 2), PAGES - 1]


def content(page: int) -> bytes:
    return b"base %d" % page


@pytest.fixture
def child() -> Iterator[int]:
    """Its pid: it has written "own" to the pages of WRITTEN, read all others, and sleeps."""
    base = os.memfd_create("base")
    os.ftruncate(base, SIZE)
    for page in range(0, PAGES, 3):
        os.pwrite(base, content(page), page * PAGE)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        memory = mmap.mmap(base, SIZE, flags=mmap.MAP_PRIVATE)
        sum(memory[page * PAGE] for page in range(PAGES))
        for page in WRITTEN:
            memory[page * PAGE : page * PAGE + 7] = b"own    "
        os.write(tell, b"x")
        signal.pause()
    os.close(base)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(tell)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_all_pages_are_as_the_process_sees_them(child: int, old_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old_kernel:

        def scanned(fd: int, area: private_pages.Area) -> list[tuple[int, int]]:
            raise OSError(errno.ENOTTY, "as before Linux 6.7")

        monkeypatch.setattr(private_pages, "_scanned", scanned)
    copy = Copy(child, SIZE)
    copy.begin()
    assert os.pread(copy.fd, 6, 3 * PAGE) == b"base 3"
    found = copy.finish()
    copy.close()
    try:
        assert copy.private_bytes == len(WRITTEN) * PAGE
        for page in range(PAGES):
            expected = b"own    " if page in WRITTEN else b"" if page % 3 else content(page)
            assert os.pread(found, 10, page * PAGE).rstrip(b"\0").startswith(expected), page
        with pytest.raises(PermissionError):
            os.pwrite(found, b"x", 0)
        assert fcntl.fcntl(found, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        os.close(found)


def test_what_is_not_mapped_so_is_refused(child: int) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="find the"):
        Copy(child, SIZE * 2)
    with pytest.raises(OSError, match="find the"):
        Copy(os.getpid(), SIZE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

"""A devpts of its own gives a sandbox nothing but its own terminals."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from security_box import Box

from dsec.spec.operations import ExecFlag

pytestmark = pytest.mark.root
PTY = ExecFlag.PTY | ExecFlag.KILL_LEFTOVERS
RDWR_NOCTTY = 0o2 | 0o400
TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, TIOCVHANGUP, TIOCSWINSZ = 0x5412, 0x541C, 0x541D, 0x5423, 0x5437, 0x5414
TIOCSPTLCK, TIOCGPTN, TIOCGPTPEER = 0x40045431, 0x80045430, 0x5441
MOST_TERMINALS = 256


@pytest.fixture
def box(make_box: Callable[..., Box]) -> Box:
    return make_box()


def test_each_sandbox_has_one_from_its_start(box: Box) -> None:
    """Programs that make terminals of their own work before anybody asks for one."""
    assert box.call("openat", -100, "s:/dev/ptmx", RDWR_NOCTTY)[0] >= 0
    assert box.attack("call", "getuid", flags=PTY).calls() == [(0, 0)]
    assert box.attack("cat", "/proc/self/mountinfo").out.count(" - devpts ") == 1


def test_typing_into_a_terminal_is_refused(box: Box) -> None:
    """Into its own, too: what an attacker types would run as whoever reads it."""
    for request in (TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, TIOCVHANGUP):
        for high in (0, 1 << 40):
            result = box.attack("call", "ioctl", 0, request | high, "s:x", flags=PTY)
            assert result.calls() == [(-1, errno.EPERM)], hex(request)
    assert box.attack("call", "ioctl", 0, TIOCSWINSZ, "z:8", flags=PTY).calls() == [(0, 0)]


def test_other_sandboxes_terminals_are_not_there(make_box: Callable[..., Box]) -> None:
    one, other = make_box(), make_box()
    held = one.nursery.wait(one.hold_terminal())
    try:
        assert one.call("openat", -100, "s:/dev/pts/0", RDWR_NOCTTY)[0] >= 0
        assert other.call("openat", -100, "s:/dev/pts/0", RDWR_NOCTTY) == (-1, errno.ENOENT)
        assert not [each for each in Path("/dev/pts").iterdir() if each.name != "ptmx" and each.stat().st_uid >= 65536]
    finally:
        one.nursery.wait(held.release())


def test_the_file_system_is_the_sandboxs_own(box: Box) -> None:
    assert box.call("mknodat", -100, "s:/dev/pts/console", 0o20666, 5 << 8 | 1)[0] == -1
    assert box.call("umount2", "s:/dev/pts", 2) == (-1, errno.EPERM)
    assert box.call("mount", "s:none", "s:/dev/pts", "s:", 0x20, "s:max=4096") == (-1, errno.EPERM)
    assert box.call("mount", "s:none", "s:/tmp", "s:devpts", 0, "s:") == (-1, errno.EPERM)
    [(fd, _), (peer, error)] = box.calls(["openat", -100, "s:/dev/console", 0], ["openat", -100, "s:/dev/tty1", 0])
    assert (fd, peer, error) == (-1, -1, errno.ENOENT)


def test_a_user_cannot_open_anothers_terminal(box: Box) -> None:
    held = box.nursery.wait(box.hold_terminal())
    try:
        assert box.call("openat", -100, "s:/dev/pts/0", RDWR_NOCTTY, user="alice") == (-1, errno.EACCES)
        assert box.call("openat", -100, "s:/dev/pts/0", 0o400, user="alice") == (-1, errno.EACCES)
    finally:
        box.nursery.wait(held.release())
    made = box.calls(
        ["openat", -100, "s:/dev/ptmx", RDWR_NOCTTY],
        ["ioctl", "$0", TIOCSPTLCK, "z:4"],
        ["ioctl", "$0", TIOCGPTPEER, 2],
        user="alice",
    )
    assert all(result >= 0 for result, _ in made), "programs make terminals of their own"


def test_terminals_are_bounded(box: Box) -> None:
    """The kernel counts them host-wide: one sandbox must not use them up."""
    opened = box.attack("terminals", MOST_TERMINALS + 50).calls()
    assert opened == [(MOST_TERMINALS, errno.ENOSPC)]

"""A devpts of its own gives a sandbox nothing but its own terminals."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from security_box import Box, Nursery

from dsec.errors import SandboxNotFound
from dsec.spec.operations import EndKind, ExecFlag, Stage

pytestmark = pytest.mark.root
PTY = ExecFlag.PTY | ExecFlag.KILL_LEFTOVERS
RDWR_NOCTTY = 0o2 | 0o400
TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, TIOCVHANGUP, TIOCSWINSZ = 0x5412, 0x541C, 0x541D, 0x5423, 0x5437, 0x5414
TIOCSPTLCK, TIOCGPTN, TIOCGPTPEER = 0x40045431, 0x80045430, 0x5441
MOST_TERMINALS = 256


def prepare(box: Box) -> Box:
    box.nursery.wait(box.nursery.client.prepare_terminals(box.sandbox))
    return box


@pytest.fixture
def with_terminals(make_box: Callable[..., Box]) -> Box:
    return prepare(make_box())


def test_there_is_none_until_it_is_asked_for(make_box: Callable[..., Box], nursery: Nursery) -> None:
    box = make_box()
    assert box.call("openat", -100, "s:/dev/ptmx", RDWR_NOCTTY) == (-1, errno.ENOENT)
    end = box.attack("call", "getuid", flags=PTY).end
    assert (end.kind, end.stage, end.code) == (EndKind.START_FAILED, Stage.TERMINAL, errno.ENOENT)
    for _ in range(2):  # again: nothing happens
        prepare(box)
    assert box.attack("call", "getuid", flags=PTY).calls() == [(0, 0)]
    mounted = box.attack("cat", "/proc/self/mountinfo").out
    assert mounted.count(" - devpts ") == 1
    with pytest.raises(SandboxNotFound):
        nursery.wait(nursery.client.prepare_terminals("nobody"))


def test_typing_into_a_terminal_is_refused(with_terminals: Box) -> None:
    """Into its own, too: what an attacker types would run as whoever reads it."""
    for request in (TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, TIOCVHANGUP):
        for high in (0, 1 << 40):
            result = with_terminals.attack("call", "ioctl", 0, request | high, "s:x", flags=PTY)
            assert result.calls() == [(-1, errno.EPERM)], hex(request)
    assert with_terminals.attack("call", "ioctl", 0, TIOCSWINSZ, "z:8", flags=PTY).calls() == [(0, 0)]


def test_other_sandboxes_terminals_are_not_there(make_box: Callable[..., Box]) -> None:
    one, other = prepare(make_box()), prepare(make_box())
    held = one.nursery.wait(one.hold_terminal())
    try:
        assert one.call("openat", -100, "s:/dev/pts/0", RDWR_NOCTTY)[0] >= 0
        assert other.call("openat", -100, "s:/dev/pts/0", RDWR_NOCTTY) == (-1, errno.ENOENT)
        assert not [each for each in Path("/dev/pts").iterdir() if each.name != "ptmx" and each.stat().st_uid >= 65536]
    finally:
        one.nursery.wait(held.release())


def test_the_file_system_is_the_sandboxs_own(with_terminals: Box) -> None:
    box = with_terminals
    assert box.call("mknodat", -100, "s:/dev/pts/console", 0o20666, 5 << 8 | 1)[0] == -1
    assert box.call("umount2", "s:/dev/pts", 2) == (-1, errno.EPERM)
    assert box.call("mount", "s:none", "s:/dev/pts", "s:", 0x20, "s:max=4096") == (-1, errno.EPERM)
    assert box.call("mount", "s:none", "s:/tmp", "s:devpts", 0, "s:") == (-1, errno.EPERM)
    [(fd, _), (peer, error)] = box.calls(["openat", -100, "s:/dev/console", 0], ["openat", -100, "s:/dev/tty1", 0])
    assert (fd, peer, error) == (-1, -1, errno.ENOENT)


def test_a_user_cannot_open_anothers_terminal(with_terminals: Box) -> None:
    box = with_terminals
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


def test_terminals_are_bounded(with_terminals: Box) -> None:
    """The kernel counts them host-wide: one sandbox must not use them up."""
    opened = with_terminals.attack("terminals", MOST_TERMINALS + 50).calls()
    assert opened == [(MOST_TERMINALS, errno.ENOSPC)]


def test_asking_while_it_ends(make_box: Callable[..., Box], nursery: Nursery) -> None:
    """The helper that mounts is nobody's way in, nor a reason to stay."""
    for _ in range(10):
        box = make_box()
        asked = nursery.begin(nursery.client.prepare_terminals(box.sandbox))
        box.slot.kill()
        box.wait_end()
        error = asked.exception(60)
        assert error is None or "ended" in str(error) or "no such" in str(error) or "devpts" in str(error)

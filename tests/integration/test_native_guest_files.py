"""The guest's file calls: who may do what, atomic writes, what is refused, trees."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_guest import (
    EXITED,
    KILLED,
    LIST,
    MKDIR,
    MOVE,
    OUTPUT_LIMIT,
    PATIENCE_S,
    READ,
    REMOVE,
    START_FAILED,
    STAT,
    TIMEOUT,
    WRITE,
    Guest,
    Op,
    built,
    running,
)

from dsec.spec.sandbox import FileInfo
from dsec.wire.entries import EntryDecoder
from dsec.wire.frames import FrameType

pytestmark = pytest.mark.root
PARENTS, RECURSIVE, FOLLOW, EXCLUSIVE, APPEND = 1, 2, 4, 8, 16
FILE_STAGE = 6
NOBODY = "12345:12345"


@pytest.fixture(params=["static", "sanitized"])
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    with running(built(request.param)) as found:
        yield found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that others may enter (pytest's own are private)."""
    for part in (tmp_path, *tmp_path.parents):
        if part.owner() == "root" and part != Path("/") and not part.stat().st_mode & 0o001:
            part.chmod(part.stat().st_mode | 0o011)
    return tmp_path


def done(op: Op) -> bytes:
    assert op.end is not None, op.refused
    assert (op.end.end, op.end.code) == (EXITED, 0), (op.end, bytes(op.err))
    return bytes(op.out)


def failed(op: Op) -> int:
    """The errno; there is a message of one line."""
    assert op.end is not None, op.refused
    assert (op.end.end, op.end.stage) == (START_FAILED, FILE_STAGE), op.end
    assert op.err.endswith(b"\n")
    assert op.err.count(b"\n") == 1
    return op.end.code


def entries(op: Op) -> dict[str, FileInfo]:
    decoder = EntryDecoder()
    found = decoder.feed(done(op))
    decoder.end()
    assert len({info.name for info in found}) == len(found)
    return {info.name: info for info in found}


def temporaries(directory: Path) -> list[str]:
    return [path.name for path in directory.glob(".dsec-*")]


# --- read ---


def test_read(guest: Guest, place: Path) -> None:
    data = os.urandom(3_000_000)
    (place / "f").write_bytes(data)
    assert done(guest.file(READ, str(place / "f"))) == data
    assert done(guest.file(READ, str(place / "f"), offset=1_000_000, length=5)) == data[1_000_000:1_000_005]
    assert done(guest.file(READ, str(place / "f"), offset=2_999_999)) == data[-1:]
    assert done(guest.file(READ, str(place / "f"), offset=5_000_000)) == b""
    assert done(guest.file(READ, str(place / "f"), length=0)) == b""
    op = guest.file(READ, str(place / "f"), output_cap=1000)
    assert op.end is not None
    assert op.end.end == OUTPUT_LIMIT
    assert bytes(op.out) == data[:1000]


def test_read_what_cannot_be_read(guest: Guest, place: Path) -> None:
    os.mkfifo(place / "fifo")
    (place / "private").write_text("secret")
    (place / "private").chmod(0o600)
    (place / "loop").symlink_to("loop")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "socket"))
    assert failed(guest.file(READ, str(place / "missing"))) == errno.ENOENT
    assert failed(guest.file(READ, str(place))) == errno.EISDIR
    assert failed(guest.file(READ, str(place / "fifo"))) == errno.EINVAL
    assert failed(guest.file(READ, str(place / "socket"))) == errno.EINVAL
    assert failed(guest.file(READ, "/dev/null")) == errno.EINVAL
    assert failed(guest.file(READ, "/dev/zero")) == errno.EINVAL
    assert failed(guest.file(READ, str(place / "loop"))) == errno.ELOOP
    assert failed(guest.file(READ, str(place / "private"), user=NOBODY)) == errno.EACCES
    assert failed(guest.file(READ, "/" + "x" * 300)) == errno.ENAMETOOLONG
    assert done(guest.file(READ, str(place / "private"))) == b"secret"
    listener.close()


@pytest.mark.parametrize(
    "path",
    ["/proc/self/environ", "/proc/version", "/proc/self/root/etc/passwd", "/proc/self/fd/0", "/proc/../proc/1/maps"],
)
def test_procfs_is_refused(guest: Guest, place: Path, path: str) -> None:
    assert failed(guest.file(READ, path)) in (errno.EACCES, errno.ELOOP)
    assert failed(guest.write_file(path, b"x")) in (errno.EACCES, errno.ELOOP, errno.EISDIR)
    (place / "link").symlink_to(path)
    assert failed(guest.file(READ, str(place / "link"))) in (errno.EACCES, errno.ELOOP)
    assert failed(guest.file(STAT, path)) in (errno.EACCES, errno.ELOOP)


def test_procfs_is_neither_listed_nor_changed(guest: Guest) -> None:
    assert failed(guest.file(LIST, "/proc")) == errno.EACCES
    assert failed(guest.file(REMOVE, "/proc/1", file_flags=RECURSIVE)) == errno.EACCES
    assert failed(guest.file(MKDIR, "/proc/x")) == errno.EACCES
    assert failed(guest.file(MOVE, "/proc/version", path2="/tmp/x")) == errno.EACCES
    top = entries(guest.file(LIST, "/", depth=2))
    assert "proc" in top
    assert not [name for name in top if name.startswith("proc/")]


def test_the_child_of_a_file_call_is_the_user_and_cannot_be_traced(guest: Guest, place: Path) -> None:
    """A write that waits for its data: look at the process meanwhile."""
    place.chmod(0o777)
    op = guest.start(WRITE, path=str(place / "f"), user=NOBODY)
    while op.pid is None:
        guest.step()
    deadline = time.monotonic() + PATIENCE_S
    status: dict[str, str] = {}
    while status.get("Uid") != "12345\t12345\t12345\t12345" and time.monotonic() < deadline:
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{op.pid}/status").read_text().splitlines() if ":\t" in line
        )
    assert status["Gid"] == "12345\t12345\t12345\t12345"
    assert status["Groups"].split() == ["12345"]
    assert {status[name] for name in ("CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    while temporaries(place) == []:
        assert time.monotonic() < deadline
    directory = Path(f"/proc/{op.pid}/fd")
    descriptors = {fd.name: str(fd.readlink()) for fd in directory.iterdir()}
    assert set(descriptors) >= {"0", "1", "2", "3"}
    kinds = {target.split(":")[0] for target in descriptors.values()}
    assert kinds <= {"pipe", str(place), f"{place}/{temporaries(place)[0]}"}, "nothing of the guest's"
    assert directory.stat().st_uid == 0, "not dumpable: its files in /proc belong to root"
    guest.feed(op, b"data")
    done(guest.wait(op))
    assert (place / "f").stat().st_uid == 12345


# --- write ---


def test_write_streams_any_size(guest: Guest, place: Path) -> None:
    data = os.urandom(20 << 20)
    done(guest.write_file(str(place / "big"), data))
    assert (place / "big").read_bytes() == data
    assert stat.S_IMODE((place / "big").stat().st_mode) == 0o644
    done(guest.write_file(str(place / "empty"), b"", mode=0o7755))
    assert (place / "empty").read_bytes() == b""
    assert stat.S_IMODE((place / "empty").stat().st_mode) == 0o7755
    assert temporaries(place) == []


def test_write_replaces_atomically_and_keeps_mode_and_owner(guest: Guest, place: Path) -> None:
    target = place / "f"
    target.write_text("old")
    target.chmod(0o640)
    os.chown(target, 12345, 23456)
    with target.open() as old:
        op = guest.start(WRITE, path=str(target))
        guest.feed(op, b"half", eof=False)
        while op.stdin_acked < 4:
            guest.step()
        assert target.read_text() == "old"
        guest.feed(op, b" and half", start=4)
        done(guest.wait(op))
        assert target.read_text() == "half and half"
        assert old.read() == "old", "who has the old one open keeps it"
    status = target.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o640, 12345, 23456)
    done(guest.write_file(str(target), b"x", mode=0o600))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_write_follows_links_like_a_shell(guest: Guest, place: Path) -> None:
    (place / "a").mkdir()
    (place / "b").mkdir()
    (place / "a" / "link").symlink_to("../b/target")
    (place / "link2").symlink_to(place / "a" / "link")
    done(guest.write_file(str(place / "link2"), b"1"))
    assert (place / "b" / "target").read_text() == "1"
    assert (place / "link2").is_symlink()
    assert temporaries(place / "b") == temporaries(place / "a") == []
    (place / "dir").symlink_to("a")
    assert failed(guest.write_file(str(place / "dir"), b"1")) == errno.EISDIR
    (place / "loop").symlink_to("loop")
    assert failed(guest.write_file(str(place / "loop"), b"1")) == errno.ELOOP
    (place / "dangling").symlink_to("nowhere/file")
    assert failed(guest.write_file(str(place / "dangling"), b"1")) == errno.ENOENT


def test_write_flags(guest: Guest, place: Path) -> None:
    target = place / "x" / "y" / "f"
    assert failed(guest.write_file(str(target), b"1")) == errno.ENOENT
    done(guest.write_file(str(target), b"1", file_flags=PARENTS))
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o755
    assert failed(guest.write_file(str(target), b"2", file_flags=EXCLUSIVE)) == errno.EEXIST
    done(guest.write_file(str(target), b"2", file_flags=APPEND))
    assert target.read_text() == "12"
    done(guest.write_file(str(place / "new"), b"3", file_flags=APPEND, mode=0o600))
    assert stat.S_IMODE((place / "new").stat().st_mode) == 0o600
    assert failed(guest.write_file(str(place / "new"), b"3", file_flags=APPEND | EXCLUSIVE)) == errno.EEXIST
    (place / "link").symlink_to("new")
    assert failed(guest.write_file(str(place / "link"), b"3", file_flags=EXCLUSIVE)) == errno.EEXIST
    done(guest.write_file(str(place / "link"), b"4", file_flags=APPEND))
    assert (place / "new").read_text() == "34"
    done(guest.write_file(str(place / "fresh"), b"5", file_flags=EXCLUSIVE))
    assert temporaries(place) == []


def test_exclusive_when_somebody_is_faster(guest: Guest, place: Path) -> None:
    op = guest.start(WRITE, path=str(place / "f"), file_flags=EXCLUSIVE)
    guest.feed(op, b"mine", eof=False)
    while op.stdin_acked < 4:
        guest.step()
    (place / "f").write_text("theirs")
    guest.feed(op, b"", start=4)
    assert failed(guest.wait(op)) == errno.EEXIST
    assert (place / "f").read_text() == "theirs"
    assert temporaries(place) == []


def test_write_what_cannot_be_written(guest: Guest, place: Path) -> None:
    os.mkfifo(place / "fifo")
    place.chmod(0o755)
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "open" / "roots").write_text("keep")
    assert failed(guest.write_file(str(place / "fifo"), b"x")) == errno.EINVAL
    assert failed(guest.write_file(str(place / "fifo"), b"x", file_flags=APPEND)) == errno.EINVAL
    assert failed(guest.write_file("/dev/null", b"x")) == errno.EINVAL
    assert failed(guest.write_file(str(place), b"x")) == errno.EISDIR
    assert failed(guest.write_file(str(place / "new") + "/", b"x")) == errno.EISDIR
    assert failed(guest.write_file("/", b"x")) == errno.EISDIR
    assert failed(guest.write_file(str(place / "f"), b"x", user=NOBODY)) == errno.EACCES
    # the directory would let it be replaced, but the file isn't the user's to write
    assert failed(guest.write_file(str(place / "open" / "roots"), b"x", user=NOBODY)) == errno.EACCES
    assert (place / "open" / "roots").read_text() == "keep"
    assert temporaries(place) == temporaries(place / "open") == []


def test_a_write_that_is_given_up_leaves_nothing(guest: Guest, place: Path) -> None:
    target = place / "f"
    target.write_text("old")
    for how in ("release", "timeout", "kill"):
        op = guest.start(WRITE, path=str(target), **({"timeout_ms": 200} if how == "timeout" else {}))
        guest.feed(op, b"partial", eof=False)
        while op.stdin_acked < 7 and op.end is None:
            guest.step()
        pid = op.pid
        if how == "release":
            guest.release(op)
        else:
            if how == "kill":
                guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", signal.SIGKILL, 2))
            guest.wait(op)
            assert op.end is not None
            assert op.end.end == (TIMEOUT if how == "timeout" else KILLED)
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert target.read_text() == "old"
        assert temporaries(place) == []


@pytest.mark.parametrize("where", ["first", "later"])
def test_a_full_disk(guest: Guest, place: Path, where: str) -> None:
    disk = place / "disk"
    disk.mkdir()
    assert os.system(f"mount -t tmpfs -o size=1m tmpfs {disk}") == 0
    try:
        (disk / "f").write_text("old")
        op = guest.write_file(str(disk / "f"), bytes(4 << 20) if where == "later" else bytes(1100 << 10))
        assert failed(op) == errno.ENOSPC
        assert (disk / "f").read_text() == "old"
        assert temporaries(disk) == []
    finally:
        assert os.system(f"umount {disk}") == 0


# --- names ---


def test_names_are_bytes(guest: Guest, place: Path) -> None:
    name = bytes(range(1, 47)) + bytes(range(48, 256))
    path = os.fsencode(place) + b"/" + name
    done(guest.write_file(path, b"1"))
    assert [os.fsencode(found.name) for found in place.iterdir()] == [name]
    assert done(guest.file(READ, path)) == b"1"
    assert [os.fsencode(found) for found in entries(guest.file(LIST, str(place)))] == [name]
    done(guest.file(REMOVE, path))
    assert list(place.iterdir()) == []


def test_traversal_is_as_the_kernel_has_it(guest: Guest, place: Path) -> None:
    (place / "a").mkdir()
    (place / "f").write_text("1")
    assert done(guest.file(READ, str(place / "a" / ".." / "f"))) == b"1"
    assert done(guest.file(READ, "/../../.." + str(place / "f"))) == b"1"
    assert done(guest.file(READ, str(place / "f")[1:])) == b"1", "relative to the root"


# --- stat and list ---


def test_stat(guest: Guest, place: Path) -> None:
    target = place / "f"
    target.write_text("12345")
    target.chmod(0o4751)
    os.utime(target, ns=(1, 1_234_567_890_123_456_789))
    (place / "link").symlink_to("f")
    (info,) = entries(guest.file(STAT, str(target))).values()
    assert (info.name, info.type, info.size, info.mode, info.uid, info.nlink) == ("f", "file", 5, 0o4751, 0, 1)
    assert info.mtime == pytest.approx(1_234_567_890.123456789, abs=1e-6)
    (link,) = entries(guest.file(STAT, str(place / "link"))).values()
    assert (link.name, link.type, link.target) == ("link", "symlink", "f")
    (followed,) = entries(guest.file(STAT, str(place / "link"), file_flags=FOLLOW)).values()
    assert (followed.name, followed.type, followed.size) == ("link", "file", 5)
    (root,) = entries(guest.file(STAT, "/")).values()
    assert (root.name, root.type) == ("/", "directory")
    os.mkfifo(place / "fifo")
    assert next(iter(entries(guest.file(STAT, str(place / "fifo"))).values())).type == "fifo"
    assert next(iter(entries(guest.file(STAT, "/dev/null")).values())).type == "char"
    assert failed(guest.file(STAT, str(place / "missing"))) == errno.ENOENT
    assert failed(guest.file(STAT, str(target) + "/")) == errno.ENOTDIR


def test_list(guest: Guest, place: Path) -> None:
    for part in ("a/b/c", "d"):
        (place / part).mkdir(parents=True)
    (place / "a" / "b" / "f").write_text("123")
    (place / "a" / "up").symlink_to("..")
    assert set(entries(guest.file(LIST, str(place)))) == {"a", "d"}
    assert set(entries(guest.file(LIST, str(place), depth=2))) == {"a", "d", "a/b", "a/up"}
    everything = entries(guest.file(LIST, str(place), depth=1 << 40))
    assert set(everything) == {"a", "d", "a/b", "a/up", "a/b/c", "a/b/f"}
    assert everything["a/b/f"].size == 3
    assert everything["a/up"].target == ".."
    assert entries(guest.file(LIST, str(place / "d"))) == {}
    (place / "to-a").symlink_to("a")
    assert set(entries(guest.file(LIST, str(place / "to-a")))) == {"b", "up"}
    assert failed(guest.file(LIST, str(place / "a/b/f"))) == errno.ENOTDIR
    assert failed(guest.file(LIST, str(place / "missing"))) == errno.ENOENT
    place.chmod(0o755)
    (place / "d").chmod(0o700)
    assert "d" in entries(guest.file(LIST, str(place), depth=9, user=NOBODY)), "what can't be entered is still shown"


def test_list_many(guest: Guest, place: Path) -> None:
    for i in range(5000):
        (place / f"{i:05}").touch()
    assert len(entries(guest.file(LIST, str(place)))) == 5000


# --- move, mkdir, remove ---


def test_move(guest: Guest, place: Path) -> None:
    (place / "a").write_text("1")
    (place / "b").write_text("2")
    assert failed(guest.file(MOVE, str(place / "a"), path2=str(place / "b"), file_flags=EXCLUSIVE)) == errno.EEXIST
    done(guest.file(MOVE, str(place / "a"), path2=str(place / "b")))
    assert (place / "b").read_text() == "1"
    assert failed(guest.file(MOVE, str(place / "a"), path2=str(place / "c"))) == errno.ENOENT
    (place / "d").mkdir()
    done(guest.file(MOVE, str(place / "d"), path2=str(place / "e") + "/"))
    assert (place / "e").is_dir()
    (place / "link").symlink_to("b")
    done(guest.file(MOVE, str(place / "link"), path2=str(place / "moved")))
    assert (place / "moved").is_symlink(), "a link itself is moved"
    assert failed(guest.file(MOVE, "/", path2=str(place / "x"))) == errno.EBUSY
    place.chmod(0o755)
    assert failed(guest.file(MOVE, str(place / "b"), path2=str(place / "x"), user=NOBODY)) == errno.EACCES
    refused = guest.file(MOVE, str(place / "b"))
    assert refused.refused is not None


def test_mkdir(guest: Guest, place: Path) -> None:
    done(guest.file(MKDIR, str(place / "a")))
    assert stat.S_IMODE((place / "a").stat().st_mode) == 0o755
    assert failed(guest.file(MKDIR, str(place / "a"))) == errno.EEXIST
    done(guest.file(MKDIR, str(place / "a"), file_flags=PARENTS))
    assert failed(guest.file(MKDIR, str(place / "x" / "y"))) == errno.ENOENT
    done(guest.file(MKDIR, str(place / "x" / "y" / "z") + "/", file_flags=PARENTS, mode=0o1777))
    assert stat.S_IMODE((place / "x" / "y" / "z").stat().st_mode) == 0o1777
    assert stat.S_IMODE((place / "x" / "y").stat().st_mode) == 0o755
    (place / "f").touch()
    assert failed(guest.file(MKDIR, str(place / "f"), file_flags=PARENTS)) == errno.EEXIST
    assert failed(guest.file(MKDIR, str(place / "f" / "g"), file_flags=PARENTS)) == errno.ENOTDIR
    done(guest.file(MKDIR, "/", file_flags=PARENTS))
    place.chmod(0o755)
    assert failed(guest.file(MKDIR, str(place / "n"), user=NOBODY)) == errno.EACCES


def test_remove(guest: Guest, place: Path) -> None:
    keep = place / "keep"
    keep.mkdir()
    (keep / "f").touch()
    tree = place / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    for i in range(300):
        (tree / "a" / f"f{i}").touch()
    (tree / "a" / "link").symlink_to(keep)
    (tree / "a" / "abs").symlink_to("/")
    assert failed(guest.file(REMOVE, str(tree))) == errno.ENOTEMPTY
    done(guest.file(REMOVE, str(tree), file_flags=RECURSIVE))
    assert not tree.exists()
    assert (keep / "f").exists(), "links are not followed"
    (place / "link").symlink_to(keep)
    done(guest.file(REMOVE, str(place / "link"), file_flags=RECURSIVE))
    assert (keep / "f").exists()
    assert failed(guest.file(REMOVE, str(tree), file_flags=RECURSIVE)) == errno.ENOENT
    (place / "empty").mkdir()
    done(guest.file(REMOVE, str(place / "empty")))
    done(guest.file(REMOVE, str(keep / "f")))
    for path in ("/", f"{place}/.", f"{place}/.."):
        assert failed(guest.file(REMOVE, path, file_flags=RECURSIVE)) == errno.EBUSY
    (place / "roots").mkdir()
    (place / "roots" / "f").touch()
    assert failed(guest.file(REMOVE, str(place / "roots"), file_flags=RECURSIVE, user=NOBODY)) == errno.EACCES
    assert (place / "roots" / "f").exists()


def test_remove_is_not_led_astray(guest: Guest, place: Path) -> None:
    """While a tree is removed again and again, one of its directories becomes a link to a place that must stay."""
    keep = place / "keep"
    keep.mkdir()
    (keep / "f").write_text("precious")
    stop = threading.Event()
    victim, spare = place / "tree" / "d", place / "spare"

    def swap() -> None:
        while not stop.is_set():
            try:
                victim.rename(spare)
                victim.symlink_to(keep)
                victim.unlink()
                spare.rename(victim)
            except OSError:
                shutil.rmtree(spare, ignore_errors=True)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(60):
            with contextlib.suppress(OSError):  # swapped in the middle
                for i in range(20):
                    (victim / f"s{i}").mkdir(parents=True, exist_ok=True)
            guest.release(guest.file(REMOVE, str(place / "tree"), file_flags=RECURSIVE))
            assert (keep / "f").read_text() == "precious"
    finally:
        stop.set()
        thread.join()

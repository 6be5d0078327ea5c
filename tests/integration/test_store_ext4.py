"""Files taken out of an ext4 image: one that the kernel has written to, and those that nobody should have made."""

from __future__ import annotations

import os
import random
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.errors import InvalidRequest, TooLarge
from dsec.kernel import mounts
from dsec.store import ext4_files
from dsec.store.ext4_files import take_out
from dsec.vmm.disks import Disks

pytestmark = pytest.mark.root

BASE = 1 << 20
SCRIPT = r"""
set -e
cd "$1"; mkdir upper work; cd upper
mkdir -p many deep/a/b/c; for i in $(seq 700); do echo $i > many/a-rather-long-name-of-a-file-$i; done
head -c 3000000 /dev/urandom > random
truncate -s 5000000 sparse; echo middle | dd of=sparse bs=1 seek=2000000 conv=notrunc status=none
truncate -s 100000 holes
fallocate -l 300000 unwritten
: > empty
ln random deep/a/b/c/again; ln -s ../short deep/link
ln -s "$(printf 'x%.0s' $(seq 200))" long-link
mkfifo pipe; mknod gone c 0 0; mknod zero c 1 5; mknod disk b 8 0
chown 1000:1001 empty; chown 4000000000:70000 holes; chmod 6755 random; chmod 1777 deep
touch -d '2001-02-03 04:05:06.789' empty; touch -d '1960-01-01' holes; touch -d '2300-01-01' unwritten
mkdir opaque
"""
XATTRS = [
    ("opaque", "trusted.overlay.opaque", b"y"),
    ("deep", "trusted.overlay.redirect", b"/etc"),
    ("random", "user.note", b"v" * 300),
    ("empty", "user.small", b"1"),
]
ACL = "system.posix_acl_access"
OWNER, USER, ITS_GROUP, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
NONE = 0xFFFFFFFF


def acl(base: int) -> bytes:
    """One that names a user and a group."""
    entries = [(OWNER, 7, NONE), (USER, 6, base + 1000), (ITS_GROUP, 5, NONE), (GROUP, 4, base + 7), (MASK, 7, NONE)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in [*entries, (OTHER, 1, NONE)])


@pytest.fixture(scope="module", params=[64 << 20, 600 << 20], ids=["1k-blocks", "4k-blocks"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Written to by this host's kernel: an image of our own making is none to fear."""
    top = tmp_path_factory.mktemp("image")
    disks = Disks(top / "disks")
    os.close(disks.make("one", request.param))
    mounted = top / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "-o", "loop", disks.path("one"), mounted], check=True)
    try:
        subprocess.run(["sh", "-c", SCRIPT, "sh", mounted], check=True)
        for name, key, value in XATTRS:
            os.setxattr(mounted / "upper" / name, key, value)
        os.setxattr(mounted / "upper" / "many", ACL, acl(0))
        with open(mounted / "upper" / "torn", "wb") as torn:
            for piece in range(400):
                torn.seek(3 * piece * 4096)
                torn.write(b"piece")
                torn.flush()
        subprocess.run(["sync", "-f", mounted], check=True)
        subprocess.run(["cp", "--sparse=always", disks.path("one"), top / "image"], check=True)
        yield top
    finally:
        mounts.unmount(mounted)


SMALL = pytest.mark.parametrize("image", [64 << 20], ids=["small"], indirect=True)


def taken(image: Path, into: Path) -> Path:
    into.mkdir()
    take_out(image, b"upper", into, id_base=BASE)
    return into


def told(top: Path, base: int) -> dict[str, tuple[object, ...]]:
    """All there is to tell of a tree."""
    found = {}
    for path in [top, *sorted(top.rglob("*"))]:
        about = path.lstat()
        name = str(path.relative_to(top))
        mode = about.st_mode
        content: object = None
        if stat.S_ISREG(mode):
            content = path.read_bytes(), about.st_nlink
        elif stat.S_ISLNK(mode):
            content = path.readlink()
        if (stat.S_ISCHR(mode) and about.st_rdev) or stat.S_ISBLK(mode):
            continue
        owner = (about.st_uid - base, about.st_gid - base)
        names = ("user.note", "user.small", "trusted.overlay.opaque")
        xattrs = {each: os.getxattr(path, each, follow_symlinks=False) for each in names if has(path, each)}
        if stat.S_ISCHR(mode):  # a whiteout is only there
            mode, owner, about_ns = stat.S_IFCHR, (0, 0), 0
        else:
            about_ns = about.st_mtime_ns
        found[name] = (oct(mode), owner, about_ns, content, xattrs)
    return found


def has(path: Path, name: str) -> bool:
    return name in os.listxattr(path, follow_symlinks=False)


def test_it_is_what_the_kernel_sees(image: Path, tmp_path: Path) -> None:
    found = told(taken(image / "image", tmp_path / "upper"), BASE)
    expected = told(image / "mounted" / "upper", 0)
    holes = expected["holes"]
    expected["holes"] = (holes[0], (65534, 70000), *holes[2:])  # an id that can't be moved up
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name] == each, name
    upper = tmp_path / "upper"
    assert (upper / "random").stat().st_ino == (upper / "deep/a/b/c/again").stat().st_ino
    assert not has(upper / "deep", "trusted.overlay.redirect")
    assert (upper / "sparse").stat().st_blocks * 512 < 1 << 20
    assert os.getxattr(upper / "many", ACL) == acl(BASE)
    assert list(tmp_path.iterdir()) == [upper]


def test_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    disks = Disks(tmp_path / "disks")
    os.close(disks.make("one", 8 << 20))
    assert list(taken(disks.path("one"), tmp_path / "upper").iterdir()) == []


@SMALL
def test_what_is_damaged_ends_with_an_error(image: Path, tmp_path: Path) -> None:
    """Bytes changed where a file system has what leads elsewhere: any answer, but no crash, no endless one, and nothing
    outside."""
    whole = (image / "image").read_bytes()
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    block = 1024 << struct.unpack_from("<I", whole, 1024 + 0x18)[0]
    used = [at for at in range(0, len(whole), block) if any(whole[at : at + block])][:400]
    changed = tmp_path / "changed"
    outcomes = set()
    changed.write_bytes(whole)
    for attempt in range(25):
        touched = [chance.choice(used) + chance.randrange(block) for _ in range(chance.choice([1, 20, 400]))]
        with changed.open("r+b") as file:
            for at in touched:
                file.seek(at)
                file.write(bytes([chance.choice([0, 1, 0xFF, chance.randrange(256)])]))
        try:
            taken(changed, tmp_path / str(attempt))
            outcomes.add("taken")
        except (InvalidRequest, TooLarge):
            outcomes.add("refused")
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        with changed.open("r+b") as file:
            for at in touched:
                file.seek(at)
                file.write(whole[at : at + 1])
    assert outcomes <= {"taken", "refused"}


@SMALL
def test_no_more_comes_out_than_is_in_it(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ext4_files, "MAX_ENTRIES", 100)
    with pytest.raises(TooLarge, match="more files"):
        taken(image / "image", tmp_path / "entries")
    monkeypatch.undo()
    monkeypatch.setattr(ext4_files, "MOST_SPARSE", 0)
    with pytest.raises(TooLarge, match="holes included"):
        taken(image / "image", tmp_path / "sparse")
    monkeypatch.undo()
    monkeypatch.setattr(ext4_files, "MOST_S", 0.0)
    with pytest.raises(TooLarge):
        taken(image / "image", tmp_path / "time")
    for damage in (b"", b"x" * 4096, (image / "image").read_bytes()[:70000]):
        (tmp_path / "short").write_bytes(damage)
        with pytest.raises(InvalidRequest):
            taken(tmp_path / "short", tmp_path / f"short-{len(damage)}")

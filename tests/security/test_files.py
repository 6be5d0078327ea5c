"""Files, layers, devices, set-uid programs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from security_box import DEVICES, ID_BASE, LINKS, Box, Nursery

pytestmark = pytest.mark.root

CREATE, WRITE, TRUNCATE, DIRECTORY = 0o100, 1, 0o1000, 0o200000
CANNOT = {errno.EPERM, errno.EACCES}


@pytest.mark.parametrize("user", ["root", "alice"])
@pytest.mark.parametrize(
    ("mode", "device"),
    [(stat.S_IFCHR, (1, 3)), (stat.S_IFCHR, (1, 1)), (stat.S_IFCHR, (10, 200)), (stat.S_IFBLK, (254, 0)),
     (stat.S_IFBLK, (7, 0)), (stat.S_IFCHR, (0, 0))],
)  # fmt: skip
def test_no_device_nodes(box: Box, mode: int, device: tuple[int, int], user: str) -> None:
    """0:0 is overlayfs's whiteout, which needs no capability elsewhere."""
    result, error = box.call("mknodat", -100, "s:/tmp/node", mode | 0o666, os.makedev(*device), user=user)
    assert result == -1
    assert error in CANNOT


@pytest.mark.parametrize("user", ["root", "alice"])
def test_device_nodes_of_a_layer_do_not_open(box: Box, user: str) -> None:
    assert box.attack("cat", "/lower/kmsg", user=user).err == f"{errno.EACCES}\n"
    [(result, error)] = box.attack("put", "/lower/kmsg", "forged", user=user).calls()
    assert (result, error) == (-1, errno.EACCES)


def test_dev_is_shared_small_and_unwritable(box: Box, nursery: Nursery) -> None:
    assert {path.name for path in nursery.dev.iterdir()} == {*DEVICES, *LINKS, "pts"}
    assert box.call("openat", -100, "s:/dev/new", CREATE | WRITE, 0o644) == (-1, errno.EROFS)
    assert box.call("unlinkat", -100, "s:/dev/null", 0)[0] == -1
    assert box.call("fchmodat", -100, "s:/dev/null", 0)[0] == -1
    assert box.attack("put", "/dev/null", "gone").calls() == [(4, 0)]
    opened, zeros = box.calls(["openat", -100, "s:/dev/zero", 0], ["read", "$0", "z:8", 8])
    assert opened[0] >= 0
    assert zeros == (8, 0)
    for name in (
        "mem",
        "kmem",
        "kmsg",
        "port",
        "kvm",
        "fuse",
        "net/tun",
        "vda",
        "loop-control",
        "vsock",
        "userfaultfd",
    ):
        assert box.call("openat", -100, f"s:/dev/{name}", 0) == (-1, errno.ENOENT)


def test_lower_layers_stay_as_they_are(make_box: Callable[..., Box], nursery: Nursery) -> None:
    box, other = make_box(), make_box()
    before = (nursery.layer / "lower" / "file").read_bytes()
    assert box.attack("put", "/lower/file", "changed").calls() == [(7, 0)]
    assert box.attack("cat", "/lower/file").out.startswith("changed")
    linked = box.call("linkat", -100, "s:/lower/file", -100, "s:/tmp/link", 0)
    assert linked == (0, 0)
    assert box.attack("put", "/tmp/link", "through a link").calls() == [(14, 0)]
    assert box.call("fchmodat", -100, "s:/bin/attack", 0o777)[0] == 0
    assert (nursery.layer / "lower" / "file").read_bytes() == before
    assert stat.S_IMODE((nursery.layer / "bin" / "attack").stat().st_mode) == 0o755
    assert other.attack("cat", "/lower/file").out == "from the layer\n"
    assert (nursery.layer / "lower" / "file").stat().st_nlink == 1


def test_overlay_marks_cannot_be_forged(make_box: Callable[..., Box]) -> None:
    """trusted.* is what the mount reads; inside neither that nor user.* means anything to it."""
    box = make_box()
    assert box.call("mkdirat", -100, "s:/tmp/d", 0o755) == (0, 0)
    for name in ("trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.metacopy", "trusted.x"):
        result, error = box.call("setxattr", "s:/tmp/d", f"s:{name}", "s:y", 1, 0)
        assert result == -1
        assert error in {errno.EPERM, errno.EOPNOTSUPP}


def test_files_made_inside_belong_to_nobody_outside(make_box: Callable[..., Box]) -> None:
    box = make_box()
    assert box.call("openat", -100, "s:/tmp/mine", CREATE | WRITE, 0o4755)[0] >= 0
    assert box.call("fchownat", -100, "s:/tmp/mine", 1000, 1000, 0) == (0, 0)
    made = (box.upper / "tmp" / "mine").stat()
    assert (made.st_uid, made.st_gid) == (ID_BASE + 1000, ID_BASE + 1000)
    assert box.call("fchownat", -100, "s:/tmp/mine", 70000, 70000, 0) == (-1, errno.EINVAL)


def test_setuid_programs_work_and_stay_inside(box: Box) -> None:
    assert box.run("/bin/attack", "ids", user="alice").out == "1000 1000 1000 0\n"
    assert box.run("/bin/suid", "ids", user="alice").out == "1000 0 0 0\n"
    # one that belongs to the host's root, by a careless build: its owner isn't in the id range
    assert box.run("/bin/suid-host", "ids", user="alice").out == "1000 1000 1000 0\n"
    assert box.run("/bin/suid-host", "ids").out == "0 0 0 0\n"


def test_no_new_privileges_can_be_asked_for(make_box: Callable[..., Box]) -> None:
    box = make_box(no_new_privs=True)
    assert box.run("/bin/suid", "ids", user="alice").out == "1000 1000 1000 1\n"


def test_file_capabilities_give_only_what_the_sandbox_has(make_box: Callable[..., Box]) -> None:
    """A v2 attribute with every capability, set by root inside: the bounding set still rules."""
    box = make_box()
    everything = "0100000" + "2" + "ffffffff" * 4
    assert box.call("setxattr", "s:/bin/attack", "s:security.capability", f"x:{everything}", 20, 0) == (0, 0)
    result = box.attack("cat", "/proc/self/status", user="alice")
    if result.exit == 0:
        effective = next(line.split()[1] for line in result.out.splitlines() if line.startswith("CapEff"))
        assert int(effective, 16) & ~0xA00405FB == 0
    else:
        # the kernel refuses to execute what asks for more than the bounding set
        assert (result.end.kind.name, result.end.code) == ("START_FAILED", errno.EPERM)


def test_the_hosts_own_files_cannot_be_named(box: Box, nursery: Nursery) -> None:
    for path in (
        str(nursery.layer),
        str(nursery.socket),
        "/run/dsec",
        "/old_root",
        "/new",
        "/mask",
        "/view",
        "/proc/1/root/run",
    ):
        result, _ = box.call("openat", -100, f"s:{path}", 0o10000000)
        assert result == -1
    assert box.call("open_by_handle_at", -100, "z:128", 0) == (-1, errno.EPERM)


def test_links_to_the_outside_stay_inside(make_box: Callable[..., Box]) -> None:
    box = make_box()
    assert box.call("symlinkat", "s:/etc/shadow", -100, "s:/tmp/s") == (0, 0)
    assert box.attack("cat", "/tmp/s").err == f"{errno.ENOENT}\n"
    assert box.call("symlinkat", "s:../../../../../../../../../../etc/shadow", -100, "s:/tmp/t") == (0, 0)
    assert box.attack("cat", "/tmp/t").err == f"{errno.ENOENT}\n"


def test_renames_between_directories_work(make_box: Callable[..., Box]) -> None:
    """Landlock denies them unless they are granted."""
    box = make_box()
    for name in ("a", "b"):
        assert box.call("mkdirat", -100, f"s:/tmp/{name}", 0o755) == (0, 0)
    assert box.call("openat", -100, "s:/tmp/a/f", CREATE | WRITE, 0o644)[0] >= 0
    assert box.call("renameat", -100, "s:/tmp/a/f", -100, "s:/tmp/b/g") == (0, 0)
    assert box.call("linkat", -100, "s:/tmp/b/g", -100, "s:/root/h", 0) == (0, 0)


@pytest.mark.parametrize("name", ["proc", "dev", "sys"])
def test_a_link_as_a_mount_point_is_refused(nursery: Nursery, name: str, tmp_path: Path) -> None:
    """An image whose /proc is a link must not make the zygote mount elsewhere; the failed spawn leaves nothing."""
    from dsec.errors import CreateFailed

    layer = tmp_path / "layer"
    for directory in ("proc", "dev", "sys", "elsewhere"):
        (layer / directory).mkdir(parents=True)
    (layer / name).rmdir()
    (layer / name).symlink_to("/elsewhere")
    for path in (layer, *layer.rglob("*")):
        os.chown(path, ID_BASE, ID_BASE, follow_symlinks=False)
    with pytest.raises(CreateFailed):
        nursery.make(lowers=(str(layer),))
    nursery.make().close()

"""System calls that the filter, or the want of capabilities, refuses; and those that have to work."""

from __future__ import annotations

import errno
import platform
import subprocess
from pathlib import Path

import pytest
from security_box import Box

pytestmark = pytest.mark.root

E = errno
X86 = platform.machine() == "x86_64"

REFUSED: list[tuple[tuple[str | int, ...], int]] = [
    (("bpf", 0, "z:128", 128), E.EPERM),
    (("bpf", 5, "z:128", 128), E.EPERM),
    (("perf_event_open", "z:128", 0, -1, -1, 0), E.EPERM),
    (("userfaultfd", 0), E.EPERM),
    (("userfaultfd", 1), E.EPERM),
    (("keyctl", 0, -3, 0), E.EPERM),
    (("add_key", "s:user", "s:name", "s:secret", 6, -3), E.EPERM),
    (("request_key", "s:user", "s:name", 0, -3), E.EPERM),
    (("io_uring_setup", 8, "z:128"), E.ENOSYS),
    (("io_uring_enter", 0, 0, 0, 0, 0, 0), E.ENOSYS),
    (("io_uring_register", 0, 0, 0, 0), E.ENOSYS),
    (("kexec_load", 0, 0, 0, 0), E.EPERM),
    (("init_module", "z:16", 16, "s:"), E.EPERM),
    (("finit_module", 0, "s:", 0), E.EPERM),
    (("delete_module", "s:ext4", 0), E.EPERM),
    (("open_by_handle_at", -100, "z:128", 0), E.EPERM),
    (("fanotify_init", 0, 0), E.EPERM),
    (("quotactl", 0x80000100, "s:/dev/vda", 0, "z:128"), E.EPERM),
    (("quotactl_fd", 0, 0, 0, 0), E.EPERM),
    (("swapon", "s:/tmp/x", 0), E.EPERM),
    (("swapoff", "s:/tmp/x"), E.EPERM),
    (("reboot", 0xFEE1DEAD, 672274793, 0x1234567, 0), E.EPERM),
    (("acct", "s:/tmp/x"), E.EPERM),
    (("vhangup",), E.EPERM),
    (("settimeofday", "z:16", 0), E.EPERM),
    (("clock_settime", 0, "z:16"), E.EPERM),
    (("adjtimex", "z:256"), E.EPERM),
    (("clock_adjtime", 0, "z:256"), E.EPERM),
    (("syslog", 3, "z:128", 128), E.EPERM),
    (("lookup_dcookie", 0, "z:128", 128), E.ENOSYS),
    (("nfsservctl", 0, 0, 0), E.ENOSYS),
    (("memfd_secret", 0), E.ENOSYS),
    (("file_setattr", -100, "s:/tmp", "z:64", 32, 0), E.EPERM),
    (("unknown",), E.ENOSYS),
    (("far",), E.ENOSYS),
    # filters of one's own: freeing thousands of BPF programs at once has wedged kernels
    (("seccomp", 1, 0, "z:16"), E.EINVAL),
    (("prctl", 22, 2, "z:16"), E.EINVAL),
    # capabilities
    (("setpriority", 0, 0, -5), E.EACCES),
    (("sched_setscheduler", 0, 1, "x:01000000"), E.EPERM),
]
if X86:
    REFUSED += [
        (("iopl", 3), E.EPERM),
        (("ioperm", 0x70, 2, 1), E.EPERM),
        (("modify_ldt", 1, "z:16", 16), E.ENOSYS),
        (("uselib", "s:/bin/attack"), E.ENOSYS),
        (("_sysctl", 0), E.ENOSYS),
        (("sysfs", 3), E.ENOSYS),
        (("create_module", "s:x", 4096), E.ENOSYS),
        (("kexec_file_load", 0, 0, 0, 0, 0), E.EPERM),
    ]


@pytest.mark.parametrize("user", ["root", "alice"])
@pytest.mark.parametrize(("call", "error"), REFUSED, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_refused(box: Box, call: tuple[str | int, ...], error: int, user: str) -> None:
    assert box.call(str(call[0]), *call[1:], user=user) == (-1, error)


@pytest.mark.skipif(not X86, reason="only x86 has other tables of system calls")
def test_other_tables_of_system_calls(box: Box) -> None:
    """By the 32 bit entry every number means another call: the process ends. x32's numbers don't exist."""
    assert box.attack("int80").exit == -31  # SIGSYS
    assert box.attack("x32").calls() == [(-1, E.ENOSYS)]


@pytest.mark.parametrize("value", [0x0400000, 0x0100000, 0x0020000, 0x0800000, 0x7, 0x6, 0x4000000])
def test_odd_personalities(box: Box, value: int) -> None:
    """READ_IMPLIES_EXEC, MMAP_PAGE_ZERO, ... undo protections of set-uid programs."""
    assert box.call("personality", value) == (-1, E.EPERM)


def test_useful_personalities(box: Box) -> None:
    assert box.call("personality", 0xFFFFFFFF)[0] >= 0
    assert box.call("personality", 0x0040000)[0] >= 0  # ADDR_NO_RANDOMIZE: gdb


FAMILIES = {
    "AX25": 3, "IPX": 4, "APPLETALK": 5, "NETROM": 6, "BRIDGE": 7, "ATMPVC": 8, "X25": 9, "ROSE": 11, "NETBEUI": 13,
    "KEY": 15, "PACKET": 17, "ECONET": 19, "ATMSVC": 20, "RDS": 21, "IRDA": 23, "PPPOX": 24, "LLC": 26, "IB": 27,
    "MPLS": 28, "CAN": 29, "TIPC": 30, "BLUETOOTH": 31, "IUCV": 32, "RXRPC": 33, "PHONET": 35, "IEEE802154": 36,
    "CAIF": 37, "ALG": 38, "NFC": 39, "VSOCK": 40, "KCM": 41, "QIPCRTR": 42, "SMC": 43, "XDP": 44, "MCTP": 45,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_families_of_sockets(box: Box, family: int) -> None:
    """VSOCK reaches the host's hypervisor, ALG the kernel's crypto; the rest is rarely used code."""
    for kind in (1, 2, 3, 5):
        assert box.call("socket", family, kind, 0) == (-1, E.EAFNOSUPPORT)
    assert box.call("socketpair", family, 1, 0, "z:8") == (-1, E.EAFNOSUPPORT)


@pytest.mark.parametrize("family", [2, 10], ids=["INET", "INET6"])
def test_raw_and_rare_internet_sockets(box: Box, family: int) -> None:
    assert box.call("socket", family, 3, 1) == (-1, E.EPERM)  # raw
    assert box.call("socket", family, 10, 0x0300) == (-1, E.EPERM)  # SOCK_PACKET
    for protocol in (132, 33, 136, 262, 255):  # SCTP, DCCP, UDP-Lite, MPTCP, raw
        for kind in (1, 2):
            assert box.call("socket", family, kind, protocol) == (-1, E.EPROTONOSUPPORT)
    result, error = box.call("socket", family, 2, 1 if family == 2 else 58)  # ping sockets: closed by a group range
    assert result == -1
    assert error in {E.EACCES, E.EPROTONOSUPPORT}


def test_netlink_is_for_reading_routes(box: Box) -> None:
    for protocol in (*range(1, 23),):
        assert box.call("socket", 16, 3, protocol) == (-1, E.EPROTONOSUPPORT)
    assert box.call("socket", 16, 3, 0)[0] >= 0


def test_the_network_cannot_be_changed(box: Box) -> None:
    """RTM_NEWADDR of 10.0.0.1/8 on lo: the namespace belongs to the host."""
    request = bytes.fromhex(
        "28000000140005000100000000000000020800000100000008000200" + "0a000001" + "0800010" + "00a000001"
    )
    sent = box.calls(
        ["socket", 16, 3, 0], ["write", "$0", f"x:{request.hex()}", len(request)], ["read", "$0", "z:256", 256]
    )
    assert sent[1][0] == len(request)
    assert "10.0.0.1" not in box.attack("cat", "/proc/net/fib_trie").out
    ifreq = f"x:{b'lo'.ljust(16, bytes(1)).hex()}{'00' * 24}"
    opened, down = box.calls(["socket", 2, 2, 0], ["ioctl", "$0", 0x8914, ifreq])
    assert opened[0] >= 0
    assert down == (-1, E.EPERM)


@pytest.mark.parametrize("option", [26, 50, 51, 52], ids=["FILTER", "BPF", "REUSEPORT_CBPF", "REUSEPORT_EBPF"])
def test_sockets_take_no_filters(box: Box, option: int) -> None:
    """A sandbox could hold millions of them, and freeing that many BPF programs at once has wedged kernels."""
    opened, attached = box.calls(["socket", 2, 2, 0], ["setsockopt", "$0", 1, option, "z:16", 16])
    assert opened[0] >= 0
    assert attached == (-1, E.EPERM)


IOCTLS = {
    "TIOCSTI": (0x5412, E.EPERM),
    "TIOCLINUX": (0x541C, E.EPERM),
    "TIOCCONS": (0x541D, E.EPERM),
    "TIOCSETD": (0x5423, E.EPERM),
    "FIBMAP": (1, E.EPERM),
    "XFS_IOC_SWAPEXT": (0xC0C0586D, E.ENOTTY),
    "XFS_IOC_EXCHANGE_RANGE": (0x40285881, E.ENOTTY),
    "XFS_IOC_GOINGDOWN": (0x8004587D, E.ENOTTY),
    "XFS_IOC_OPEN_BY_HANDLE": (0x4038586B, E.ENOTTY),
    "FIFREEZE": (0xC0045877, E.ENOTTY),
    "FITHAW": (0xC0045878, E.ENOTTY),
    "FITRIM": (0xC0185879, E.ENOTTY),
    "FS_IOC_FSSETXATTR": (0x401C5820, E.ENOTTY),
    "FS_IOC_SETFLAGS": (0x40086602, E.ENOTTY),
    "EXT4_IOC_MOVE_EXT": (0xC028660F, E.ENOTTY),
    "EXT4_IOC_SWAP_BOOT": (0x6611, E.ENOTTY),
    "FS_IOC_ENABLE_VERITY": (0x40806685, E.ENOTTY),
    "FS_IOC_SETVERSION": (0x40087602, E.ENOTTY),
    "BTRFS_IOC_SNAP_CREATE": (0x50009401, E.ENOTTY),
    "BTRFS_IOC_SUBVOL_CREATE": (0x5000940E, E.ENOTTY),
    "BTRFS_IOC_TREE_SEARCH": (0xD0009411, E.ENOTTY),
    "BTRFS_IOC_INO_LOOKUP": (0xD0009412, E.ENOTTY),
    "FIDEDUPERANGE": (0xC0189436, E.ENOTTY),
    "LOOP_SET_FD": (0x4C00, E.ENOTTY),
    "LOOP_CTL_GET_FREE": (0x4C82, E.ENOTTY),
    "BLKDISCARD": (0x1277, E.ENOTTY),
    "BLKRRPART": (0x125F, E.ENOTTY),
    "KDSKBENT": (0x4B47, E.ENOTTY),
    "VT_ACTIVATE": (0x5606, E.ENOTTY),
    "DM_VERSION": (0xC138FD00, E.ENOTTY),
    "FS_IOC_GETFSUUID": (0x80111500, E.ENOTTY),
}


@pytest.mark.parametrize(("request_", "error"), IOCTLS.values(), ids=IOCTLS.keys())
def test_ioctls(box: Box, request_: int, error: int) -> None:
    """The high half of the request is ignored by the kernel, so it must not hide a request from the filter."""
    for value in (request_, request_ | 1 << 32, request_ | 0xFFFFFFFF00000000):
        opened, result = box.calls(["openat", -100, "s:/tmp/ioctl", 0o102, 0o600], ["ioctl", "$0", value, "z:4096"])
        assert opened[0] >= 0
        assert result == (-1, error)


def test_harmless_ioctls_work(box: Box) -> None:
    opened, flags, pipes, available = box.calls(
        ["openat", -100, "s:/tmp/ioctl", 0o102, 0o600],
        ["ioctl", "$0", 0x80086601, "z:8"],  # FS_IOC_GETFLAGS
        ["socket", 1, 1, 0],
        ["ioctl", "$2", 0x541B, "z:4"],  # FIONREAD
    )
    assert opened[0] >= 0
    assert flags[0] == 0 or flags[1] in {E.ENOTTY, E.EOPNOTSUPP}
    assert pipes[0] >= 0
    assert available[0] == 0 or available[1] == E.EINVAL


def test_useful_calls_work(box: Box) -> None:
    for call in (
        ["memfd_create", "s:x", 0], ["inotify_init1", 0], ["pipe2", "z:8", 0], ["socket", 1, 1, 0], ["socket", 2, 1, 6],
        ["socket", 10, 2, 17], ["prctl", 4, 1, 0, 0, 0], ["seccomp", 2, 0, "x:0000ff7f"], ["sysinfo", "z:256"],
    ):  # fmt: skip
        result, error = box.call(str(call[0]), *call[1:])
        assert result >= 0, (call, errno.errorcode[error])


def test_capabilities_cannot_be_regained(box: Box) -> None:
    header, everything = "x:2205082000000000", "x:" + "ff" * 24
    assert box.call("capset", header, everything) == (-1, E.EPERM)
    assert box.call("prctl", 24, 21) == (0, 0), "CAP_SYS_ADMIN is not in the bounding set: dropping it changes nothing"
    assert box.call("prctl", 23, 21) == (0, 0), "... and reading says that it isn't there"


def test_the_clock_is_the_hosts_and_stays(box: Box) -> None:
    before = Path("/proc/uptime").read_text()
    box.call("clock_settime", 0, "z:16")
    assert float(Path("/proc/uptime").read_text().split()[0]) >= float(before.split()[0])
    assert int(subprocess.check_output(["date", "+%s"])) > 1_700_000_000

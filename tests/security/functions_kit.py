"""What hostile functions and libraries try, and libraries as layers."""

from __future__ import annotations

import tarfile
from io import BytesIO

TRY = '''
import ctypes, errno, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def tried(result):
    """The name of the error that a call of libc's gave, or "done"."""
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "done"

def syscall(number, *args):
    ctypes.set_errno(0)
    return tried(libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args)))

def attempt(function, *args):
    try:
        function(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
'''
NEW_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
HOSTILE = (
    TRY
    + """
found = {}
here = ctypes.create_string_buffer(b"/tmp")
tmpfs = ctypes.create_string_buffer(b"tmpfs")
at = lambda buffer: ctypes.addressof(buffer)
found["mount"] = syscall(165, at(tmpfs), at(here), at(tmpfs), 0, 0)
found["umount"] = syscall(166, at(here), 2)
found["fsopen"] = syscall(430, at(tmpfs), 0)
found["open_tree"] = syscall(428, -100, at(here), 1)
found["mount_setattr"] = syscall(442, -100, at(here), 0, at(ctypes.create_string_buffer(64)), 32)
found["chroot"] = attempt(os.chroot, "/tmp")
found["pivot_root"] = syscall(155, at(here), at(here))
found["hostname"] = attempt(socket.sethostname, "owned")
for flag in FLAGS:
    found["unshare %x" % flag] = syscall(272, flag)
    found["clone %x" % flag] = syscall(56, flag | 17, 0, 0, 0, 0)
found["clone3"] = syscall(435, at(ctypes.create_string_buffer(88)), 88)
for family in (socket.AF_INET, socket.AF_INET6, 16, 17, 38, 40):
    found["socket %d" % family] = attempt(socket.socket, family, socket.SOCK_DGRAM)
for pid in (1, 2):
    found["ptrace %d" % pid] = syscall(101, 16, pid, 0, 0)
    found["kill %d" % pid] = attempt(os.kill, pid, 9)
    found["memory %d" % pid] = attempt(open, "/proc/%d/mem" % pid, "r+b")
    found["files %d" % pid] = attempt(os.listdir, "/proc/%d/fd" % pid)
    found["namespace %d" % pid] = attempt(os.open, "/proc/%d/ns/mnt" % pid, 0)
found["bpf"] = syscall(321, 0, 0, 0)
found["filter"] = syscall(317, 1, 0, 0)
found["keyring"] = syscall(250, 0, -3, 0)
found["handle"] = syscall(304, -100, at(ctypes.create_string_buffer(64)), 0)
for path in ("/etc/x", "/usr/x", "/run/x", "/root/x", "/proc/sys/kernel/hostname", "/tmp/x"):
    found["write " + path] = attempt(open, path, "w")
found["proc"] = sorted(name for name in os.listdir("/proc") if not name.isdigit())
with open("/proc/self/status") as status:
    for line in status:
        if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:")):
            name, _, value = line.partition(":")
            found[name] = value.strip()
found["uid"] = os.getuid()
"""
)
FORGER = """
import os, struct
for turn in range(8):
    for kind in (193, 67, 65, 70, 71, 1, 9999):
        os.write(3, struct.pack("<IIIi", kind, turn % 3, turn, 1) + b"x" * turn)
os.write(3, b"short")
"""
LINKED = "import os\nfound = os.readlink('/tmp') if os.path.islink('/tmp') else ''\n"
SHARER = "import mmap\nkept = mmap.mmap(-1, 4096)\n"
LATE = """
import os, struct, threading, time
def later():
    while True:
        for turn in range(1, 40):
            for lane in range(4):
                os.write(3, struct.pack("<IIIi", 193, lane, turn, 2))
        time.sleep(0.05)
threading.Thread(target=later, daemon=True).start()
"""


def module_layer(link: str = "", **modules: str) -> BytesIO:
    """An archive with Python modules where Debian's Python looks; `link`: where its /tmp leads."""
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, source in modules.items():
            data = source.encode()
            info = tarfile.TarInfo(f"usr/lib/python3/dist-packages/{name}.py")
            info.size = len(data)
            tar.addfile(info, BytesIO(data))
        if link:
            info = tarfile.TarInfo("tmp")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    archive.seek(0)
    return archive

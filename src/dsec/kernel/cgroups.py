"""Cgroups behind one interface: controllers on version 2 where it has them, on version 1 where it doesn't (hybrid).

Kill, freeze and nested groups for commands always use a version 2 hierarchy, even one without controllers. A `Slot`
is one sandbox's set of directories, of the same name in each hierarchy, below `dsec-<instance>/`. Slots are used
again (see `cgroup_pool`): a memory cgroup is dear to make and to destroy. So counters that the kernel can't reset are
reported relative to a baseline that is taken when the slot is empty, and kept in an extended attribute of the
directory, where a restarted server finds it.

Memory limits: the kernel reclaims page cache before it kills, so a limit bites on anonymous, shared and kernel memory
first, and a slot may keep an eighth of its limit in page cache from one sandbox to the next. Page cache of files that
are shared between sandboxes is charged to whoever reads them first. Swap counts against the same limit (version 1) or
is off (version 2).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.kernel import mounts, syscalls
from dsec.kernel.cgroup_cpu import set_share, write
from dsec.kernel.syscalls import KernelError
from dsec.ports import Usage

CONTROLLERS = ("memory", "cpu", "pids")
SLOT_NAME = re.compile(r"s[0-9]+")
MAX_DESCENDANTS = 2048
"""Nested groups in a slot: one for each operation of a guest (at most 1,024), and those that are being removed."""
RESIDUE_SHARE = 8
SANDBOX_GROUP = "g"
"""The zygote's name for a sandbox's own group in its slot (GROUP in native/zygote/spawn.c)."""
_NO_GROUPS = 2
"""Links of a directory without directories in it."""

_XATTR = "trusted.dsec"
_ENODATA = errno.ENODATA


class Shape(Struct, frozen=True):
    """The limits of a slot."""

    memory_bytes: int
    cpus: float
    pids: int
    idle: bool = False
    """It runs on what nobody else wants of the CPUs (SCHED_IDLE)."""


class Note(Struct, frozen=True, omit_defaults=True):
    """What is kept at a slot's directory: its limits, whom it serves, and its counters when that began."""

    shape: Shape
    owner: str = ""
    baseline: Usage = Usage()


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


class CgroupRoot(Struct, frozen=True):
    """Where this host has which controller, and the name below which this server keeps its groups."""

    v2: Path
    """Where a version 2 hierarchy is mounted."""
    v1: dict[str, Path]
    """Where the controllers that version 2 doesn't have are mounted; empty on a host with version 2 only."""
    name: str

    @classmethod
    def detect(cls, name: str, mount_at: Path | None = None) -> CgroupRoot:
        """Look at what is mounted. Where no version 2 hierarchy is, one is mounted at `mount_at`.

        Raises KernelError where a controller is missing on this host.
        """
        v1: dict[str, Path] = {}
        v2: Path | None = None
        for entry in mounts.mounted():
            if entry.fstype == "cgroup2":
                v2 = v2 or entry.target
            elif entry.fstype == "cgroup":
                for controller in CONTROLLERS:
                    if controller in entry.super_options:
                        v1.setdefault(controller, entry.target)
        if v2 is None and mount_at is not None:
            mount_at.mkdir(parents=True, exist_ok=True)
            syscalls.mount("cgroup2", mount_at, "cgroup2")
            v2 = mount_at
        if v2 is None:
            raise KernelError(errno.ENODEV, "find a cgroup v2 hierarchy", {errno.ENODEV: "mount -t cgroup2 none DIR"})
        have = (v2 / "cgroup.controllers").read_text().split()
        for controller in CONTROLLERS:
            if controller in have:
                v1.pop(controller, None)
            elif controller not in v1:
                hint = f"boot with cgroup_enable={controller}, or delegate it to this container"
                raise KernelError(errno.ENODEV, f"find the {controller} controller", {errno.ENODEV: hint})
        return cls(v2, v1, name)

    @property
    def version(self) -> str:
        """`v2`, or `hybrid`: version 1 controllers beside a version 2 hierarchy."""
        return "hybrid" if self.v1 else "v2"

    def parents(self) -> list[Path]:
        """The server's own directory in each hierarchy."""
        return [mount / self.name for mount in (self.v2, *self.v1.values())]

    def prepare(self) -> None:
        """Make the server's directories and switch the controllers on for the slots below. Idempotent."""
        for parent in self.parents():
            parent.mkdir(exist_ok=True)
        wanted = " ".join(f"+{controller}" for controller in CONTROLLERS if controller not in self.v1)
        if wanted:
            for place in (self.v2, self.v2 / self.name):
                write(f"{place}/cgroup.subtree_control", wanted)

    @property
    def favors_moves(self) -> bool:
        """Whether the kernel was told that processes change cgroups often."""
        entry = mounts.find_mount(self.v2)
        return entry is not None and "favordynmods" in entry.super_options

    def favor_moves(self) -> None:
        """Tell the kernel that processes change cgroups often: else the first move into a version 1 group after a while
        waits for RCU, some milliseconds. For the whole host; `forget_moves` takes it back. Linux 6.0 and newer."""
        syscalls.mount("none", self.v2, "cgroup2", syscalls.MS_REMOUNT, "favordynmods")

    def remove(self) -> None:
        """Remove the server's directories, once all slots are gone."""
        for parent in self.parents():
            with contextlib.suppress(FileNotFoundError):
                parent.rmdir()

    def names(self) -> list[str]:
        """The slots that exist in any hierarchy."""
        found: set[str] = set()
        for parent in self.parents():
            with contextlib.suppress(FileNotFoundError):
                found.update(name for name in os.listdir(parent) if SLOT_NAME.fullmatch(name))
        return sorted(found, key=lambda name: int(name[1:]))

    def name_of_pid(self, pid: int) -> str | None:
        """The slot that a process is in, or None."""
        try:
            text = Path(f"/proc/{pid}/cgroup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        match = re.search(rf"^0::.*?/{re.escape(self.name)}/(s[0-9]+)(/|$)", text, re.MULTILINE)
        return match[1] if match else None


def forget_moves(v2: str) -> None:
    """The opposite of `favor_moves`. The kernel knows no word for it; options that are left out are switched off."""
    syscalls.mount("none", v2, "cgroup2", syscalls.MS_REMOUNT)


class Slot:
    """One sandbox's cgroups. Not thread-safe; calls take microseconds except `clean` and `remove`."""

    def __init__(self, root: CgroupRoot, name: str) -> None:
        self.root = root
        self.name = name
        self.v2 = f"{root.v2}/{root.name}/{name}"
        """The directory that the guest gets, and that the sandbox is killed and frozen by."""
        self._dirs = {c: f"{root.v1[c]}/{root.name}/{name}" if c in root.v1 else self.v2 for c in CONTROLLERS}
        self.v1 = tuple(self._dirs[c] for c in CONTROLLERS if c in root.v1)
        """The directories that the sandbox has to be attached to besides."""
        self.note: Note | None = None
        self._fds: dict[tuple[str, str], int] = {}

    # making and finding

    def make(self, shape: Shape) -> None:
        """Make the directories and set the limits. Idempotent."""
        for path in (self.v2, *self.v1):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o755)
        write(f"{self.v2}/cgroup.max.descendants", str(MAX_DESCENDANTS))
        write(f"{self.v2}/cgroup.max.depth", "2")
        self.reshape(shape)

    def load(self) -> bool:
        """Read the note of an existing slot. False where it is missing or incomplete."""
        try:
            self.note = msgspec.json.decode(os.getxattr(self.v2, _XATTR), type=Note)
        except (OSError, msgspec.MsgspecError):
            return False
        return all(os.path.isdir(path) for path in self.v1)

    def _keep(self, note: Note) -> None:
        self.note = note
        os.setxattr(self.v2, _XATTR, msgspec.json.encode(note))

    def reshape(self, shape: Shape) -> None:
        """Set other limits on an empty slot."""
        memory, cpu, pids = (self._dirs[c] for c in CONTROLLERS)
        if "memory" in self.root.v1:
            swap = f"{memory}/memory.memsw.limit_in_bytes"
            accounted = os.path.exists(swap)
            if accounted:  # it can't be below the other at any moment
                write(swap, "-1")
            write(f"{memory}/memory.limit_in_bytes", str(shape.memory_bytes))
            if accounted:
                write(swap, str(shape.memory_bytes))
        else:
            write(f"{memory}/memory.max", str(shape.memory_bytes))
            if os.path.exists(f"{memory}/memory.swap.max"):
                write(f"{memory}/memory.swap.max", "0")
        set_share(cpu, shape.cpus, v1="cpu" in self.root.v1, idle=shape.idle)
        write(f"{pids}/pids.max", str(shape.pids))
        self._keep(Note(shape, baseline=self._counters()))

    def set_idle(self) -> None:
        """As `Shape.idle`, whatever its shape was. Idempotent."""
        assert self.note is not None
        if not self.note.shape.idle:
            set_share(self._dirs["cpu"], self.note.shape.cpus, v1="cpu" in self.root.v1, idle=True)
            self._keep(msgspec.structs.replace(self.note, shape=msgspec.structs.replace(self.note.shape, idle=True)))

    def assign(self, owner: str, uid: int) -> None:
        """Give the slot to a sandbox whose inside root is `uid`: it may make groups in the version 2 directory, and
        move processes between them."""
        assert self.note is not None
        self._keep(msgspec.structs.replace(self.note, owner=owner))
        if os.stat(self.v2).st_uid != uid:
            for path in (self.v2, f"{self.v2}/cgroup.procs", f"{self.v2}/cgroup.threads"):
                os.chown(path, uid, uid)

    # while it serves

    def attach(self, pid: int) -> None:
        """Put a process into all the slot's cgroups."""
        for path in (self.v2, *self.v1):
            write(f"{path}/cgroup.procs", str(pid))

    def kill(self) -> None:
        """End everything inside, whatever it forked (SIGKILL). Returns before they are gone. Idempotent."""
        try:
            write(f"{self.v2}/cgroup.kill", "1")
        except KernelError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # nothing is there to be killed
                raise

    def freeze(self, frozen: bool = True) -> None:
        """Stop or continue everything inside; it takes effect soon after."""
        write(f"{self.v2}/cgroup.freeze", "1" if frozen else "0")

    @property
    def frozen(self) -> bool:
        """Whether it was told to stop."""
        return _read(f"{self.v2}/cgroup.freeze").startswith(b"1")

    def thaw(self) -> None:
        """As `freeze(False)`, for one that may be gone. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            self.freeze(False)

    @property
    def populated(self) -> bool:
        """Whether a living process is inside."""
        try:
            return b"populated 1" in _read(f"{self.v2}/cgroup.events")
        except FileNotFoundError:
            return False

    def usage(self, disk_bytes: int = 0, disk_limit_bytes: int = 0) -> Usage:
        """Counters since the slot was assigned. The first call opens the files, later ones only read them."""
        now, base = self._counters(), self.note.baseline if self.note else Usage()
        memory = max(0, now.memory_bytes - base.memory_bytes)
        # Where the kernel can't reset its peak, an old one that was higher says nothing.
        peak = now.memory_peak_bytes - base.memory_bytes if now.memory_peak_bytes > base.memory_peak_bytes else 0
        return Usage(
            cpu_us=now.cpu_us - base.cpu_us,
            throttled_us=now.throttled_us - base.throttled_us,
            memory_bytes=memory,
            memory_peak_bytes=max(memory, peak),
            oom_kills=now.oom_kills - base.oom_kills,
            pids=now.pids,
            pids_refused=now.pids_refused - base.pids_refused,
            disk_bytes=disk_bytes,
            disk_limit_bytes=disk_limit_bytes,
        )

    def _counters(self) -> Usage:
        memory_v1, cpu_v1 = "memory" in self.root.v1, "cpu" in self.root.v1
        base = self._fields("v2", "cpu.stat")
        throttle = self._fields("cpu", "cpu.stat") if cpu_v1 else base
        if memory_v1:
            used = self._number("memory.usage_in_bytes")
            peak = int(os.pread(self._fd("memory", "memory.max_usage_in_bytes", os.O_RDWR), 1024, 0))
            oom = self._fields("memory", "memory.oom_control")
        else:
            used, peak = self._number("memory.current"), self._number("memory.peak")
            oom = self._fields("memory", "memory.events")
        return Usage(
            cpu_us=base[b"usage_usec"],
            throttled_us=throttle[b"throttled_time"] // 1000 if cpu_v1 else throttle.get(b"throttled_usec", 0),
            memory_bytes=used,
            memory_peak_bytes=peak,
            oom_kills=oom.get(b"oom_kill", 0),
            pids=int(self._pread("pids", "pids.current")),
            pids_refused=self._fields("pids", "pids.events").get(b"max", 0),
        )

    def _fd(self, place: str, name: str, flags: int = os.O_RDONLY) -> int:
        fd = self._fds.get((place, name))
        if fd is None:
            directory = self.v2 if place == "v2" else self._dirs[place]
            fd = self._fds[place, name] = os.open(f"{directory}/{name}", flags | os.O_CLOEXEC)
        return fd

    def _pread(self, place: str, name: str) -> bytes:
        return os.pread(self._fd(place, name), 1024, 0)

    def _fields(self, place: str, name: str) -> dict[bytes, int]:
        words = self._pread(place, name).split()
        return dict(zip(words[::2], map(int, words[1::2]), strict=False))

    def _number(self, name: str) -> int:
        try:
            return int(self._pread("memory", name))
        except FileNotFoundError:  # memory.peak came with Linux 5.19
            return 0

    def close(self) -> None:
        """Close the descriptors; the slot stays."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    # after it served

    def clean_at_once(self) -> bool:
        """What `clean` does where nothing has to be waited for, as is the rule when pid 1 and with it all others were
        reaped: well under a millisecond, and the descriptors stay open. False, with the slot as it was, where it takes
        more."""
        if self.note is None:
            return False
        try:
            events = self._pread("v2", "cgroup.events")
            if (
                b"populated 0" not in events
                or b"frozen 1" in events
                or not self._without_groups()
                or os.listxattr(self.v2) != [_XATTR]
            ):
                return False
            now = self._counters()
            if now.pids or now.memory_bytes > self._residue():
                return False
            peak = now.memory_peak_bytes
            if "memory" in self.root.v1:
                os.pwrite(self._fd("memory", "memory.max_usage_in_bytes", os.O_RDWR), b"0", 0)
                peak = now.memory_bytes  # as the kernel sets it, give or take a page
            # Only in memory: until `assign` keeps it, the directory names the sandbox that is gone.
            self.note = Note(self.note.shape, baseline=msgspec.structs.replace(now, memory_peak_bytes=peak))
        except FileNotFoundError:
            return False
        return True

    def _without_groups(self) -> bool:
        """Remove the empty groups in it, one level; False where that doesn't do."""
        try:
            _rmdir(f"{self.v2}/{SANDBOX_GROUP}")
            if os.stat(self.v2).st_nlink == _NO_GROUPS:
                return True
            with os.scandir(self.v2) as entries:
                for name in [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]:
                    os.rmdir(f"{self.v2}/{name}")
        except OSError:
            return False
        return True

    def clean(self, timeout_s: float = 5.0) -> bool:
        """End what runs, remove nested groups, give most memory back, begin counters anew. Blocks; False where it
        can't be emptied in time."""
        try:
            if not self._empty(timeout_s) or not self._reaped(timeout_s):
                return False
            self._drop_memory(keep=self._residue())
            for name in os.listxattr(self.v2):
                if name != _XATTR:
                    os.removexattr(self.v2, name)
            if self.note is None and not self.load():
                return False
            assert self.note is not None
            self._keep(Note(self.note.shape, baseline=self._counters()))
        except FileNotFoundError:
            return False
        finally:
            self.close()
        return True

    def _empty(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(KernelError):
            self.freeze(False)
        while self.populated:
            self.kill()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return self._remove_nested(deadline)

    def _reaped(self, timeout_s: float) -> bool:
        """Wait for zombies: nothing is left to kill, but they count against pids until their parent reaps them."""
        deadline = time.monotonic() + timeout_s
        while int(self._pread("pids", "pids.current")):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _remove_nested(self, deadline: float) -> bool:
        for top, names, _ in os.walk(self.v2, topdown=False):
            for name in names:
                while not _rmdir(f"{top}/{name}"):
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.002)
        return True

    def _residue(self) -> int:
        """How much may stay charged to an empty slot: page cache of layers, that the next sandbox would only read
        again."""
        shape = self.note.shape if self.note else None
        return shape.memory_bytes // RESIDUE_SHARE if shape else 0

    def _drop_memory(self, keep: int = 0) -> None:
        memory = self._dirs["memory"]
        drop = self._number("memory.usage_in_bytes" if "memory" in self.root.v1 else "memory.current") > keep
        if "memory" in self.root.v1:
            if drop:
                write(f"{memory}/memory.force_empty", "0")
            for name in (
                "memory.max_usage_in_bytes",
                "memory.failcnt",
                "memory.memsw.max_usage_in_bytes",
                "memory.memsw.failcnt",
            ):
                with contextlib.suppress(KernelError):  # no swap accounting
                    write(f"{memory}/{name}", "0")
        elif drop and os.path.exists(f"{memory}/memory.reclaim"):
            with contextlib.suppress(KernelError):  # EAGAIN: less than asked was left
                write(f"{memory}/memory.reclaim", str(max(1, int(_read(f"{memory}/memory.current")))))

    def remove(self, timeout_s: float = 5.0) -> bool:
        """Remove the slot. Blocks; False where something in it doesn't end. Idempotent."""
        try:
            if not self._empty(timeout_s):
                return False
            self._drop_memory()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
        finally:
            self.close()
        gone = [_rmdir(path) for path in (*self.v1, self.v2)]
        return all(gone)


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True

"""The marks of one sandbox's tripwires, and what their events mean. Used by the sentry's thread alone, once made.

Owns up to three fanotify groups: `exact` (decoys and files watched by their full names, masked files, starts of
programs), `wide` (everything written, or read, anywhere in the sandbox: only where a rule has wildcards) and `names`
(entries of watched directories that come, go or are renamed). Apart, so that a flood in one can't make another lose
events. Invariants: marks are set through the sandbox's own root (no link in it leads out); the edge's own accesses and
those of the sandbox's guest on behalf of a caller are not hits; what is pinned inside goes with `close`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from dsec.edge.evidence import exe_of, look, shown
from dsec.edge.lookout import OVERFLOW, Hit, Lookout, Raise
from dsec.edge.starts import LAST_S, Start
from dsec.edge.tasks import log
from dsec.kernel.fanotify import NAMES, Event, Group, Mask, handle_of, open_inside
from dsec.plan.tripwires import Matches, Pace, Plan, Seen
from dsec.spec.tripwires import Rule, Touch

WALK_DIRECTORIES = 4096
MARKED_DIRECTORIES = 1024
PROGRAMS_KEPT = 1024
STARTS_KEPT = 512
EXPECTED_S = 2.0
UNNAMEABLE = "/(a path of more than 4096 bytes)"
"""As which a file counts that lies too deep for the kernel to name it."""
_SETTLE_TRIES, _SETTLE_S = 6, 0.0003
_LOADER = re.compile(r"/ld(-linux[^/]*|-musl[^/]*)?\.so[.0-9]*$")
_WRITTEN = Mask.MODIFY | Mask.CLOSE_WRITE
_SELF = os.getpid


class Post(Lookout):
    """One sandbox's, with all that its files and processes show."""

    def __init__(self, plan: Plan, pid: int, raises: Raise) -> None:
        """`pid`: the host's number of the sandbox's first process. Sets all marks; raises KernelError."""
        super().__init__(plan, raises)
        self.exact = Group()
        self.wide: Group | None = None
        self.names: Group | None = None
        self._root = -1
        self._lost = Pace()
        self._programs: dict[int, str] = {}
        self.starting: deque[Start] = deque()
        """Starts whose program wasn't there yet."""
        self._inodes: dict[tuple[int, int], str] = {}
        """Files that are watched by their full name, under whatever name they are reached."""
        self._directories: dict[bytes, str] = {}
        self._marked: set[str] = set()
        self._fixed = {*plan.decoys, *plan.fixed}
        self._masks: set[str] = set()
        try:
            self._root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._guest = _identity(f"/proc/{pid}/exe")
            with open(f"/proc/{pid}/uid_map", encoding="ascii") as file:
                self._uid_base = int(file.read().split()[1])
            self._arm(pid)
        except BaseException:
            self.close()
            raise

    # --- marks ---

    def _arm(self, pid: int) -> None:
        plan, root = self.plan, f"/proc/self/fd/{self._root}"
        for path in plan.decoys:
            self._mark_file(path, Mask.OPEN | _WRITTEN)
        for path in plan.fixed:
            self._mark_fixed(path)
        for path in self._mask_mounts(pid):
            if plan.masked(path):
                self._mark_mask(path)
        if plan.starts:
            self.exact.mark(Mask.OPEN_EXEC, root, filesystem=True)
        wanted = (_WRITTEN if plan.writes_everywhere else 0) | (Mask.OPEN if plan.reads_everywhere else 0)
        if wanted:
            self.wide = Group()
            self.wide.mark(wanted, root, filesystem=True)
        if plan.names:
            self.names = Group(naming=True)
            for path in plan.directories:
                if plan.watches_entries(path):
                    self._mark_directory(path)
            for top in plan.walks:
                self._walk(top)

    def _mark_file(self, path: str, mask: int) -> None:
        """One that isn't there is no error: its directory is watched for it to come."""
        with contextlib.suppress(OSError), self._inside(path) as fd:
            self.exact.mark(mask, f"/proc/self/fd/{fd}")
            self._inodes[_key(os.fstat(fd))] = path

    def _mark_fixed(self, path: str) -> None:
        mask = 0
        wanted: tuple[tuple[Touch, int], ...] = (("read", Mask.OPEN), ("write", _WRITTEN))
        for touch, bits in wanted:
            if self.plan.touched(Seen(touch, path)):
                mask |= bits
        if mask:
            self._mark_file(path, mask)

    def _mark_mask(self, path: str) -> None:
        with contextlib.suppress(OSError), self._inside(path) as fd:
            self.exact.mark(Mask.OPEN | Mask.ON_DIRECTORY, f"/proc/self/fd/{fd}", mount=True)
            self._masks.add(path)

    @staticmethod
    def _mask_mounts(pid: int) -> list[str]:
        """Mounts over files of /proc and /sys that hold nothing. Generated files, some on top of those, are for
        everybody."""
        tops: dict[str, str] = {}
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                root, place = line.split()[3:5]
                if place.startswith(("/proc/", "/sys/")):
                    tops[place] = root
        return [place for place, root in tops.items() if root.endswith(("/mask/file", "/mask/dir"))]

    def _mark_directory(self, path: str) -> None:
        if self.names is None or path in self._marked or len(self._marked) >= MARKED_DIRECTORIES:
            return
        with contextlib.suppress(OSError), self._inside(path) as fd:
            place = f"/proc/self/fd/{fd}"
            self.names.mark(NAMES, place)
            self._directories[handle_of(place)] = path
            self._marked.add(path)

    def _walk(self, top: str) -> None:
        try:
            found = open_inside(self._root, top, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return
        seen = 0
        try:
            for path, names, _, _ in os.fwalk(".", dir_fd=found):
                directory = top + path[1:]
                if self.plan.watches_entries(directory):
                    self._mark_directory(directory)
                seen += 1
                if seen >= WALK_DIRECTORIES:
                    break
                names[:] = [name for name in names if name != ".git"]
        finally:
            os.close(found)

    @contextlib.contextmanager
    def _inside(self, path: str) -> Iterator[int]:
        fd = open_inside(self._root, path)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        """Take all marks away. Idempotent."""
        for group in (self.exact, self.wide, self.names):
            if group is not None:
                group.close()
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    # --- events ---

    def drain(self, group: Group) -> int:
        """Take in what waits in a group, a read's worth; how many events that were."""
        events = group.read()
        for event in events:
            try:
                if event.mask & Mask.OVERFLOW:
                    if self._lost.hit(time.monotonic()):
                        self._raise(OVERFLOW)
                elif event.pid != _SELF():
                    if group is self.names:
                        self._name_event(event)
                    else:
                        self._file_event(event, group is self.wide)
            except OSError as error:  # its sandbox goes away under its hands: no reason to lose the others
                log.debug("a tripwire's event could not be read: %s", error)
            finally:
                if event.fd >= 0:
                    os.close(event.fd)
        return len(events)

    def _file_event(self, event: Event, wide: bool) -> None:
        path = _path_of(event.fd)
        if event.mask & Mask.OPEN_EXEC:
            self._start_event(event.pid, path, _key(os.fstat(event.fd)))
        if not event.mask & (Mask.OPEN | _WRITTEN):
            return
        if path in self._masks:
            self._hits([(rule, _nobody) for rule in self.plan.masked(path)], "masked", path, event.pid)
            return
        touch: Touch = "write" if event.mask & _WRITTEN else "read"
        name = self._named(event.fd, path, wide)
        if name is None:
            return  # the other group's
        decoy = self.plan.decoys.get(name)
        if decoy is not None:
            self._hits([(decoy, _nobody)], touch, path, event.pid)
        if touch == "write" and (hits := self.plan.touched(Seen("write", name))):
            self._mark_directory(path.rpartition("/")[0] or "/")
            self._hits(hits, "write", path, event.pid)
        if event.mask & Mask.OPEN:  # the kernel puts together what one process did to one file
            self._hits(self.plan.touched(Seen("read", name)), "read", path, event.pid)

    def _named(self, fd: int, path: str, wide: bool) -> str | None:
        """What the rules call a file; None where the exact group tells of it."""
        found = os.fstat(fd)
        name = self._inodes.get(_key(found))
        if not wide:
            return name or path
        if name is not None or path in self._fixed:
            return None
        return self._other_name(found, path) if found.st_nlink > 1 else path

    def _other_name(self, found: os.stat_result, path: str) -> str:
        """A watched file that this one is a link of. To an overlay a changed file's links are files of their own, with
        numbers of their own; what they share shows in their times."""
        for name in self._fixed:
            with contextlib.suppress(OSError), self._inside(name) as other:
                if _shared(os.fstat(other)) == _shared(found):
                    return name
        return path

    def _name_event(self, event: Event) -> None:
        directory = self._directory(event.handle)
        if directory is None:
            return
        path = f"{directory.rstrip('/')}/{shown(event.name)}"
        if event.mask & (Mask.CREATE | Mask.MOVED_TO):
            if path in self.plan.fixed:
                self._mark_fixed(path)
            if event.mask & Mask.ON_DIRECTORY and self.plan.watches_entries(path):
                self._mark_directory(path)
            self._hits(self.plan.touched(Seen("write", path)), "write", path, event.pid)
        if event.mask & (Mask.DELETE | Mask.MOVED_FROM):
            self._marked.discard(path)
            self._hits(self.plan.touched(Seen("remove", path)), "remove", path, event.pid)

    def _directory(self, handle: bytes) -> str | None:
        """Its path. A directory that was written into for the first time may have got another handle."""
        if handle not in self._directories:
            for path in set(self._directories.values()):
                with contextlib.suppress(OSError), self._inside(path) as fd:
                    self._directories[handle_of(f"/proc/self/fd/{fd}")] = path
        return self._directories.get(handle)

    def _start_event(self, pid: int, path: str, file: tuple[int, int]) -> None:
        if _LOADER.search(path):
            return
        self._programs.pop(pid, None)
        self._programs[pid] = path
        if len(self._programs) > PROGRAMS_KEPT:
            del self._programs[next(iter(self._programs))]
        rules = self.plan.started(path)
        if not rules:
            return
        start = Start(pid, path, file, [rule for rule in rules if rule[1]], time.monotonic())
        words = start.words()
        for _ in range(_SETTLE_TRIES):
            if words is not None:
                break
            time.sleep(_SETTLE_S)
            words = start.words()
        self._hits([(rule, _nobody) for rule, patterns in rules if not patterns], "start", path, pid)
        if words is not None:
            self._judge(start, words)
        elif start.rules:
            start.postpone(time.monotonic())
            self.starting.append(start)
            if len(self.starting) > STARTS_KEPT:
                self._judge(oldest := self.starting.popleft(), oldest.words() or [])

    def look_again(self, now: float) -> None:
        """At starts that were not through; infinity: for the last time."""
        for _ in range(len(self.starting)):
            start = self.starting.popleft()
            if start.due > now:
                self.starting.append(start)
            elif (words := start.words()) is not None:
                self._judge(start, words)
            elif now - start.since < LAST_S:
                start.postpone(now)
                self.starting.append(start)

    def _judge(self, start: Start, words: list[str]) -> None:
        argv = " ".join(words)
        hits = [(rule, _nobody) for rule, patterns in start.rules if any(re.match(p, argv) for p in patterns)]
        self._hits(hits, "start", start.path, start.pid)

    def _hits(self, hits: Sequence[tuple[Rule, Matches]], act: str, path: str, pid: int) -> None:
        # A start is never the guest's own work, though its child is the guest until the program is there.
        if not hits or (act != "start" and self._on_behalf(pid, path)):
            return
        exe = self._programs.get(pid) or exe_of(pid)
        process: dict[str, Any] | None = None
        for rule, spared in hits:
            if exe and spared(exe):
                continue
            pace = self._paces.setdefault(rule.id, Pace())
            count = pace.hit(time.monotonic())
            if count:
                process = process or look(pid, self._uid_base, exe) or ({"exe": exe} if exe else None)
                self._raise(Hit(rule, act, path, process, count, time.time()))

    def _on_behalf(self, pid: int, path: str) -> bool:
        """Whether it is the guest itself, at work for a caller. Its program is sealed: no other process can have it."""
        try:
            return _identity(f"/proc/{pid}/exe") == self._guest
        except OSError:
            until = self.expected.get(path.rpartition("/")[0])
            return until is not None and time.monotonic() < until and pid not in self._programs


def _nobody(_: str) -> None:
    return None


def _identity(path: str) -> tuple[int, int]:
    return _key(os.stat(path))  # noqa: PTH116


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _shared(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_nlink


def _path_of(fd: int) -> str:
    try:
        return shown(os.readlink(f"/proc/self/fd/{fd}".encode())).removesuffix(" (deleted)")  # noqa: PTH115
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return UNNAMEABLE  # what it is tells still

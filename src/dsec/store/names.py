"""Names that belong to projects: of environments and of layers. A file each, replaced atomically.

A name of the project `""` is the node's own, and everybody's to read. Any other is its project's; others see it only
where it names them (or `*`) among its readers, and what they may not see doesn't exist for them. A project's own name
comes before one that it reads.

On disk: `NAME.json` (percent-encoded) for the node's own, `=PROJECT/NAME.json` for the others.

There may be a hundred thousand. To look one up takes the same time however many there are; a list takes time for each.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from dsec.kernel.files import replace_file

EVERYBODY = "*"
_TICK_NS = 1_000_000_000
"""Times of files are no more exact than this, on any file system."""
_Stamp = tuple[int, int, int]
"""A file's time, number and size: it is replaced, never written again."""


class Named(Protocol):
    """What can be kept under a name."""

    @property
    def name(self) -> str: ...
    @property
    def project(self) -> str: ...
    @property
    def readers(self) -> list[str]: ...


N = TypeVar("N", bound=Named)


def may_read(item: Named, project: str | None) -> bool:
    """`project` None: the node itself, which may read everything."""
    return project is None or item.project in ("", project) or project in item.readers or EVERYBODY in item.readers


class Names(Generic[N]):
    """The names of one kind."""

    def __init__(self, root: Path, kind: type[N]) -> None:
        self._root = root
        self._kind = kind
        self._lock = threading.Lock()
        root.mkdir(parents=True, exist_ok=True)
        self._known: dict[tuple[str, str], N] = {}
        self._learnt: dict[tuple[str, str], N] = {}
        """Of other nodes: never on this one's disk, and after its own."""
        self._owners: dict[str, set[str]] = {}
        """Projects, by a name that they have or had."""
        self._names: dict[str, dict[str, None]] = {}
        """The opposite, in the order in which they came."""
        self._read: dict[Path, tuple[int, dict[str, tuple[_Stamp, N]]]] = {}
        """By directory: its time when it was read, and what its files were then."""
        self._versions = itertools.count()
        self.version = -1
        """Another one after each change."""
        self.refresh()

    def refresh(self) -> None:
        """Read all of them again: another process may have made or removed some. Blocks."""
        with self._lock:
            read = {top: self._refreshed(top) for top in [self._root, *self._root.glob("=*/")]}
            if all(self._read.get(top) is each for top, each in read.items()) and len(read) == len(self._read):
                return
            self._read = read
            self._known = {(item.project, item.name): item for _, files in read.values() for _, item in files.values()}
            for item in self._known.values():
                self._note(item)
            self.version = next(self._versions)

    def _refreshed(self, top: Path) -> tuple[int, dict[str, tuple[_Stamp, N]]]:
        """What a directory has; the same object as before where nothing changed in it."""
        began = time.time_ns()
        changed = top.stat().st_mtime_ns
        before = self._read.get(top)
        if before is not None and before[0] == changed:
            return before
        files: dict[str, tuple[_Stamp, N]] = {}
        for entry in sorted(os.scandir(top), key=lambda entry: entry.name):
            if not entry.name.endswith(".json"):
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = entry.stat()
                stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
                known = before[1].get(entry.name) if before else None
                if known is None or known[0] != stamp:
                    known = stamp, msgspec.json.decode(Path(entry.path).read_bytes(), type=self._kind)
                files[entry.name] = known
        # What changes in the same tick of the clock, while it is read, changes its time no more.
        return (changed if changed < began - _TICK_NS else -1), files

    def _note(self, item: N) -> None:
        self._owners.setdefault(item.name, set()).add(item.project)
        self._names.setdefault(item.project, {})[item.name] = None

    def _gone(self, project: str, name: str) -> None:
        self.version = next(self._versions)
        if (project, name) not in self._known and (project, name) not in self._learnt:
            self._owners.get(name, set()).discard(project)
            if not self._owners.get(name):
                self._owners.pop(name, None)
            self._names.get(project, {}).pop(name, None)

    def put(self, item: N) -> None:
        """Make or replace it; durable on return."""
        with self._lock:
            path = self._path(item.project, item.name)
            path.parent.mkdir(exist_ok=True)
            replace_file(path, msgspec.json.encode(item), 0o644)
            self._known[item.project, item.name] = item
            self._note(item)
            self.version = next(self._versions)

    def learn(self, item: N) -> None:
        """Know what another node has under a name."""
        self._learnt[item.project, item.name] = item
        self._note(item)
        self.version = next(self._versions)

    def forget(self, name: str, project: str) -> None:
        """Another node has it no more."""
        self._learnt.pop((project, name), None)
        self._gone(project, name)

    def own(self) -> list[N]:
        """Those that were made on this node."""
        return list(self._known.values())

    def find(self, name: str, project: str | None) -> N | None:
        """What `project` means by a name. No I/O for one that is known; an unknown one may have been made by another
        process since, so the disk is looked at."""
        owners = ("",) if project is None else (project, "")
        for look in (self._known_as, self._look_again, self._learnt_as):
            for owner in owners:
                found = look(owner, name)
                if found is not None:
                    return found
        # Another's, the first by the owner's name: so that the answer doesn't depend on the order in which they came.
        for owner in sorted(self._owners.get(name, ())):
            item = self._known_as(owner, name) or self._learnt_as(owner, name)
            if item is not None and may_read(item, project):
                return item
        return None

    def some(self, project: str | None, most: int) -> Sequence[str]:
        """Names of a project's own and the node's (None: of any), at most so many."""
        owners = self._names if project is None else ("", project)
        names = (name for owner in list(owners) for name in list(self._names.get(owner, ()))[:most])
        return sorted(set(itertools.islice(names, most)))

    def list(self, project: str | None) -> list[N]:
        """What a project may read, by name."""
        return sorted(
            (item for item in (self._learnt | self._known).values() if may_read(item, project)),
            key=lambda item: (item.name, item.project),
        )

    def remove(self, name: str, project: str) -> bool:
        """Forget a project's own. False where there was none."""
        with self._lock:
            found = self._known.pop((project, name), None)
            self._gone(project, name)
            with contextlib.suppress(FileNotFoundError):
                self._path(project, name).unlink()
                return True
            return found is not None

    def _known_as(self, project: str, name: str) -> N | None:
        return self._known.get((project, name))

    def _learnt_as(self, project: str, name: str) -> N | None:
        return self._learnt.get((project, name))

    def _look_again(self, project: str, name: str) -> N | None:
        try:
            found = msgspec.json.decode(self._path(project, name).read_bytes(), type=self._kind)
        except (FileNotFoundError, ValueError):
            return None
        self._note(found)
        self.version = next(self._versions)
        return self._known.setdefault((project, name), found)

    def _path(self, project: str, name: str) -> Path:
        top = self._root / f"={_encoded(project)}" if project else self._root
        return top / f"{_encoded(name)}.json"


def _encoded(name: str) -> str:
    encoded = quote(name, safe="@:+")
    if len(encoded) > 200:
        return f"{encoded[:100]}%{hashlib.sha256(name.encode()).hexdigest()}"
    return encoded

"""Names that belong to projects: of environments and of layers. A file each, replaced atomically.

A name of the project `""` is the node's own, and everybody's to read. Any other is its project's; others see it only
where it names them (or `*`) among its readers, and what they may not see doesn't exist for them. A project's own name
comes before one that it reads.

On disk: `NAME.json` (percent-encoded) for the node's own, `=PROJECT/NAME.json` for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from pathlib import Path
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from dsec.kernel.files import replace_file

EVERYBODY = "*"


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
        self.refresh()

    def refresh(self) -> None:
        """Read all of them again: another process may have made or removed some. Blocks."""
        found = {}
        for path in sorted([*self._root.glob("*.json"), *self._root.glob("=*/*.json")]):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                item = msgspec.json.decode(path.read_bytes(), type=self._kind)
                found[item.project, item.name] = item
        with self._lock:
            self._known = found

    def put(self, item: N) -> None:
        """Make or replace it; durable on return."""
        with self._lock:
            path = self._path(item.project, item.name)
            path.parent.mkdir(exist_ok=True)
            replace_file(path, msgspec.json.encode(item), 0o644)
            self._known[item.project, item.name] = item

    def learn(self, item: N) -> None:
        """Know what another node has under a name."""
        self._learnt[item.project, item.name] = item

    def forget(self, name: str, project: str) -> None:
        """Another node has it no more."""
        self._learnt.pop((project, name), None)

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
        known = sorted((self._learnt | self._known).items())
        others = [item for (_, each), item in known if each == name and may_read(item, project)]
        return others[0] if others else None

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
        return self._known.setdefault((project, name), found)

    def _path(self, project: str, name: str) -> Path:
        top = self._root / f"={_encoded(project)}" if project else self._root
        return top / f"{_encoded(name)}.json"


def _encoded(name: str) -> str:
    encoded = quote(name, safe="@:+")
    if len(encoded) > 200:
        return f"{encoded[:100]}%{hashlib.sha256(name.encode()).hexdigest()}"
    return encoded

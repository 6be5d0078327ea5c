"""The state directory: one server at a time, and the node's facts.

Owns `lock` (flock, holds the holder's pid) and `node.json` (edge number, node key, how far sandbox numbers are
reserved, the projects in the order of their numbers; replaced atomically and synced). Invariant: a number that
`take_sequence` gave out is below the reservation on disk, so no number comes twice, whatever dies when (numbers wrap
at 2**32, long after the sandboxes of that number are gone).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any

from dsec.errors import Internal, InvalidRequest, Unavailable
from dsec.kernel.files import replace_file

SCHEMA_VERSION = 1
RESERVE = 1 << 16
_SEQUENCES = 1 << 32


class StateDir:
    """An opened, locked state directory."""

    def __init__(self, path: Path, *, edge: int | None = None) -> None:
        """Lock `path` (made, mode 0700, where it is missing) and read or write its node facts. `edge` sets the edge
        number of a new one (None: 0). Raises `Unavailable` where another server has it, `Internal` where its facts
        can't be read, `InvalidRequest` where it is another edge's."""
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock(path)
        try:
            facts = _read_facts(path / "node.json")
            if facts is None:
                facts = {"schema": SCHEMA_VERSION, "edge": edge or 0, "key": secrets.token_hex(32), "reserved": 0}
            self.edge = int(facts["edge"])
            if edge is not None and edge != self.edge:
                raise InvalidRequest(
                    f"{path} is the state of edge {self.edge}, not of edge {edge}",
                    remedy="Name another state directory, or that edge's credentials.",
                )
            self.key = bytes.fromhex(facts["key"])
            self._projects = {name: number for number, name in enumerate(facts.get("projects", ()))}
            self._next = int(facts["reserved"])
            self._reserved = self._next
            self._reserve(self._next + RESERVE)
        except BaseException:
            os.close(self._lock)
            raise

    def take_sequence(self) -> int:
        """The next sandbox number. Writes to disk once in 65,536 calls."""
        if self._next >= self._reserved:
            self._reserve(self._next + RESERVE)
        value = self._next
        self._next += 1
        return value % _SEQUENCES

    def tenant(self, project: str) -> int:
        """The number of a project on this node: 0, 1, 2, ... in the order in which they first made a sandbox. Writes to
        disk for a new one."""
        number = self._projects.get(project)
        if number is None:
            number = self._projects[project] = len(self._projects)
            self._reserve(self._reserved)
        return number

    def close(self) -> None:
        """Give the rest of the reservation back and unlock. Idempotent."""
        if self._lock < 0:
            return
        self._reserve(self._next)
        os.close(self._lock)
        self._lock = -1

    def _reserve(self, upto: int) -> None:
        facts = {
            "schema": SCHEMA_VERSION,
            "edge": self.edge,
            "key": self.key.hex(),
            "reserved": upto,
            "projects": list(self._projects),
        }
        replace_file(self.path / "node.json", json.dumps(facts).encode())
        self._reserved = upto


def _lock(path: Path) -> int:
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise Unavailable(
            f"the state directory {path} is in use by the server with process id {holder}",
            remedy="Stop that server, or set DSEC_STATE to another directory.",
            pid=holder,
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _read_facts(path: Path) -> dict[str, Any] | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        facts = json.loads(raw)
        schema = facts["schema"]
        valid = (
            isinstance(schema, int) and 0 <= facts["edge"] < 1 << 16 and len(bytes.fromhex(facts["key"])) == 32
            and isinstance(facts["reserved"], int) and facts["reserved"] >= 0
            and all(isinstance(name, str) for name in facts.get("projects", ()))
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path) from error
    if schema > SCHEMA_VERSION:
        raise Internal(
            f"{path} was written by a newer version of dsec (schema {schema}; this one knows {SCHEMA_VERSION})",
            remedy="Run the newer version, or set DSEC_STATE to another directory.",
        )
    if not valid:
        raise _unreadable(path)
    return dict(facts)


def _unreadable(path: Path) -> Internal:
    return Internal(
        f"{path} is damaged",
        remedy="Restore it from a backup, or move the state directory away: its sandboxes are then removed at the "
        "next start.",
    )

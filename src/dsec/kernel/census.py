"""What of dsec's is on this host right now: counted before and after, it shows that nothing is left behind.

Owns the answer to "is this ours": processes in a cgroup of ours, and the zygote; mounts at or below `/run/dsec`, or of
a file of ours; cgroups `dsec-*` at the top of each hierarchy, with everything below; loop and swap devices over our
files. Reads /proc and /sys only; needs root to see other users' processes whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from dsec.kernel import mounts

_CGROUPS = Path("/sys/fs/cgroup")
_RUN = "/run/dsec/"


class Census(Struct, frozen=True):
    """Names of what is there, by kind. A process is `pid start-time command`, so that a reused pid is another one."""

    processes: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    cgroups: frozenset[str] = frozenset()
    loops: frozenset[str] = frozenset()
    swaps: frozenset[str] = frozenset()
    namespaces: frozenset[str] = frozenset()
    """That our processes are in and this process isn't, and those held by a mount."""

    def beyond(self, before: Census) -> dict[str, list[str]]:
        """What is there that wasn't before, by kind; empty where nothing is."""
        found = {name: sorted(getattr(self, name) - getattr(before, name)) for name in self.__struct_fields__}
        return {name: values for name, values in found.items() if values}

    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        return {name: len(getattr(self, name)) for name in self.__struct_fields__}


def instance_of(state: Path) -> str:
    """The name under which the server of a state directory keeps its things on the host."""
    return hashlib.sha256(os.fsencode(state.absolute())).hexdigest()[:8]


def take(state: Path | None = None) -> Census:
    """Count now. `state`: only what belongs to the server on that state directory."""
    instance = "" if state is None else instance_of(state)
    group = f"dsec-{instance}"
    run = _RUN + (f"{instance}/" if instance else "")
    processes, namespaces = _processes(group, run)
    held, mounted = set(), set()
    for mount in mounts.mounted():
        target = f"{mount.target}/"
        if mount.fstype == "nsfs" and target.startswith(run):
            held.add(mount.root)
        if target.startswith(run) or mount.source.startswith(run):
            mounted.add(f"{mount.target} ({mount.fstype})")
    return Census(
        processes=frozenset(processes),
        mounts=frozenset(mounted),
        cgroups=frozenset(_cgroups(group)),
        loops=frozenset(_loops(state)),
        swaps=frozenset(_swaps()),
        namespaces=frozenset(namespaces | held),
    )


def _processes(group: str, run: str) -> tuple[set[str], set[str]]:
    own = set(_namespaces("self"))
    names, spaces = set(), set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            grouped = f"/{group}" in Path(f"/proc/{entry}/cgroup").read_text()
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            stat = Path(f"/proc/{entry}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if not grouped and run not in command:
            continue
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        names.add(f"{entry} {fields[19]} {name}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            spaces.update(set(_namespaces(entry)) - own)
    return names, spaces


def _namespaces(pid: str) -> Iterator[str]:
    directory = f"/proc/{pid}/ns"
    for kind in os.listdir(directory):
        yield os.readlink(f"{directory}/{kind}")


def _cgroups(group: str) -> Iterator[str]:
    tops = [_CGROUPS, *(path for path in _CGROUPS.iterdir() if path.is_dir())] if _CGROUPS.is_dir() else []
    for top in tops:
        for ours in top.glob(f"{group}*"):
            for directory, _, _ in os.walk(ours):
                yield directory


def _loops(state: Path | None) -> Iterator[str]:
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            file = backing.read_text().strip()
            ours = file.removesuffix(" (deleted)").endswith(("volume.btrfs", "layer.erofs"))
            if ours and (state is None or file.startswith(f"{state.absolute()}/")):
                yield f"{backing.parts[3]} {file}"


def _swaps() -> Iterator[str]:
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        if "dsec" in line.split()[0]:
            yield line.split()[0]

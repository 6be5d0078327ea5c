"""The sandbox tools that `dsec bench create` compares with: crun, runc and bubblewrap from Debian's packages.

Each runs `/bin/true` on the same root file system as our sandboxes, read-only and without a writable layer of its own.
crun and runc run what their own `spec` command writes, plus what our sandboxes have and that lacks: user and cgroup
namespaces, limits for memory, CPU and pids. bubblewrap gets every namespace, and has no limits. None loads a seccomp
filter.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from msgspec import Struct

from dsec.spec.sandbox import SandboxSpec

CGROUP_PARENT = "dsec-bench-peers"
_IDS = [{"containerID": 0, "hostID": 100_000, "size": 65_536}]
_NOTE = "config.json: its own `spec`, user and cgroup namespaces added, memory, CPU and pids limits"


class Peer(Struct, frozen=True):
    """One tool, ready to run: a command line for each of the lanes that run side by side."""

    name: str
    version: str
    lanes: tuple[tuple[str, ...], ...]
    note: str

    @property
    def flags(self) -> str:
        """The command line of the first lane, as it is printed."""
        return " ".join(self.lanes[0])


def available(base: Path, work: Path, lanes: int) -> tuple[list[Peer], list[str]]:
    """The peers that are installed, ready to run on the root file system `base`, and the names of those that aren't.

    `work` gets a bundle for each tool and lane, and the tools' state.
    """
    found, missing = [], []
    for name, make in (("crun", _oci), ("runc", _oci), ("bwrap", _bubblewrap)):
        path = shutil.which(name)
        if path is None:
            missing.append(name)
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
        argvs = tuple(make(path, base, work / name, lane) for lane in range(lanes))
        found.append(Peer(name, said.strip(), argvs, _NOTE if make is _oci else "no cgroup, no limits"))
    return found, missing


def _bubblewrap(path: str, base: Path, _work: Path, _lane: int) -> tuple[str, ...]:
    inside = ("--ro-bind", str(base), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
    return (path, "--unshare-all", "--die-with-parent", *inside, "/bin/true")


def _oci(path: str, base: Path, work: Path, lane: int) -> tuple[str, ...]:
    bundle = work / f"bundle{lane}"
    bundle.mkdir(parents=True)
    subprocess.run([path, "spec"], cwd=bundle, check=True)
    config = bundle / "config.json"
    config.write_text(json.dumps(_configured(json.loads(config.read_text()), base, lane)))
    manager = ("--cgroup-manager=cgroupfs",) if work.name == "crun" else ()
    return (path, *manager, f"--root={work / 'state'}", "run", f"--bundle={bundle}", f"{CGROUP_PARENT}-{lane}")


def _configured(config: dict[str, Any], base: Path, lane: int) -> dict[str, Any]:
    limits = SandboxSpec(environment="defaults")
    linux = config["linux"]
    return {
        **config,
        "root": {"path": str(base), "readonly": True},
        "process": {**config["process"], "terminal": False, "args": ["/bin/true"]},
        "linux": {
            **linux,
            "cgroupsPath": f"/{CGROUP_PARENT}/{lane}",
            "namespaces": _with(linux["namespaces"], "user", "cgroup"),
            "uidMappings": _IDS,
            "gidMappings": _IDS,
            "resources": {
                **linux["resources"],
                "memory": {"limit": limits.memory_bytes},
                "pids": {"limit": limits.pids},
                "cpu": {"quota": int(limits.cpus * 100_000), "period": 100_000},
            },
        },
    }


def _with(namespaces: list[dict[str, str]], *kinds: str) -> list[dict[str, str]]:
    present = {entry["type"] for entry in namespaces}
    return namespaces + [{"type": kind} for kind in kinds if kind not in present]


def remove_cgroups() -> None:
    """Remove the empty cgroups that crun and runc leave behind for their common parent."""
    root = Path("/sys/fs/cgroup")
    for parent in (root / CGROUP_PARENT, *root.glob(f"*/{CGROUP_PARENT}")):
        if parent.is_dir():
            for child in parent.iterdir():
                if child.is_dir():
                    child.rmdir()
            parent.rmdir()

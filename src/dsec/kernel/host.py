"""What this host can do, found out by trying: the checks of `dsec doctor`.

Every probe makes the thing in a scratch directory, or as a short-lived child, and takes it away again. `needed` says
whether the server starts without it.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from msgspec import Struct

from dsec.kernel import mounts, probes_isolation, probes_storage, sysctl
from dsec.kernel.probes import PROBES, Missing, kernel_version, need_program, probe, program

__all__ = ["Finding", "as_json", "kernel_version", "probe_host"]

GIB = 1 << 30
_ORDER = ("dsec.kernel.host", probes_isolation.__name__, probes_storage.__name__)


class Finding(Struct, frozen=True):
    """The outcome of one probe, as `dsec doctor --json` prints it."""

    name: str
    ok: bool
    remedy: str
    """What to do about it; empty where it is fine."""
    detail: str
    needed: bool
    """False: dsec works without it, with less."""


def probe_host(state_dir: Path | None = None, *, only: Collection[str] | None = None) -> list[Finding]:
    """Try everything, or `only` what has these names. Takes about a second; leaves nothing. `state_dir`: where the
    server would keep its state (its disk is looked at)."""
    found = []
    with tempfile.TemporaryDirectory(prefix="dsec-doctor-", dir=_existing(state_dir)) as scratch:
        for name, needed, function in sorted(PROBES, key=lambda item: _ORDER.index(item[2].__module__)):
            if only is not None and name not in only:
                continue
            place = Path(scratch) / re.sub(r"\W+", "-", name)
            place.mkdir()
            try:
                found.append(Finding(name, True, "", function(place), needed))
            except Missing as missing:
                found.append(Finding(name, False, missing.remedy, str(missing), needed))
            except OSError as error:
                found.append(Finding(name, False, _general(error), error.strerror or str(error), needed))
            except subprocess.CalledProcessError as error:
                words = (error.stderr or b"").decode(errors="replace").strip()[-300:]
                found.append(Finding(name, False, "See what the program says.", f"{error}: {words}", needed))
            finally:
                mounts.unmount_under(place)
    return found


def _general(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return "Run as root, outside of an unprivileged container."
    return "A kernel that is built with it is needed; see the support matrix in README."


def _existing(path: Path | None) -> Path | None:
    while path is not None and not path.is_dir():
        path = path.parent
    return path


# privileges and kernel


@probe("root", needed=True)
def _root(_: Path) -> str:
    if os.geteuid() != 0:
        raise Missing(f"running as user {os.geteuid()}", "Run the server as root.")
    effective = int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)  # type: ignore[index]
    wanted = {"CAP_SYS_ADMIN": 21, "CAP_MKNOD": 27, "CAP_NET_ADMIN": 12, "CAP_CHOWN": 0, "CAP_SETUID": 7, "CAP_KILL": 5}
    lacking = [name for name, bit in wanted.items() if not effective >> bit & 1]
    if lacking:
        raise Missing(
            f"lacking {', '.join(lacking)}", "Give the container that dsec runs in all capabilities (--privileged)."
        )
    return "root with the capabilities that sandboxes need"


@probe("kernel", needed=True)
def _kernel(_: Path) -> str:
    if kernel_version() < (5, 14):
        raise Missing(f"Linux {platform.release()}", "Linux 5.14 or newer is needed (cgroup.kill, id-mapped mounts).")
    return f"Linux {platform.release()} {platform.machine()}"


# tools and room


@probe("C compiler", needed=True)
def _compiler(place: Path) -> str:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := program(name))), None)
    if compiler is None:
        raise Missing("no C compiler", "apt-get install gcc libc6-dev")
    (place / "a.c").write_text('#include <stdio.h>\nint main(void) { return puts("") < 0; }\n')
    done = subprocess.run(
        [compiler, "-static", "-o", place / "a", place / "a.c"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(f"cannot link static programs: {done.stderr.strip()[-200:]}", "apt-get install libc6-dev")
    subprocess.run([place / "a"], check=True, stdout=subprocess.DEVNULL)
    return compiler


@probe("mmdebstrap")
def _mmdebstrap(_: Path) -> str:
    return need_program("mmdebstrap", "mmdebstrap")


@probe("kernel settings")
def _settings(_: Path) -> str:
    low = [f"{setting.name}={value}" for setting in sysctl.WANTED if (value := sysctl.too_low(setting)) is not None]
    if low:
        raise Missing(
            f"lower than dsec wants: {', '.join(low)}",
            "The server raises them when it starts; `dsec host undo` puts them back.",
        )
    return f"{len(sysctl.WANTED)} settings are high enough"


@probe("disk space", needed=True)
def _disk(place: Path) -> str:
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize
    if free < 4 * GIB:
        raise Missing(f"{free / GIB:.1f} GiB free", "The state directory needs 4 GiB or more.")
    return f"{free / GIB:.0f} GiB free"


@probe("memory")
def _memory(_: Path) -> str:
    text = Path("/proc/meminfo").read_text()
    total, free = (int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1]) for name in ("MemTotal", "MemAvailable"))  # type: ignore[index]
    if free < 1 << 20:
        raise Missing(
            f"{free >> 10} MiB of {total >> 10} MiB available",
            "Sandboxes will be ended by the host's own memory limit.",
        )
    return f"{free >> 10} MiB of {total >> 10} MiB available"


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """For `dsec doctor --json`."""
    return [{name: getattr(finding, name) for name in finding.__struct_fields__} for finding in findings]

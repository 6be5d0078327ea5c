"""Prepares the machine of a shield (`shield.py`) from inside, before the server starts in it. Run as a program by its
path, without the rest of dsec; says nothing, or fails with a line.

On its input a JSON object: `state` (serial number of the disk for the state directory, and its file system), `where`
(that directory), and `files`: what the directory has to hold besides, by name: text, or `disk SERIAL` for a link to the
device of a disk. So a layer's image and data in the server's store are the machine's disks, and are mounted like files.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

MS_NOSUID, MS_NODEV = 2, 4
_DISK = "disk "
_WAIT_S = 10.0


def device(serial: str) -> str:
    """The path of the disk with this serial number."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        for path in Path("/sys/block").glob("*/serial"):
            if path.read_text().strip() == serial:
                return f"/dev/{path.parent.name}"
        if time.monotonic() > deadline:
            sys.exit(f"there is no disk {serial}")
        time.sleep(0.05)


def mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    target.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    words = [text.encode() for text in (source, str(target), kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode()):
        sys.exit(f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    wanted = json.load(sys.stdin)
    where = Path(wanted["where"])
    serial, kind = wanted["state"]
    mount(device(serial), where, kind, MS_NOSUID | MS_NODEV)
    where.chmod(0o700)
    mount("run", Path("/run"), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for name, text in wanted["files"].items():
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if text.startswith(_DISK):
            path.symlink_to(device(text.removeprefix(_DISK)))
        else:
            path.write_text(text)


if __name__ == "__main__":
    main()

"""Scrubbing: what is left out of a snapshot, so that nothing of who worked there leaks to who works there next.

Works on a captured upper directory, which nobody else changes. No link is followed. Marks of deleted files stay, since
without them what was deleted would be back; so do opaque directories.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

RULES = (
    "**/.*_history",
    "**/.lesshst",
    "**/.viminfo",
    "**/.wget-hsts",
    "**/.cache",
    "**/__pycache__",
    "root/.ssh/known_hosts",
    "home/*/.ssh/known_hosts",
    "tmp/**",
    "var/tmp/**",
    "run/**",
    "var/log/**",
    "var/cache/**",
    "var/lib/apt/lists/**",
    "etc/machine-id",
)
"""What the standard scrubbing removes."""
MOST_PATHS = 1000


class Report(Struct):
    """What was removed, and what was kept."""

    removed: int = 0
    removed_bytes: int = 0
    removed_paths: list[str] = []
    kept: int = 0
    kept_bytes: int = 0
    kept_paths: list[str] = []


def scrub(top: Path, remove: Sequence[str], keep: Sequence[str] = ()) -> Report:
    """Delete below `top` what a glob of `remove` names and none of `keep`. Blocks. Raises OSError."""
    report = Report(removed_paths=[], kept_paths=[])
    goes, stays = _matcher(remove), _matcher(keep)
    _walk(top, "", lambda path: bool(goes.fullmatch(path)) and not stays.fullmatch(path), report)
    return report


def _matcher(globs: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{_expression(each.strip('/'))})(?:/.*)?" for each in globs) or "(?!)", re.DOTALL)


def _expression(glob: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*)", glob)
    meaning = {"**/": "(?:.*/)?", "**": ".+", "*": "[^/]*"}
    return "".join(meaning.get(part) or re.escape(part) for part in parts)


def _walk(directory: Path, prefix: str, goes: Callable[[str], bool], report: Report) -> None:
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = prefix + entry.name
        about = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(about.st_mode):
            _walk(Path(entry.path), f"{path}/", goes, report)
            if goes(path) and not _is_opaque(entry.path) and not os.listdir(entry.path):
                os.rmdir(entry.path)
            continue
        size = about.st_size if stat.S_ISREG(about.st_mode) else 0
        if goes(path) and not (stat.S_ISCHR(about.st_mode) and about.st_rdev == 0):
            os.unlink(entry.path)
            report.removed += 1
            report.removed_bytes += size
            if len(report.removed_paths) < MOST_PATHS:
                report.removed_paths.append(_shown(path))
        else:
            report.kept += 1
            report.kept_bytes += size
            if len(report.kept_paths) < MOST_PATHS:
                report.kept_paths.append(_shown(path))


def _is_opaque(path: str) -> bool:
    try:
        return any(
            os.getxattr(path, name, follow_symlinks=False) == b"y"
            for name in os.listxattr(path, follow_symlinks=False)
            if name.endswith(".overlay.opaque")
        )
    except OSError:
        return False


def _shown(path: str) -> str:
    return "/" + os.fsencode(path).decode("utf-8", "replace")

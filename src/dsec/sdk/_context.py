"""The context of a build as an archive: a directory without what its `.dockerignore` leaves out.

Links are archived as links; the server follows none out of the context.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import BinaryIO

from dsec.errors import InvalidRequest
from dsec.recipe.ignore import Ignored

OUTSIDE = ".dsec-dockerfile"
"""In the archive: a Dockerfile that isn't in the context, and its patterns to ignore beside it."""


def pack_context(top: Path, dockerfile: Path, into: BinaryIO) -> str:
    """Write the archive. Returns where in it the Dockerfile is. Blocks.

    Raises `InvalidRequest` where `top` is no directory or there is no Dockerfile, OSError for files that can't be read.
    """
    if not top.is_dir():
        raise InvalidRequest(f"{top} is not a directory")
    if not dockerfile.is_file():
        raise InvalidRequest(f"there is no Dockerfile at {dockerfile}", remedy="Say where it is.")
    inside = os.path.relpath(os.path.realpath(dockerfile), os.path.realpath(top))
    own = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    patterns = own if own.is_file() else top / ".dockerignore"
    lines = patterns.read_text().splitlines() if patterns.is_file() else []
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as archive:
        _walk(top, Ignored(lines), archive, {".dockerignore", inside, f"{inside}.dockerignore"})
        if not inside.startswith("../"):
            return inside
        for name, content in (
            (OUTSIDE, dockerfile.read_bytes()),
            (f"{OUTSIDE}.dockerignore", "\n".join(lines).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return OUTSIDE


def _walk(top: Path, ignored: Ignored, archive: tarfile.TarFile, kept: set[str]) -> None:
    for folder, names, files in os.walk(top):
        below = os.path.relpath(folder, top)
        prefix = "" if below == "." else f"{below}/"
        if not ignored.has_exceptions:
            names[:] = [name for name in names if not ignored(prefix + name)]
        names.sort()
        for name in sorted((*files, *names)):
            path = prefix + name
            if path not in kept and ignored(path):
                continue
            found = Path(folder, name)
            info = archive.gettarinfo(found, path)
            if info is None:
                continue  # a socket
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.islnk():  # the name that it shares its content with may be ignored
                info.type, info.linkname = tarfile.REGTYPE, ""
                info.size = found.lstat().st_size
            if info.isreg():
                with found.open("rb") as data:
                    archive.addfile(info, data)
            else:
                archive.addfile(info)

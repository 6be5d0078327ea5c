"""Which project the main job works on, and how its source distribution gets here.

Invariants: the file is pinned by name, version and SHA-256 and checked on every use; nothing of it runs on the host
(`pip download` would run its build backend for metadata, so pip is asked for the file only). pip finds and fetches it,
with this machine's own configuration: index, proxy, certificates, local links.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

from msgspec import Struct

from dsec.errors import DsecError, Unavailable


class Project(Struct, frozen=True):
    """A pinned source distribution with its own tests."""

    name: str
    version: str
    sha256: str
    source: str
    """Directory of the importable package, within the project."""
    package: str
    tests: str = "tests"

    @property
    def stem(self) -> str:
        return f"{self.name}-{self.version}"

    def allowed(self, path: str) -> bool:
        """Whether a candidate may change `path`: source files of the package itself, nothing else."""
        pure = PurePosixPath(path)
        return pure.suffix == ".py" and pure.parent == PurePosixPath(self.source) / self.package


CACHETOOLS = Project(
    name="cachetools",
    version="5.5.2",
    sha256="1a661caa9175d26759571b2e19580f9d6393969e5dfca11fdb1f947a23e640d4",
    source="src",
    package="cachetools",
)

# Run by a Python that has pip. Everything but the choice of file is pip's own: configuration, session, index, progress.
_FETCH = """
import sys
from pip._internal.commands.download import DownloadCommand
from pip._vendor.packaging.specifiers import SpecifierSet

class Fetch(DownloadCommand):
    def run(self, options, args):
        name, version, target = args
        session = self.get_default_session(options)
        finder = self._build_package_finder(options=options, session=session, ignore_requires_python=True)
        found = finder.find_best_candidate(name, SpecifierSet("==" + version)).best_candidate
        if found is None:
            sys.stderr.write("no source distribution of %s %s is on offer here\\n" % (name, version))
            return 1
        answer = session.get(found.link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        answer.raise_for_status()
        with open(target, "wb") as out:
            for piece in answer.iter_content(65536):
                out.write(piece)
        return 0

name, version, target = sys.argv[1:]
sys.exit(Fetch("download", "").main(["--quiet", "--no-binary", name, name, version, target]))
"""


def fetch(project: Project, directory: Path) -> Path:
    """The project's checked source distribution in `directory`, fetched by pip where it isn't there yet.

    Raises `Unavailable` where pip can't get it, `DsecError` where it isn't the pinned file.
    """
    path = directory / f"{project.stem}.tar.gz"
    if path.is_file() and _digest(path) == project.sha256:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        command = [sys.executable, "-c", _FETCH, project.name, project.version, str(partial)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode != 0:
            raise Unavailable(
                f"pip could not fetch {project.name} {project.version}: {done.stderr.strip()[-400:]}",
                remedy="Check that `pip download` works on this machine.",
            )
        if _digest(partial) != project.sha256:
            raise DsecError(f"{project.stem}.tar.gz is not the pinned file: its SHA-256 differs.")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_files(project: Project, sdist: Path) -> dict[str, bytes]:
    """Every regular file of the distribution by its path within the project. Links and odd paths are left out."""
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(sdist.read_bytes()), mode="r:gz") as archive:
        for member in archive:
            pure = PurePosixPath(member.name)
            if not member.isfile() or pure.is_absolute() or ".." in pure.parts or pure.parts[:1] != (project.stem,):
                continue
            content = archive.extractfile(member)
            if content is not None:
                files[str(PurePosixPath(*pure.parts[1:]))] = content.read()
    return files


def text_files(project: Project, files: dict[str, bytes]) -> tuple[dict[str, str], dict[str, str]]:
    """The sources that a candidate may change, and the tests, as text."""
    source = {path: raw.decode() for path, raw in files.items() if project.allowed(path)}
    tests = {path: raw.decode() for path, raw in files.items() if path.startswith(f"{project.tests}/")}
    return source, tests


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

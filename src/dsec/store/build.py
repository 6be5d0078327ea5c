"""Building layers: a Debian base by mmdebstrap, and directories.

The base comes from the same mirrors, with the same proxies and keys, that this host's own apt uses. Documentation,
translations and apt itself are left out, and nothing of this host's configuration stays in the image.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dsec.errors import PlatformError, Unsupported
from dsec.kernel import mounts
from dsec.store.layers import LayerMeta, LayerStore, Tree
from dsec.store.programs import Failed, Stop, run_program

Progress = Callable[[str], None]

BASE_PACKAGES = ("bash", "ca-certificates", "git", "procps", "python3", "python3-pip", "python3-venv")
FALLBACK_SUITE = "bookworm"
_PATIENCE_S = 3.0
"""For a builder that was told to end."""
_LEFT_OUT = ("doc", "man", "info", "locale", "lintian", "bug", "gitweb", "linda")
_HOST_TRACES = (
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/auth.conf.d",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/resolv.conf",
    "etc/hostname",
    "etc/machine-id",
    "etc/.pwd.lock",
    "var/lib/dbus/machine-id",
    "var/cache/apt",
    "var/cache/debconf",
    "var/cache/ldconfig",
    "var/lib/apt/lists",
    "var/lib/systemd",
    "var/log",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/available",
)
_HOT = (
    "usr/bin/bash",
    "usr/bin/dash",
    "usr/bin/env",
    "usr/bin/cat",
    "usr/bin/ls",
    "usr/bin/sleep",
    "usr/bin/true",
    "usr/bin/git",
    "usr/bin/python3",
)


def build_debian_layer(
    store: LayerStore,
    packages: Sequence[str] = BASE_PACKAGES,
    *,
    suite: str | None = None,
    mirror: str | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> LayerMeta:
    """Make a Debian (or, on Ubuntu, an Ubuntu) base with `packages`. Blocks for about half a minute, downloads
    included. The same packages give the same layer.

    `mirror`: a URL, in place of this host's own. Raises `Unsupported` where mmdebstrap is missing, `PlatformError` with
    its last words where it fails, `Stopped`.
    """
    program = shutil.which("mmdebstrap")
    if program is None:
        raise Unsupported("mmdebstrap is missing", remedy="Install it: apt-get install mmdebstrap.")
    suite = suite or host_suite()
    say = progress or (lambda _: None)
    began_ns = time.time_ns()
    with store.scratch() as scratch:
        top, config = Path(scratch) / "root", Path(scratch) / "apt.conf"
        config.write_text("".join(f"{line}\n" for line in apt_options()))
        command = [program, "--mode=root", "--variant=essential", "--format=directory", f"--aptopt={config}"]
        # No path-exclude: mmdebstrap then sends every package through a filter, and takes 12 s more than deleting
        # later.
        command += ["--dpkgopt=force-unsafe-io"]
        command += [f"--include={','.join(packages)}"] if packages else []
        sources = [f"deb {mirror} {suite} main"] if mirror else map(str, host_sources(suite))
        say(f"building the base: {suite} with {', '.join(packages) or 'what is essential'}")
        try:
            run_builder([*command, suite, str(top), *sources], say, stop)
        finally:
            mounts.unmount_under(scratch)
        scrub(top)
        settle(top, began_ns)
        say("packing the base")
        return store.add(top, "base", f"{suite}: {' '.join(packages)}", hot=_hot_files(top))


def build_directory_layer(
    store: LayerStore,
    source: Path | Tree,
    *,
    at: str = "/",
    owner: tuple[int, int] | None = (0, 0),
    description: str = "",
) -> LayerMeta:
    """Make a layer of a directory, placed at the path `at`, or of generated files. `owner`: whose everything becomes
    (None: as it is).

    Extended attributes are left behind: some of them would mean something to overlayfs.
    """
    if not isinstance(source, Path):
        return store.add_tree(source, "directory", description)
    return store.add(source, "directory", description, at=at, owner=owner, xattrs=False)


def host_suite() -> str:
    """This host's release where it has mmdebstrap's kind of packages, else a Debian release."""
    with contextlib.suppress(OSError):
        match = re.search(r"^VERSION_CODENAME=\"?([a-z]+)", Path("/etc/os-release").read_text(), re.MULTILINE)
        if match and host_sources(match[1]):
            return match[1]
    return FALLBACK_SUITE


def host_sources(suite: str) -> list[Path]:
    """The files of this host's apt sources that hold the distribution itself (and not somebody's extra packages).

    None: mmdebstrap then uses its default mirror.
    """
    etc = Path("/etc/apt")
    files = [
        etc / "sources.list",
        *sorted((etc / "sources.list.d").glob("*.list")),
        *sorted(etc.glob("sources.list.d/*.sources")),
    ]
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
            if re.search(rf"(?<![\w-]){suite}(-updates|-security)?(?![\w-])", text) and re.search(r"\bmain\b", text):
                found.append(file)
    return found


def apt_options() -> list[str]:
    """How this host's apt reaches its mirrors."""
    wanted = re.compile(
        r"Acquire::(https?|ftp|tor|Check-Valid-Until|Check-Date|Retries|ForceIPv[46]|AllowInsecure)[ :]", re.IGNORECASE
    )
    options = ['Acquire::Languages "none";', 'APT::Install-Recommends "false";', 'Acquire::Retries "3";']
    with contextlib.suppress(FileNotFoundError):
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
        options += [line for line in dump.splitlines() if wanted.match(line)]
    return options


def run_builder(command: list[str], say: Progress, stop: Stop | None = None) -> None:
    """Run mmdebstrap. Raises `PlatformError` with its last words, `Stopped`."""

    def line(text: str) -> None:
        if text.startswith("I: "):
            say(text[3:])
        elif text.startswith("Setting up "):
            say(text.removesuffix(" ..."))

    try:
        run_program(command, stop=stop, line=line)
    except Failed as error:
        said = error.output.splitlines()[-20:]
        errors = [text for text in said if text.startswith(("E: ", "W: "))] or said[-5:]
        raise PlatformError(
            f"mmdebstrap failed with {error.code}: {' / '.join(errors)[-1500:]}",
            remedy="Check with `apt-get update` that this host reaches its mirrors, and that the disk has 2 GiB free.",
        ) from error


def scrub(top: Path) -> None:
    """Remove what is this host's, or differs from build to build."""
    for name in _HOST_TRACES:
        path = top / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            for entry in list(path.iterdir()):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for name in _LEFT_OUT:
        shutil.rmtree(top / "usr/share" / name, ignore_errors=True)
    for entry in top.glob("etc/*-"):  # back-up copies of passwd and the like
        entry.unlink()
    subprocess.run(
        ["chroot", top, "python3", "-m", "compileall", "-q", "/usr/lib/python3"],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "PYTHONHASHSEED": "0"},
    )


def settle(top: Path, began_ns: int) -> None:
    """Give what the build itself wrote the time of the youngest file that a package brought, so that the same packages
    are the same layer whenever it is made. The day on which passwords were set is such a time too."""
    found = {path: path.lstat().st_mtime_ns for path in (top, *top.rglob("*"))}
    youngest = max((at for at in found.values() if at < began_ns), default=0)
    shadow = top / "etc/shadow"
    if shadow.is_file() and not shadow.is_symlink():
        days = [at // (86_400 * 10**9) for at in (began_ns, youngest)]
        shadow.write_text(same_day(shadow.read_text(), *days))
    for path, at in found.items():
        if at >= began_ns or path == shadow:
            os.utime(path, ns=(youngest, youngest), follow_symlinks=False)


def same_day(shadow: str, since: int, day: int) -> str:
    """An /etc/shadow in which the passwords that were set on the day `since` or later were set on another."""
    return re.sub(
        r"^([^:\n]*:[^:\n]*:)(\d+)(?=:)",
        lambda match: match[1] + (str(day) if int(match[2]) >= since else match[2]),
        shadow,
        flags=re.MULTILINE,
    )


def _hot_files(top: Path) -> list[str]:
    """Programs that nearly every sandbox starts, the libraries they load, and the modules that Python imports to
    start."""
    found: set[str] = set()
    for name in _HOT:
        path = top / name
        if path.exists():
            found.add(os.path.relpath(os.path.realpath(path), top) if path.is_symlink() else name)
    libraries = (
        "ld-linux",
        "libc.",
        "libm.",
        "libtinfo",
        "libpthread",
        "libdl",
        "libz.",
        "libexpat",
        "libselinux",
        "libpcre2-8",
        "libcrypto",
    )
    for path in _files(top / "usr/lib"):
        relative = str(path.relative_to(top))
        in_multiarch = len(path.relative_to(top).parts) == 4
        if (in_multiarch and path.name.startswith(libraries)) or re.fullmatch(
            r"usr/lib/python3\.\d+/(__pycache__|encodings/__pycache__|collections/__pycache__|importlib/__pycache__|re/__pycache__)/.*\.pyc",
            relative,
        ):
            found.add(relative)
    return sorted(found)


def _files(top: Path) -> Iterable[Path]:
    for directory, _, names in os.walk(top):
        for name in names:
            path = Path(directory) / name
            if not path.is_symlink():
                yield path

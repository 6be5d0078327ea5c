"""Compiles zygote, guest, holder, cells, copier, and what is loaded into warm parents and VMMs, with the system's C
compiler, once per version of their sources.

Owns `<state>/native/<digest>/{zygote,guest,holder,pager,cells,copier,warm.so,stem.so,follow.so,far.so}`, where the
digest covers the sources, the flags and the compiler. The sources come with the package (`dsec/_native` in a wheel,
`native/` in a checkout), so the wheel is pure Python and the client needs no compiler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dsec
from dsec.errors import Unsupported
from dsec.kernel.host import Finding

log = logging.getLogger("dsec")

SHARED_FLAGS = ("-std=c11", "-O2", "-shared", "-fPIC", "-nostdlib", "-Wall", "-Wextra")
"""Of what is loaded into an environment's Python, whatever C library that has."""
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-static", "-fstack-protector-strong", "-Wall", "-Wextra")
DYNAMIC_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wl,--no-as-needed", "-pthread", "-ldl", "-Wall")
"""Of what takes a library of the server's own Python."""
PROGRAMS = ("guest", "zygote", "holder", "pager", "cells")
WARM = "warm.so"
COPIER = "copier"
STEM_FLAGS = ("-std=c11", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra")
"""Of what is loaded into a program of the system's, with the system's C library."""
STEM = "stem.so"
FOLLOW_FLAGS = ("-std=c11", "-O2", "-shared", "-fPIC", "-fstack-protector-strong", "-Wall", "-Wextra")
"""Of what is loaded into the server itself."""
FOLLOW = "follow.so"
FAR = "far.so"
"""Of the benchmarks."""


def source_dir() -> Path:
    """Where the C sources are. Raises `Unsupported` in an installation without them."""
    package = Path(dsec.__file__).parent
    for candidate in (package / "_native", package.parent.parent / "native"):
        if (candidate / "common" / "wire.h").is_file():
            return candidate
    raise Unsupported("this installation has no C sources", remedy="Install dsec[server] from a wheel or a checkout.")


def build_native(state: Path) -> Path:
    """The directory that holds the compiled programs, made where this version isn't there yet (~2 s). An installation
    may bring them (`bin` beside their sources): those are used.

    Raises `Unsupported` where there is no C compiler, or it fails (with what it said).
    """
    brought = source_dir() / "bin"
    if brought.is_dir():
        return brought
    compiler = _needed_compiler()
    source = source_dir()
    version = subprocess.run([compiler[0], "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(
        version + repr((compiler, FLAGS, SHARED_FLAGS, DYNAMIC_FLAGS, STEM_FLAGS, FOLLOW_FLAGS)).encode()
    )
    for path in sorted(
        p
        for part in ("common", *PROGRAMS, COPIER, "warm", "stem", "follow", "far")
        for p in (source / part).glob("*.[ch]")
    ):
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes())
    target = state / "native" / digest.hexdigest()[:16]
    if all((target / name).exists() for name in (*PROGRAMS, COPIER, WARM, STEM, FOLLOW, FAR)):
        return target
    log.info("compiling the programs in C; this happens once for a version")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made, system = Path(temporary), _system_compiler()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(_compile_program, compiler, name, made) for name in PROGRAMS]
            for flags, files, name in (
                (SHARED_FLAGS, [source / "warm" / "warm.c"], WARM),
                (DYNAMIC_FLAGS, sorted((source / COPIER).glob("*.c")), COPIER),
                (STEM_FLAGS, sorted((source / "stem").glob("*.c")), STEM),
                (FOLLOW_FLAGS, [source / "follow" / "follow.c"], FOLLOW),
                (STEM_FLAGS, [source / "far" / "far.c"], FAR),
            ):
                jobs.append(pool.submit(_compile, [system, *flags], files, made / name))
        for job in jobs:
            job.result()
        Path(temporary, STEM).chmod(0o755)  # a VMM reads it, as a user of its own
        target.mkdir(exist_ok=True)
        for name in (*PROGRAMS, COPIER, WARM, STEM, FOLLOW, FAR):
            (Path(temporary) / name).replace(target / name)
    return target


def missing_for_network(programs: Path) -> str:
    """Why this host can't give sandboxes a network by name, found out by trying; empty where it can."""
    done = subprocess.run([programs / "zygote", "--probe-network"], capture_output=True, check=False)
    if done.returncode <= 0:
        return "" if done.returncode == 0 else f"the probe was ended by signal {-done.returncode}"
    return f"no route and rules can be made in a net namespace ({os.strerror(done.returncode)})"


def probe_network() -> Finding:
    """The same for `dsec doctor`, with a zygote compiled for it alone (~1 s); leaves nothing."""
    name, needed = "network by name", False
    with tempfile.TemporaryDirectory(prefix="dsec-doctor-") as scratch:
        try:
            missing = missing_for_network(_zygote_alone(Path(scratch)))
        except Unsupported as error:
            return Finding(name, False, error.remedy, error.message, needed)
    if not missing:
        return Finding(name, True, "", "route, tproxy and socket match in a net namespace of its own", needed)
    remedy = (
        "A kernel with CONFIG_NF_TABLES_IPV4, CONFIG_NFT_TPROXY and CONFIG_NFT_SOCKET is needed, and root with "
        "CAP_NET_ADMIN; without them sandboxes with a network are refused."
    )
    return Finding(name, False, remedy, missing, needed)


def _zygote_alone(scratch: Path) -> Path:
    """The directory that holds a compiled zygote. Raises as `build_native`."""
    brought = source_dir() / "bin"
    if brought.is_dir():
        return brought
    _compile_program(_needed_compiler(), "zygote", scratch)
    return scratch


def _needed_compiler() -> list[str]:
    compiler = _compiler()
    if not compiler:
        raise Unsupported("no C compiler was found", remedy="Install one, on Debian: apt-get install gcc libc6-dev")
    return compiler


def _compiler() -> list[str]:
    """The command to compile with; empty where there is none. With musl where it is: its programs start in a tenth of
    the time (`guest/libc.h` says why). The kernel's headers, which musl doesn't bring, are the system's."""
    system, musl = _system_compiler(), shutil.which("musl-gcc")
    if not system or musl is None:
        return [system] if system else []
    done = subprocess.run([system, "-print-multiarch"], capture_output=True, text=True, check=False)
    return [musl, "-idirafter", "/usr/include", "-idirafter", f"/usr/include/{done.stdout.strip()}"]


def _system_compiler() -> str:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""


def _compile_program(compiler: list[str], name: str, directory: Path) -> None:
    """One of `PROGRAMS`."""
    source = source_dir()
    files = [path for part in ("common", name) for path in sorted((source / part).glob("*.c"))]
    _compile([*compiler, *FLAGS, f"-I{source}", f"-I{source / 'common'}"], files, directory / name)


def _compile(command: list[str], files: list[Path], output: Path) -> None:
    done = subprocess.run([*command, "-o", output, *files], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unsupported(
            f"compiling {output.name} failed: {done.stderr.strip()[-2000:]}",
            remedy="Install the C library's static version, on Debian: apt-get install gcc libc6-dev",
        )

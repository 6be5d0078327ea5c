"""Kernels for virtual machines, as artifacts of a node's store: imported from a Debian package, or built.

On disk `store/kernels/<digest>/`: `kernel` (what the VMM boots), `modules/NNN-name.ko` (those that the guest needs, in
the order in which they need each other, uncompressed) and `kernel.json` (`Kernel`). The digest covers all of it, so a
template knows by it which kernel it was booted with. A kernel appears by the rename of a finished directory.

A built kernel has everything built in, and boots in a fraction of the time.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import zstandard
from msgspec import Struct

from dsec.errors import InvalidRequest, NotFound, PlatformError, Unsupported
from dsec.store.scratch import ScratchRoot

Progress = Callable[[str], None]

PACKAGE = "linux-image-cloud-amd64"
SOURCE_PACKAGE = "linux-source"
BUILD_PACKAGES = ("flex", "bison", "bc", "libelf-dev", "make", "gcc", "xz-utils")
WAY_OUT_MODULES = ("nf_tables", "nft_tproxy", "nft_socket")
"""What leads programs out by name (native/common/firewall.c)."""
BALLOON_MODULE = "virtio_balloon"
"""What gives back memory that the machine has no use for."""
NEEDED_MODULES = (
    *("virtio_pci", "virtio_blk", "virtio_console", "erofs", "overlay"),
    *WAY_OUT_MODULES,
    BALLOON_MODULE,
)
CONFIG_FILE = "guest.config"
NEEDED_OPTIONS = (
    *("BINFMT_ELF", "BLK_DEV_INITRD", "DEVTMPFS", "EROFS_FS", "EXT4_FS", "OVERLAY_FS", "PROC_FS", "SYSFS", "TMPFS"),
    *("VIRTIO_BLK", "VIRTIO_CONSOLE", "VIRTIO_MMIO", "VIRTIO_PCI", "VIRTIO_VSOCKETS", "SERIAL_8250_CONSOLE"),
    *("NF_TABLES", "NF_TABLES_IPV4", "NFT_SOCKET", "NFT_TPROXY"),
)
"""Without one of these no machine boots, or leads its programs out."""
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_SUFFIX = re.compile(r"\.ko(\.xz|\.zst)?$")


class Kernel(Struct, frozen=True, kw_only=True):
    """A kernel that is on this node."""

    digest: str
    release: str
    """As `uname -r` says inside."""
    origin: Literal["imported", "built"]
    source: str
    """The package that it came from."""
    machine: Literal["pc", "microvm"]
    """The lightest of QEMU's machines that it boots on."""
    modules: list[str]
    size_bytes: int
    created_at: float

    @property
    def leads_out(self) -> bool:
        """Machines that boot it can have a network by name."""
        return self.has(*WAY_OUT_MODULES)

    @property
    def gives_back(self) -> bool:
        """Machines that boot it give back memory that they have no use for."""
        return self.has(BALLOON_MODULE)

    def has(self, *modules: str) -> bool:
        """Whether these are there; a built kernel has them all built in."""
        have = {name.partition("-")[2].removesuffix(".ko").replace("-", "_") for name in self.modules}
        return self.origin == "built" or have.issuperset(modules)


class KernelStore:
    """The kernels below a state directory."""

    def __init__(self, state: Path) -> None:
        self.root = state / "store" / "kernels"
        self._scratch = ScratchRoot(state)

    def list(self) -> list[Kernel]:
        """The best to boot first: built ones, then the newest."""
        found = []
        for note in self.root.glob("*/kernel.json"):
            found.append(msgspec.json.decode(note.read_bytes(), type=Kernel))
        return sorted(found, key=lambda each: (each.origin != "built", -each.created_at))

    def best(self, *, built: bool = False) -> Kernel:
        """The kernel that machines boot with; `built`: of those alone that were built here. Raises `Unsupported` where
        there is none."""
        found = [each for each in self.list() if not built or each.origin == "built"]
        if not found:
            raise Unsupported(
                "this node has no kernel for virtual machines" + (" that was built for them" if built else ""),
                remedy="Run `dsec kernel build`." if built else "Run `dsec kernel import` or `dsec kernel build`.",
            )
        return found[0]

    def path(self, kernel: Kernel) -> Path:
        """Its directory."""
        return self.root / kernel.digest

    def remove(self, digest: str) -> None:
        """Machines that run go on. Raises `NotFound`."""
        matches = [each for each in self.list() if each.digest.startswith(digest)]
        if not digest or len(matches) != 1:
            raise NotFound(f"there is no kernel {digest!r}, or more than one", remedy="`dsec kernel list` names them.")
        shutil.rmtree(self.root / matches[0].digest)

    def import_package(self, package: Path | None = None, progress: Progress | None = None) -> Kernel:
        """From a Debian kernel package; None: the distribution's kernel for clouds, downloaded by this host's apt.
        Blocks for some seconds.

        Raises `InvalidRequest` for a package without a kernel, `Unsupported` where dpkg or apt is missing,
        `PlatformError` where the download fails.
        """
        say = progress or (lambda _: None)
        with self._scratch.make() as directory:
            scratch = Path(directory)
            if package is None:
                say(f"downloading {PACKAGE}")
                package = _download(_newest_dependency(PACKAGE), scratch)
            say(f"unpacking {package.name}")
            tree, target = scratch / "tree", scratch / "kernel"
            _unpack(package, tree)
            (target / "modules").mkdir(parents=True)
            images = sorted(tree.glob("boot/vmlinuz-*"))
            if len(images) != 1:
                raise InvalidRequest(f"{package.name} is no kernel package: it has {len(images)} of boot/vmlinuz-*")
            images[0].rename(target / "kernel")
            release = images[0].name.removeprefix("vmlinuz-")
            available = {
                _SUFFIX.sub("", path.name).replace("-", "_"): path
                for path in tree.rglob("*.ko*")
                if _SUFFIX.search(path.name)
            }
            modules = []
            for number, path in enumerate(_in_order(available)):
                name = f"{number:03d}-{_SUFFIX.sub('.ko', path.name)}"
                (target / "modules" / name).write_bytes(_uncompressed(path))
                modules.append(name)
            return self._place(target, release, package.name, built=False, modules=modules)

    def build(self, source: Path | None = None, progress: Progress | None = None, *, jobs: int = 0) -> Kernel:
        """From a tar archive of the kernel's source with `guest.config`; None: the distribution's source package,
        downloaded by apt. One that was built of the same is returned at once. Blocks for ten minutes of two CPUs.

        Raises `Unsupported` where tools are missing, `PlatformError` where a step fails (with its last words).
        """
        say = progress or (lambda _: None)
        fragment = importlib.resources.files("dsec.store").joinpath(CONFIG_FILE).read_bytes()
        missing = [name for name in ("flex", "bison", "bc", "make", "gcc", "xz") if shutil.which(name) is None]
        if missing:
            raise Unsupported(f"{', '.join(missing)} missing", remedy=f"apt-get install {' '.join(BUILD_PACKAGES)}")
        with self._scratch.make() as directory:
            scratch = Path(directory)
            name = source.name if source else _newest_dependency(SOURCE_PACKAGE)
            label = f"{name} {hashlib.sha256(fragment).hexdigest()[:12]}"
            for kernel in self.list():
                if kernel.source == label:
                    return kernel
            if source is None:
                say(f"downloading {name}")
                _unpack(_download(name, scratch), scratch / "package")
                source = next((scratch / "package").glob("usr/src/linux-source-*.tar.*"))
            say("unpacking the source")
            (scratch / "source").mkdir()
            _run(["tar", "-xf", str(source), "-C", str(scratch / "source"), "--strip-components=1"])
            (scratch / CONFIG_FILE).write_bytes(fragment)
            make = ["make", "-s", "-C", str(scratch / "source"), f"-j{jobs or os.cpu_count() or 1}"]
            _run([*make, f"KCONFIG_ALLCONFIG={scratch / CONFIG_FILE}", "allnoconfig"])
            self._check_options(scratch / "source/.config", fragment.decode(), say)
            say("compiling: about ten minutes on two CPUs")
            _run([*make, "vmlinux"])
            release = (scratch / "source/include/config/kernel.release").read_text().strip()
            target = scratch / "kernel"
            (target / "modules").mkdir(parents=True)
            _run(["strip", "-o", str(target / "kernel"), str(scratch / "source/vmlinux")])
            return self._place(target, release, label, built=True)

    def _check_options(self, config: Path, fragment: str, say: Progress) -> None:
        """An option that this source lacks, or that needs another which is off, is left out without a word by make."""
        there = set(config.read_text().splitlines())
        missing = [
            line.removeprefix("CONFIG_").split("=")[0]
            for line in fragment.splitlines()
            if line.startswith("CONFIG_") and line not in there
        ]
        if broken := [name for name in missing if name in NEEDED_OPTIONS]:
            raise PlatformError(
                f"this source cannot be built with {', '.join(broken)}",
                remedy="Name the source of a Linux from 6.1 on.",
            )
        if missing:
            say(f"this source has no {', '.join(missing)}")

    def _place(self, target: Path, release: str, source: str, *, built: bool, modules: Sequence[str] = ()) -> Kernel:
        digest, size = hashlib.sha256(), 0
        for path in (target / "kernel", *(target / "modules" / name for name in modules)):
            data = path.read_bytes()
            path.chmod(0o644)
            size += len(data)
            digest.update(f"{path.name} {len(data)}\0".encode() + data)
        kernel = Kernel(
            digest=digest.hexdigest(),
            release=release,
            origin="built" if built else "imported",
            source=source,
            machine="pc",
            modules=[*modules],
            size_bytes=size,
            created_at=time.time(),
        )
        self.root.mkdir(parents=True, exist_ok=True)
        final = self.root / kernel.digest
        if not final.exists():
            (target / "kernel.json").write_bytes(msgspec.json.encode(kernel))
            target.rename(final)
        return kernel


def _in_order(available: dict[str, Path]) -> list[Path]:
    """The needed modules and what they need, each after what it needs; those that are built in are none."""
    order: dict[str, Path] = {}

    def add(name: str) -> None:
        path = available.get(name)
        if path is None or name in order:
            return
        for needed in _depends(path):
            add(needed)
        order[name] = path

    for module in NEEDED_MODULES:
        add(module.replace("-", "_"))
    return list(order.values())


def _depends(path: Path) -> Iterator[str]:
    match = _DEPENDS.search(_uncompressed(path))
    for name in (match[1].decode() if match else "").split(","):
        if name:
            yield name.replace("-", "_")


def _uncompressed(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return data


def _newest_dependency(package: str) -> str:
    """The package that a package without content of its own stands for."""
    if shutil.which("apt-cache") is None:
        raise Unsupported("this system has no apt", remedy="Name a kernel package's file.")
    done = subprocess.run(["apt-cache", "depends", "--important", package], capture_output=True, text=True, check=False)
    match = re.search(r"Depends: (linux-\S+)", done.stdout)
    if done.returncode or match is None:
        raise PlatformError(
            f"apt knows no package {package}: {done.stderr.strip()[-300:]}", remedy="Run `apt-get update` first."
        )
    return match[1]


def _download(package: str, directory: Path) -> Path:
    done = subprocess.run(
        ["apt-get", "download", "-q", package], cwd=directory, capture_output=True, text=True, check=False
    )
    found = list(directory.glob("*.deb"))
    if done.returncode or not found:
        raise PlatformError(
            f"apt-get can't download {package}: {done.stderr.strip()[-500:]}",
            remedy="Check with `apt-get update` that this host reaches its mirrors.",
        )
    return found[0]


def _unpack(package: Path, target: Path) -> None:
    if shutil.which("dpkg-deb") is None:
        raise Unsupported("dpkg-deb is missing", remedy="apt-get install dpkg")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                archive.extractall(target, filter="data")
        except (tarfile.TarError, OSError) as error:
            process.kill()
            raise InvalidRequest(f"{package.name} can't be unpacked: {error}") from None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise PlatformError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[-1500:]}")

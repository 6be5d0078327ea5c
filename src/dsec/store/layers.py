"""Layers: immutable EROFS images, named by the SHA-256 of the image, and their mounts.

On disk: `store/layers/<digest>/{layer.erofs, meta.json}`. A layer appears by the rename of a finished directory, so
that what is there is whole. The same tree gives the same digest: mkfs.erofs sorts names, the UUID is fixed, and the
image's own time and checksum are blanked; modification times of files are kept (else every .pyc in an image would be
stale).

A layer is mounted once a node at `<run>/layers/<digest>/0`, and once for each id range as an id-mapped clone at
`<run>/layers/<digest>/<base>`. All sandboxes of a range share the clone. A restarted server finds them in mountinfo.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.errors import NotFound, Unsupported
from dsec.kernel import idmap, mounts
from dsec.kernel.mounts import ErofsMount
from dsec.kernel.syscalls import KernelError

DIGEST = re.compile(r"[0-9a-f]{64}")
ID_COUNT = 65_536
ALL_HOT_BYTES = 48 << 20
"""A layer up to this size is read whole when it is mounted."""
_UUID = "00000000-0000-4000-8000-000000000000"
_SUPERBLOCK = 1024
_BUILD_TIME = _SUPERBLOCK + 24  # u64 seconds, u32 nanoseconds


class LayerMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known about a layer."""

    digest: str
    kind: str
    """`base`, `directory` or `runtime`."""
    description: str = ""
    size_bytes: int = 0
    created_at: float = 0.0
    hot: list[str] = []
    """Files that most sandboxes read, worth having in the page cache; `/`: all. See `LayerMounts.warm`."""


class Entry(Struct, frozen=True):
    """A file of a generated layer: bytes with a mode, a directory (`data` is None), or a symbolic link (`target`)."""

    data: bytes | None = None
    mode: int = 0o644
    target: str = ""
    uid: int = 0
    gid: int = 0


Tree = Mapping[str, Entry]


class LayerStore:
    """The layers below a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir / "store" / "layers"
        self._scratch = state_dir / "store" / "tmp"
        self.root.mkdir(parents=True, exist_ok=True)
        self._scratch.mkdir(exist_ok=True)

    def image(self, digest: str) -> Path:
        """A layer's image. Raises `NotFound`."""
        path = self.root / digest / "layer.erofs"
        if not DIGEST.fullmatch(digest) or not path.exists():
            raise NotFound(f"there is no layer {digest[:80]!r}", remedy="Build it again; its files are gone.")
        return path

    def meta(self, digest: str) -> LayerMeta:
        """Raises `NotFound`."""
        return msgspec.json.decode((self.image(digest).parent / "meta.json").read_bytes(), type=LayerMeta)

    def all(self) -> list[LayerMeta]:
        return [self.meta(name) for name in sorted(os.listdir(self.root)) if DIGEST.fullmatch(name)]

    def remove(self, digest: str) -> None:
        """Delete a layer that no environment uses. Idempotent."""
        if not DIGEST.fullmatch(digest):
            raise ValueError(digest)
        shutil.rmtree(self.root / digest, ignore_errors=True)

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """A directory on the store's file system, for building."""
        return tempfile.TemporaryDirectory(dir=self._scratch)

    def clear_scratch(self) -> None:
        """Remove what builds that were killed left. Call when no build runs."""
        for entry in os.scandir(self._scratch):
            mounts.unmount_under(entry.path)
            shutil.rmtree(entry.path)

    def add(
        self,
        tree: Path,
        kind: str,
        description: str = "",
        *,
        owner: tuple[int, int] | None = None,
        xattrs: bool = True,
        hot: list[str] | None = None,
    ) -> LayerMeta:
        """Make a layer of a directory. `owner`: make everything that user's and group's. Blocks while it packs.

        Raises `Unsupported` where mkfs.erofs is missing, KernelError-like OSError where the disk is full.
        """
        with self.scratch() as scratch:
            made = Path(scratch) / "layer"
            made.mkdir(mode=0o755)
            image = made / "layer.erofs"
            _pack(tree, image, owner, xattrs)
            with open(image, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            meta = LayerMeta(
                digest=digest,
                kind=kind,
                description=description,
                size_bytes=image.stat().st_size,
                created_at=time.time(),
                hot=hot or (["/"] if image.stat().st_size <= ALL_HOT_BYTES else []),
            )
            (made / "meta.json").write_bytes(msgspec.json.encode(meta))
            try:
                made.rename(self.root / digest)
            except OSError:
                if not (self.root / digest / "meta.json").exists():
                    raise
                return self.meta(digest)  # the same layer was there
        return meta

    def add_tree(self, tree: Tree, kind: str, description: str = "") -> LayerMeta:
        """Make a layer of generated files. Missing parents are made (0755)."""
        with self.scratch() as scratch:
            top = Path(scratch) / "tree"
            top.mkdir(mode=0o755)
            for name in sorted(tree):
                _place(top, name, tree[name])
            for directory, _, files in os.walk(top, topdown=False):
                for name in (*files, ""):
                    os.utime(os.path.join(directory, name), (0, 0), follow_symlinks=False)
            return self.add(top, kind, description)


def _regular_files(top: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(top):
        for name in names:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _place(top: Path, name: str, entry: Entry) -> None:
    parts = [part for part in name.split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        raise ValueError(f"not a path in a layer: {name!r}")
    path = top.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    if entry.target:
        path.symlink_to(entry.target)
    elif entry.data is None:
        path.mkdir(exist_ok=True)
    else:
        path.write_bytes(entry.data)
    os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
    if not entry.target:
        path.chmod(entry.mode)


def _pack(tree: Path, image: Path, owner: tuple[int, int] | None, xattrs: bool) -> None:
    command = ["mkfs.erofs", "--quiet", "-U", _UUID, "-Eforce-inode-extended,nosbcrc"]
    if not xattrs:
        command.append("-x-1")
    if owner is not None:
        command += [f"--force-uid={owner[0]}", f"--force-gid={owner[1]}"]
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            [*command, image, tree],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
            env={"PATH": path, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise Unsupported("mkfs.erofs is missing", remedy="Install erofs-utils.") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"mkfs.erofs could not pack {tree}: {why[-1] if why else done.returncode}")
    with open(image, "r+b") as file:
        file.seek(_BUILD_TIME)
        file.write(struct.pack("<QI", 0, 0))


class LayerMounts:
    """The mounted layers of this node."""

    def __init__(self, run_dir: Path, store: LayerStore) -> None:
        self.root = run_dir / "layers"
        self._store = store
        self._lock = threading.Lock()
        self._mounted: set[Path] = set()
        self._paths: dict[tuple[str, int], Path] = {}
        """Of mounted layers that were asked for."""
        self._warming: dict[str, threading.Thread] = {}
        self._stopping = False

    def open(self) -> None:
        """Find what an earlier server mounted."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._mounted = {entry.target for entry in mounts.mounted(self.root)}

    def path(self, digest: str, uid_base: int = 0) -> Path:
        """Where a layer is mounted for an id range (0: as it is); mounted on first use, in well under a millisecond.

        Its hot files are then read by a thread. Raises `NotFound` for an unknown layer, KernelError where it can't be
        mounted.
        """
        known = self._paths.get((digest, uid_base))
        if known is not None:
            return known
        target = self.root / digest / str(uid_base)
        with self._lock:
            plain = self.root / digest / "0"
            if plain not in self._mounted:
                image = self._store.image(digest)
                plain.mkdir(parents=True, exist_ok=True)
                ErofsMount(image, plain, direct_io=True).mount()
                self._mounted.add(plain)
                thread = threading.Thread(target=self.warm, args=[digest], name="dsec-warm", daemon=True)
                self._warming[digest] = thread
                thread.start()
            if target not in self._mounted:
                target.mkdir(exist_ok=True)
                idmap.place_clone(plain, target, uid_base, ID_COUNT)
                self._mounted.add(target)
            self._paths[digest, uid_base] = target
        return target

    def warm(self, digest: str) -> int:
        """Read a layer's hot files, so that their pages are charged to the server and not to whichever sandbox comes
        first (and don't leave with it). Blocks; returns the bytes read."""
        top, total = self.root / digest / "0", 0
        for name in self._store.meta(digest).hot:
            files = _regular_files(top) if name == "/" else [top / name.lstrip("/")]
            for path in files:
                with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                    while data := file.read(1 << 20):
                        total += len(data)
                        if self._stopping:
                            return total
        return total

    def settle(self) -> None:
        """Wait until the hot files of all layers that were mounted have been read. Blocks."""
        for thread in list(self._warming.values()):
            thread.join()

    def unmount(self, digest: str) -> None:
        """Unmount a layer and its clones; running sandboxes keep theirs."""
        thread = self._warming.pop(digest, None)
        if thread is not None:
            thread.join()
        with self._lock:
            self._paths.clear()
            for path in sorted((p for p in self._mounted if p.parent.name == digest), reverse=True):
                mounts.unmount(path)
                self._mounted.discard(path)
                with contextlib.suppress(OSError):
                    path.rmdir()
            with contextlib.suppress(OSError):
                (self.root / digest).rmdir()

    def unmount_all(self) -> None:
        """Unmount every layer."""
        self._stopping = True
        self.settle()
        self._warming.clear()
        self._stopping = False
        with contextlib.suppress(FileNotFoundError):
            for digest in os.listdir(self.root):
                self.unmount(digest)
            with contextlib.suppress(KernelError):
                mounts.unmount_under(self.root)
            self._mounted.clear()

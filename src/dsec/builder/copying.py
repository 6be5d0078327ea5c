"""COPY and ADD: from sources in a tree to a layer over other layers, as Docker's builder does it.

A directory's contents are copied, not itself; a file goes into the destination where that ends with `/`, is a directory
or there are several sources; links among the sources themselves are followed, those deeper down are copied as links.
Directories that are missing on the way become root's, 0755.
"""

from __future__ import annotations

import io
import posixpath
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dsec.builder.files import Files, visible
from dsec.errors import InvalidRequest
from dsec.recipe.ignore import Ignored, Pattern, has_wildcard
from dsec.store.packed import Unpacked
from dsec.store.tar import Header, TarReader
from dsec.store.tree import Node, directory

_KINDS = {
    stat.S_IFREG: b"0",
    stat.S_IFLNK: b"2",
    stat.S_IFCHR: b"3",
    stat.S_IFBLK: b"4",
    stat.S_IFDIR: b"5",
    stat.S_IFIFO: b"6",
}
_NUMBER = re.compile(r"[0-9]{1,10}")
MAX_ID = (1 << 32) - 2
PASSWD_BYTES = 16 << 20


class Owner(NamedTuple):
    """Numbers of a user and a group."""

    uid: int
    gid: int


ROOT = Owner(0, 0)


class Source(NamedTuple):
    """One thing to copy."""

    name: bytes
    """What a copy of it is called."""
    node: Node


class Copy(NamedTuple):
    """What is copied where to."""

    files: Files
    sources: Sequence[Source]
    dest: bytes
    """From the root."""
    into: bool
    """`dest` is a directory, made where it is missing."""
    owner: Owner | None = None
    """Whose everything becomes; None: as it is."""
    mode: int | None = None
    unpack: bool = False
    """Archives among the sources are unpacked."""
    exclude: Sequence[str] = ()
    """Patterns of what stays behind, relative to each source."""


def find_sources(files: Files, patterns: Sequence[str]) -> list[Source]:
    """What the words of a COPY name. Raises ValueError, which says what is wrong with which."""
    found: list[Source] = []
    for text in patterns:
        inside = posixpath.normpath(text.lstrip("/") or ".")
        if inside == ".." or inside.startswith("../"):
            raise ValueError(f"{text[:200]!r} leads out of the context")
        if has_wildcard(inside):
            pattern = Pattern(inside)
            depth = len(pattern)
            matched = [
                (path, node)
                for path, node in visible(files.top)
                if path.count(b"/") + 1 == depth and pattern.matches(path.decode(errors="surrogateescape").split("/"))
            ]
        else:
            node = _found(files, inside.encode(errors="surrogateescape"), text)
            matched = [] if node is None else [(inside.encode(errors="surrogateescape"), node)]
        if not matched:
            raise ValueError(f"there is no {text[:200]!r} in what is copied from")
        for path, node in matched:
            target = _found(files, path, text) if node.is_link else node
            if target is None:
                raise ValueError(f"{text[:200]!r} is a link that leads to nothing inside")
            found.append(Source(path.rsplit(b"/", 1)[-1], target))
    return found


def _found(files: Files, path: bytes, text: str) -> Node | None:
    try:
        return files.find(path)
    except ValueError as error:
        raise ValueError(f"{text[:200]!r}: {error}") from None


def owner_of(text: str, image: Files) -> Owner:
    """`user[:group]` by the image's own /etc/passwd and /etc/group; a user alone gives its number to the group too.
    Raises ValueError."""
    user, colon, group = text.partition(":")
    uid = _number(user, "user", image, b"etc/passwd")
    return Owner(uid, _number(group, "group", image, b"etc/group") if colon else uid)


def _number(text: str, what: str, image: Files, database: bytes) -> int:
    if _NUMBER.fullmatch(text):
        number = int(text)
        if number > MAX_ID:
            raise ValueError(f"{text} is beyond the largest id")
        return number
    node = image.find(database)
    lines = image.content(node, PASSWD_BYTES).decode(errors="replace").splitlines() if node and node.is_file else []
    for line in lines:
        fields = line.split(":")
        if len(fields) > 2 and fields[0] == text and _NUMBER.fullmatch(fields[2]):
            return int(fields[2])
    if text in ("root", "0"):
        return 0
    raise ValueError(f"the image has no {what} {text[:100]!r}")


def text_source(name: str, content: str) -> tuple[Files, Source]:
    """A file that a heredoc brings along."""
    data = content.encode(errors="surrogateescape")
    node = Node(stat.S_IFREG | 0o644)
    top = directory()
    top.children[name.encode()] = node
    return _Literal(top, data), Source(name.encode(), node)


class _Literal(Files):
    """A tree of one file whose content is at hand."""

    def __init__(self, top: Node, data: bytes) -> None:
        super().__init__(top, lambda _: None)
        self._bytes = data
        (node,) = top.children.values()
        node.content = node.content._replace(size=len(data))

    def reader(self, node: Node) -> Callable[[int], bytes]:
        return io.BytesIO(self._bytes).read


class Entries:
    """A `Copy` as `store.archive.place_entries` takes it."""

    def __init__(self, copies: Sequence[Copy], image: Files) -> None:
        """`image`: what the layers below show."""
        self._copies = copies
        self._image = image
        self._read: Callable[[int], bytes] = io.BytesIO().read

    def read(self, size: int) -> bytes:
        return self._read(size)

    def __iter__(self) -> Iterator[Header]:
        for copy in self._copies:
            yield from self._copied(copy)

    def _copied(self, copy: Copy) -> Iterator[Header]:
        below = self._image.find(copy.dest)
        into = copy.into or len(copy.sources) > 1 or (below is not None and below.is_dir)
        self._check_way(copy.dest if into else copy.dest.rpartition(b"/")[0])
        for source in copy.sources:
            if source.node.is_dir:
                yield from self._tree(copy, source.node, copy.dest)
            elif copy.unpack and (archive := _archive(copy.files.reader(source.node))):
                yield from self._unpacked(archive, copy)
            else:
                name = copy.dest.rstrip(b"/") + b"/" + source.name if into else copy.dest
                yield self._entry(copy, source.node, name)

    def _check_way(self, path: bytes) -> None:
        """What is to be a directory is one, or nothing yet."""
        parts = [part for part in path.split(b"/") if part]
        for length in range(1, len(parts) + 1):
            found = self._image.find(b"/".join(parts[:length]))
            if found is None:
                return
            if not found.is_dir:
                shown = b"/" + b"/".join(parts[:length])
                raise InvalidRequest(f"{shown.decode(errors='replace')[:200]!r} is to be a directory, and is a file")

    def _tree(self, copy: Copy, top: Node, dest: bytes) -> Iterator[Header]:
        self._check_way(dest)
        below = self._image.find(dest)
        excluded = Ignored(copy.exclude)
        for path, node in visible(top):
            if path and copy.exclude and excluded(path.decode(errors="surrogateescape")):
                continue
            if not path and below is not None and below.is_dir:
                continue  # it is there, and stays as it is
            yield self._entry(copy, node, dest.rstrip(b"/") + b"/" + path if path else dest)

    def _entry(self, copy: Copy, node: Node, name: bytes) -> Header:
        kind = stat.S_IFMT(node.mode)
        if kind not in _KINDS:
            raise InvalidRequest(f"{name[:200]!r} is of a kind that can't be copied")
        if node.is_file:
            self._read = copy.files.reader(node)
        return Header(
            name=name,
            kind=_KINDS[kind],
            mode=stat.S_IMODE(node.mode) if copy.mode is None else copy.mode,
            uid=node.uid if copy.owner is None else copy.owner.uid,
            gid=node.gid if copy.owner is None else copy.owner.gid,
            size=node.content.size if node.is_file else 0,
            mtime_ns=node.mtime_ns,
            target=node.target,
            rdev=node.rdev,
            xattrs=node.xattrs,
        )

    def _unpacked(self, packed: Unpacked, copy: Copy) -> Iterator[Header]:
        archive = TarReader(packed.read)
        self._read = archive.read
        prefix = copy.dest.rstrip(b"/") + b"/"
        for header in archive:
            target = prefix + header.target.lstrip(b"/") if header.kind == b"1" else header.target
            owner = copy.owner or Owner(header.uid, header.gid)
            yield header._replace(name=prefix + header.name.lstrip(b"/"), target=target, uid=owner.uid, gid=owner.gid)
        packed.finish()


def _archive(read: Callable[[int], bytes]) -> Unpacked | None:
    """The archive that a file is, or None."""
    opened = Unpacked(read)
    try:
        head = opened.peek(512)
    except InvalidRequest:
        return None
    return opened if head[257:262] == b"ustar" else None

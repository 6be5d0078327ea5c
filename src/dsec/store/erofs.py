"""EROFS metadata images: written from a tree, read back into one. No I/O.

The form (all of it is the kernel's, Documentation/filesystems/erofs.rst): block 0 holds the superblock and the table of
devices; inodes follow, 64 bytes each, on 32 byte slots (a slot's number is the inode's), each with its xattrs, then its
inline content, or the list of its pieces (chunk indexes); last the blocks of directories and links that are too large
to be inline. The one extra device, where there is one, is the layer's data. The same tree gives the same bytes.
"""

from __future__ import annotations

import stat
import struct

from dsec.errors import InvalidRequest, LayerCorrupt
from dsec.store.format import BLOCK
from dsec.store.tree import HOLE, Content, Node

MAX_XATTR_BYTES = 32 << 10
"""Of one file, all together."""

_MAGIC = 0xE0F5E1E2
_SUPERBLOCK = 1024
_DEVICE_SLOT = 9  # in units of 128 bytes: right behind the superblock
_FIRST = 1280
_UUID = bytes.fromhex("00000000000040008000000000000000")
_SB = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
_INODE = struct.Struct("<HHHHQIIIIQII16x")
_DIRENT = struct.Struct("<QHBB")
_INDEX = struct.Struct("<HHI")
_CHUNKED_FILE, _DEVICE_TABLE = 4, 8
_PLAIN, _INLINE, _CHUNKS = 0, 2, 4
_INDEXES = 0x20
_NO_BLOCK = 0xFFFFFFFF
_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
_PREFIXES = (
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
)


class _Placed:
    """A node on its way into an image."""

    __slots__ = ("at", "blocks", "body", "layout", "links", "node", "parent", "raw", "xattrs")

    def __init__(self, node: Node, parent: _Placed | None) -> None:
        self.node = node
        self.parent = parent or self
        self.links = 2 if node.is_dir else 0
        self.xattrs = _encode_xattrs(node.xattrs)
        self.layout = _PLAIN
        self.body = b""
        """Behind the inode: inline content or piece list; of a directory zeros, until everything has a place."""
        self.blocks = b""
        """In blocks of its own."""
        self.raw = 0
        self.at = 0


def write_image(top: Node, data_bytes: int) -> bytes:
    """The metadata image of a tree whose content lies in `data_bytes` of data. Raises `InvalidRequest` for what EROFS
    can't hold."""
    order, known = _collect(top)
    cursor = _FIRST
    for placed in order:
        _prepare(placed)
        head = _INODE.size + len(placed.xattrs)
        cursor = -(-cursor // 32) * 32
        while not _fits(cursor, head, len(placed.body), placed.layout):
            cursor += 32
        placed.at = cursor
        cursor += head + (-head % 8 if placed.layout == _CHUNKS else 0) + len(placed.body)
    block = -(-cursor // BLOCK)
    for placed in order:
        if placed.blocks:
            placed.raw = block
            block += len(placed.blocks) // BLOCK
    image = bytearray(block * BLOCK)
    for number, placed in enumerate(order, 1):
        _write(image, placed, number, known)
    if data_bytes:
        struct.pack_into("<II", image, _DEVICE_SLOT * 128 + 64, data_bytes // BLOCK, block)
    _SB.pack_into(
        image, _SUPERBLOCK, _MAGIC, 0, 2, 12, 0, order[0].at // 32, len(order), 0, 0, block, 0, 0, _UUID, bytes(16),
        _CHUNKED_FILE | (_DEVICE_TABLE if data_bytes else 0), 0, 1 if data_bytes else 0, _DEVICE_SLOT, 0, 0, 0, 0, 0,
    )  # fmt: skip
    return bytes(image)


def _collect(top: Node) -> tuple[list[_Placed], dict[int, _Placed]]:
    """Every node once, parents first, with its number of names."""
    order: list[_Placed] = []
    known: dict[int, _Placed] = {}
    stack: list[tuple[Node, _Placed | None]] = [(top, None)]
    while stack:
        node, parent = stack.pop()
        placed = known.get(id(node))
        if placed is None:
            placed = known[id(node)] = _Placed(node, parent)
            order.append(placed)
            stack += [(node.children[name], placed) for name in sorted(node.children, reverse=True)]
        if not node.is_dir:
            placed.links += 1
        elif parent is not None:
            parent.links += 1
    return order, known


def _fits(at: int, head: int, body: int, layout: int) -> bool:
    if at % BLOCK + _INODE.size > BLOCK:
        return False
    return layout != _INLINE or (at + head) // BLOCK == (at + head + body - 1) // BLOCK


def _prepare(placed: _Placed) -> None:
    """Decide how the content is kept, and how long it is; directories are filled later."""
    node = placed.node
    if node.is_dir:
        sizes = [_length(names) for names in _split(node)]
        tail = sizes[-1]
        inline = tail <= BLOCK - _INODE.size - len(placed.xattrs) and tail < BLOCK
        placed.layout = _INLINE if inline else _PLAIN
        placed.body = bytes(tail if inline else 0)
        placed.blocks = bytes(BLOCK * (len(sizes) - inline))
    elif node.is_link:
        _keep(placed, node.target)
    elif node.is_file and node.content.inline:
        _keep(placed, node.content.inline)
    elif node.is_file and node.content.size:
        placed.layout = _CHUNKS
        placed.raw = (node.content.piece_bits - 12) | _INDEXES
        placed.body = b"".join(
            _INDEX.pack(0, 0, _NO_BLOCK) if block == HOLE else _INDEX.pack(0, 1, block) for block in node.content.blocks
        )
    elif node.is_device:
        major, minor = node.rdev
        placed.raw = (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def _keep(placed: _Placed, data: bytes) -> None:
    if len(data) <= 2048:
        placed.layout, placed.body = _INLINE, data
    else:
        placed.blocks = data + bytes(-len(data) % BLOCK)


def _split(node: Node) -> list[list[bytes]]:
    """The names of each block of a directory."""
    blocks: list[list[bytes]] = [[]]
    used = 0
    for name in sorted((b".", b"..", *node.children)):
        need = _DIRENT.size + len(name)
        if used + need > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append(name)
        used += need
    return blocks


def _length(names: list[bytes]) -> int:
    return sum(map(len, names)) + _DIRENT.size * len(names)


def _write(image: bytearray, placed: _Placed, number: int, known: dict[int, _Placed]) -> None:
    node, body, blocks = placed.node, placed.body, placed.blocks
    size = len(node.target) if node.is_link else node.content.size if node.is_file else 0
    if node.is_dir:
        encoded = [_encode_names(names, placed, known) for names in _split(node)]
        size = BLOCK * (len(encoded) - 1) + len(encoded[-1])
        if body:
            body = encoded.pop()
        blocks = b"".join(block + bytes(-len(block) % BLOCK) for block in encoded)
    seconds, nanoseconds = divmod(node.mtime_ns, 10**9)
    count = (len(placed.xattrs) - 12) // 4 + 1 if placed.xattrs else 0
    head = _INODE.pack(
        1 | placed.layout << 1, count, node.mode, 0, size, placed.raw, number, node.uid, node.gid,
        seconds & 0xFFFFFFFFFFFFFFFF, nanoseconds, placed.links,
    ) + placed.xattrs  # fmt: skip
    at = placed.at
    image[at : at + len(head)] = head
    at += len(head) + (-len(head) % 8 if placed.layout == _CHUNKS else 0)
    image[at : at + len(body)] = body
    image[placed.raw * BLOCK : placed.raw * BLOCK + len(blocks)] = blocks if blocks else b""


def _encode_names(names: list[bytes], placed: _Placed, known: dict[int, _Placed]) -> bytes:
    offset = _DIRENT.size * len(names)
    entries = []
    for name in names:
        if name == b".":
            target = placed
        elif name == b"..":
            target = placed.parent
        else:
            target = known[id(placed.node.children[name])]
        entries.append(_DIRENT.pack(target.at // 32, offset, _TYPES[stat.S_IFMT(target.node.mode)], 0))
        offset += len(name)
    return b"".join((*entries, *names))


def _encode_xattrs(xattrs: dict[bytes, bytes]) -> bytes:
    if not xattrs:
        return b""
    found = [bytes(12)]
    for name in sorted(xattrs):
        value = xattrs[name]
        prefix, index = next(((p, i) for p, i in _PREFIXES if name.startswith(p)), (b"", 0))
        rest = name[len(prefix) :]
        if not index or len(rest) > 255:
            raise InvalidRequest(f"an extended attribute that a layer can't hold: {name[:80]!r}")
        entry = struct.pack("<BBH", len(rest), index, len(value)) + rest + value
        found.append(entry + bytes(-len(entry) % 4))
    encoded = b"".join(found)
    if len(encoded) > MAX_XATTR_BYTES:
        raise InvalidRequest(f"the extended attributes of one file are over {MAX_XATTR_BYTES >> 10} KiB")
    return encoded


def read_image(image: bytes) -> Node:
    """The tree of an image that `write_image` wrote. Raises `LayerCorrupt` for anything else."""
    try:
        return _Reader(image).read()
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise LayerCorrupt(f"a metadata image can't be read: {error}") from None


class _Reader:
    def __init__(self, image: bytes) -> None:
        self._image = image
        self._known: dict[int, Node] = {}

    def read(self) -> Node:
        head = _SB.unpack_from(self._image, _SUPERBLOCK)
        if head[0] != _MAGIC or head[3] != 12:
            raise ValueError("no superblock")
        top = self._node(head[5])
        stack = [(head[5], top)]
        while stack:
            nid, node = stack.pop()
            for name, child_nid in self._names(nid):
                child = self._known.get(child_nid)
                if child is None:
                    child = self._node(child_nid)
                    if child.is_dir:
                        stack.append((child_nid, child))
                elif child.is_dir:
                    raise ValueError("a directory has two names")
                node.children[name] = child
        return top

    def _inode(self, nid: int) -> tuple[int, ...]:
        return _INODE.unpack_from(self._image, nid * 32)

    def _node(self, nid: int) -> Node:
        form, count, mode, _, size, raw, _, uid, gid, seconds, nanoseconds, _ = _INODE.unpack_from(
            self._image, nid * 32
        )
        if not form & 1:
            raise ValueError("a compact inode")
        seconds -= (seconds >> 63) << 64
        node = Node(mode, uid, gid, seconds * 10**9 + nanoseconds)
        after = nid * 32 + _INODE.size
        if count:
            end = after + 12 + (count - 1) * 4
            node.xattrs = self._xattrs(after + 12, end)
            after = end
        layout = form >> 1 & 7
        if node.is_link:
            node.target = self._content(layout, raw, size, after)
        elif node.is_file and layout == _CHUNKS:
            bits = (raw & 0x1F) + 12
            after = -(-after // 8) * 8
            pieces = (size + (1 << bits) - 1) >> bits
            found = [_INDEX.unpack_from(self._image, after + 8 * i)[2] for i in range(pieces)]
            node.content = Content(size, b"", bits, tuple(HOLE if b == _NO_BLOCK else b for b in found))
        elif node.is_file and size:
            node.content = Content(size, self._content(layout, raw, size, after))
        elif node.is_device:
            node.rdev = (raw >> 8 & 0xFFF, (raw & 0xFF) | (raw >> 12 & 0xFFF00))
        self._known[nid] = node
        return node

    def _content(self, layout: int, raw: int, size: int, after: int) -> bytes:
        if layout == _INLINE:
            whole = (size - 1) // BLOCK * BLOCK if size else 0
            data = self._image[raw * BLOCK : raw * BLOCK + whole] + self._image[after : after + size - whole]
        else:
            data = self._image[raw * BLOCK : raw * BLOCK + size]
        if len(data) != size:
            raise ValueError("content beyond the end")
        return bytes(data)

    def _names(self, nid: int) -> list[tuple[bytes, int]]:
        form, count, _, _, size, raw, *_ = self._inode(nid)
        after = nid * 32 + _INODE.size + (12 + (count - 1) * 4 if count else 0)
        data = self._content(form >> 1 & 7, raw, size, after)
        found = []
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            entries = _DIRENT.unpack_from(block, 0)[1] // _DIRENT.size
            heads = [_DIRENT.unpack_from(block, _DIRENT.size * i) for i in range(entries)]
            ends = [head[1] for head in heads[1:]] + [len(block.rstrip(b"\0"))]
            for (child, offset, _, _), end in zip(heads, ends, strict=True):
                name = block[offset:end]
                if name not in (b".", b".."):
                    if not name or b"/" in name or b"\0" in name:
                        raise ValueError("not a name")
                    found.append((name, child))
        return found

    def _xattrs(self, at: int, end: int) -> dict[bytes, bytes]:
        prefixes = {index: prefix for prefix, index in _PREFIXES}
        found = {}
        while at < end:
            length, index, size = struct.unpack_from("<BBH", self._image, at)
            name = prefixes[index] + self._image[at + 4 : at + 4 + length]
            found[name] = bytes(self._image[at + 4 + length : at + 4 + length + size])
            at += -(-(4 + length + size) // 4) * 4
        return found

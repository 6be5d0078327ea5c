"""git's packet lines, and the two commands of its protocol version 2 that fetching takes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

FLUSH = b"0000"
DELIMITER = b"0001"


class BadPacket(ValueError):
    """Not what git would send."""


def read(data: bytes) -> list[bytes]:
    """The lines of one message, `FLUSH` and `DELIMITER` as themselves. Raises `BadPacket` for what isn't whole."""
    lines, position = [], 0
    while position < len(data):
        mark = data[position : position + 4]
        try:
            length = int(mark, 16)
        except ValueError as error:
            raise BadPacket("a packet line without a length") from error
        if length < 4:
            if mark not in {FLUSH, DELIMITER}:
                raise BadPacket("a packet line of an unknown kind")
            lines.append(mark)
            position += 4
        else:
            if position + length > len(data):
                raise BadPacket("a packet line that was cut")
            lines.append(data[position + 4 : position + length])
            position += length
    return lines


def write(lines: Iterable[bytes]) -> bytes:
    """The same back."""
    return b"".join(line if line in {FLUSH, DELIMITER} else f"{len(line) + 4:04x}".encode() + line for line in lines)


class Command(Struct, frozen=True):
    """A request of version 2."""

    name: str
    capabilities: Sequence[bytes]
    arguments: Sequence[bytes]

    @classmethod
    def read(cls, data: bytes) -> Command:
        """Raises `BadPacket` for anything but exactly one request."""
        lines = read(data)
        if not lines or lines[-1] != FLUSH or lines.index(FLUSH) != len(lines) - 1:
            raise BadPacket("not exactly one request")
        split = lines.index(DELIMITER) if DELIMITER in lines else len(lines) - 1
        head, arguments = lines[:split], [line for line in lines[split + 1 : -1] if line != DELIMITER]
        if not head or not head[0].startswith(b"command="):
            raise BadPacket("not a request of protocol version 2")
        return cls(head[0][8:].strip().decode("ascii", "replace"), head[1:], arguments)

    def bytes(self) -> bytes:
        """As it goes out."""
        head = [f"command={self.name}\n".encode(), *self.capabilities]
        return write([*head, DELIMITER, *self.arguments, FLUSH] if self.arguments else [*head, FLUSH])


class RefRules(Struct, frozen=True):
    """Which refs of a repository are shown, and at which commit."""

    patterns: Sequence[str] = ()
    pins: Mapping[str, str] = {}
    within: Sequence[str] | None = None
    """A second list of patterns: both have to hold."""

    def shown(self, ref: str) -> bool:
        """By name; HEAD follows what it points to."""
        if self.within is not None and not any(fnmatchcase(ref, pattern) for pattern in self.within):
            return False
        return ref in self.pins or any(fnmatchcase(ref, pattern) for pattern in self.patterns)

    def listing(self, lines: Sequence[bytes]) -> tuple[list[bytes], set[str]]:
        """The answer to `ls-refs` as the rules show it, and the objects that may be asked for then. Raises
        `BadPacket`."""
        kept, objects = [], set()
        for line in lines:
            if line in {FLUSH, DELIMITER}:
                continue
            try:
                oid, ref, *attributes = line.decode().rstrip("\n").split(" ")
            except ValueError as error:
                raise BadPacket("not a list of refs") from error
            target = next((each[14:] for each in attributes if each.startswith("symref-target:")), None)
            name = target if ref == "HEAD" and target else ref
            if not self.shown(name) or (target is not None and not self.shown(target)):
                continue
            if name in self.pins:
                oid = self.pins[name]
                attributes = [each for each in attributes if not each.startswith("peeled:")]
            kept.append(" ".join([oid, ref, *attributes]).encode() + b"\n")
            objects |= {oid, *(each[7:] for each in attributes if each.startswith("peeled:"))}
        return [*kept, FLUSH], objects | {oid for ref, oid in self.pins.items() if self.shown(ref)}


def fetch_limited(command: Command, objects: Collection[str]) -> tuple[Command, list[str]]:
    """A `fetch` without what would show more than it asks for, and what it asks for beyond `objects`."""
    kept, beyond = [], []
    for line in command.arguments:
        word, _, rest = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
        if word in {"include-tag", "packfile-uris"}:
            continue
        if (word == "want" and rest not in objects) or word == "want-ref":
            beyond.append(rest[:64])
        kept.append(line)
    return Command(command.name, command.capabilities, kept), beyond

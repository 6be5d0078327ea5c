"""What `RUN --mount` says: options as text, no variable replaced."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from dsec.errors import InvalidRequest, Unsupported

_SAME = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
_OPTIONS = {
    "bind": {"source", "target", "from", "readonly", "readwrite"},
    "cache": {"id", "target", "readonly", "readwrite", "sharing", "mode", "uid", "gid"},
    "tmpfs": {"target", "size"},
}
_FLAGS = {"readonly", "readwrite"}
_REFUSED = {
    "secret": "Nothing that is secret belongs into a build: have a gateway add it outside (docs/GATEWAYS.md).",
    "ssh": "The permission `git` fetches repositories, and adds credentials outside (docs/GATEWAYS.md).",
}


class RunMount(Struct, frozen=True, kw_only=True):
    """Something that a command sees while it runs, and that its layer doesn't hold."""

    kind: str
    """`bind`, `cache` or `tmpfs`."""
    target: str
    source: str = ""
    origin: str = ""
    """A stage or an image; empty: the context."""
    id: str = ""
    mode: int | None = None
    uid: int = 0
    gid: int = 0


def parse_mount(text: str, line: int, expanded: Callable[[str], str] = str) -> RunMount:
    """`expanded`: replaces variables in a value. Raises `InvalidRequest` and `Unsupported`, with the line."""
    options: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = _SAME.get(name.lower(), name.lower())
        if name not in _FLAGS and not (equals and value):
            raise _refuse(line, f"{part[:100]!r} is no NAME=VALUE")
        options[name] = expanded(value)
    kind = options.pop("type", "bind")
    if kind not in _OPTIONS:
        raise Unsupported(
            f"Dockerfile line {line}: RUN --mount=type={kind[:50]} is not supported",
            remedy=_REFUSED.get(kind, "Supported: bind, cache, tmpfs."),
            line=line,
        )
    if unknown := sorted(options.keys() - _OPTIONS[kind]):
        raise Unsupported(
            f"Dockerfile line {line}: RUN --mount=type={kind},{unknown[0][:50]} is not supported", line=line
        )
    if "target" not in options:
        raise _refuse(line, "it has no target")
    return RunMount(
        kind=kind,
        target=options["target"],
        source=options.get("source", ""),
        origin=options.get("from", ""),
        id=options.get("id", ""),
        mode=_number(options, "mode", 8, line),
        uid=_number(options, "uid", 10, line) or 0,
        gid=_number(options, "gid", 10, line) or 0,
    )


def _number(options: dict[str, str], name: str, base: int, line: int) -> int | None:
    if name not in options:
        return None
    try:
        number = int(options[name], base)
    except ValueError:
        number = -1
    if not 0 <= number <= (0o7777 if base == 8 else (1 << 32) - 2):
        raise _refuse(line, f"{name}={options[name][:50]} is no such number")
    return number


def _refuse(line: int, message: str) -> InvalidRequest:
    return InvalidRequest(f"Dockerfile line {line}: RUN --mount: {message}", line=line)

"""What a Dockerfile says: its instructions, each with its line. No variable is replaced here, since their values depend
on the images below.

Instructions that change nothing in a sandbox (EXPOSE, VOLUME, STOPSIGNAL, HEALTHCHECK, MAINTAINER) are read and
marked; unknown and unsupported ones are refused by name and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from msgspec import Struct

from dsec.errors import InvalidRequest, Unsupported
from dsec.recipe import words

MAX_BYTES = 4 << 20
MAX_INSTRUCTIONS = 5000
NOTED = frozenset({"EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"})
"""Without meaning for a sandbox."""
KNOWN = frozenset(
    ["FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "LABEL", "SHELL", "ENTRYPOINT", "CMD"]
) | NOTED  # fmt: skip
_FLAGS = {
    "FROM": {"platform"},
    "RUN": {"network", "mount"},
    "COPY": {"from", "chown", "chmod", "link", "exclude"},
    "ADD": {"chown", "chmod", "link", "exclude", "checksum"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}
_EXEC = frozenset({"RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD", "VOLUME"})
"""May be written as a list in JSON."""
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)")
_HEREDOC = re.compile(r"(?<![^\s;|&(])\d*<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_.-]*)\2(?=[\s;|&)>]|$)")
_STAGE = re.compile(r"[a-z][a-z0-9._-]*")


class Heredoc(Struct, frozen=True):
    """Lines that an instruction brings along."""

    name: str
    content: str
    expand: bool
    """Its end mark was not quoted."""


class Instruction(Struct, frozen=True, kw_only=True):
    """One instruction."""

    name: str
    line: int
    """Its first, from 1."""
    text: str
    """What follows name and flags, continued lines joined."""
    flags: dict[str, list[str]] = {}
    argv: list[str] | None = None
    """The exec form; None: it is written otherwise."""
    heredocs: list[Heredoc] = []
    escape: str = "\\"


class Stage(Struct, frozen=True, kw_only=True):
    """FROM and what follows it."""

    line: int
    base: str
    """As written."""
    name: str | None
    platform: str | None
    instructions: list[Instruction]


class Dockerfile(Struct, frozen=True):
    """A whole one."""

    arguments: list[Instruction]
    """ARG before the first FROM."""
    stages: list[Stage]
    escape: str = "\\"


def refuse(line: int, message: str, remedy: str = "") -> InvalidRequest:
    """An error that names its line."""
    return InvalidRequest(f"Dockerfile line {line}: {message}", remedy=remedy, line=line)


def parse(text: str) -> Dockerfile:
    """Raises `InvalidRequest` and `Unsupported`, both with the line."""
    if len(text) > MAX_BYTES:
        raise InvalidRequest(f"the Dockerfile is larger than {MAX_BYTES} bytes")
    if "\0" in text:
        raise InvalidRequest("the Dockerfile has NUL bytes: it is no text")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    arguments: list[Instruction] = []
    stages: list[Stage] = []
    escape = _escape(lines)
    for count, each in enumerate(_instructions(lines, escape), 1):
        if count > MAX_INSTRUCTIONS:
            raise refuse(each.line, f"more than {MAX_INSTRUCTIONS} instructions")
        if each.name == "FROM":
            stages.append(_stage(each, stages))
        elif stages:
            stages[-1].instructions.append(each)
        elif each.name == "ARG":
            arguments.append(each)
        else:
            raise refuse(each.line, f"{each.name} stands before the first FROM", "Only ARG may.")
    if not stages:
        raise InvalidRequest(
            "the Dockerfile has no FROM", remedy="Begin with FROM and a name of an environment or image."
        )
    return Dockerfile(arguments, stages, escape)


def assignments(each: Instruction) -> list[tuple[str, str]]:
    """Names and values of ENV or LABEL, as written. Raises `InvalidRequest`."""
    parts = words.split(each.text, each.escape)
    if not parts:
        raise refuse(each.line, f"{each.name} says nothing")
    if "=" not in parts[0]:
        name, _, value = each.text.strip().partition(" ")
        if not value.strip():
            raise refuse(each.line, f"{each.name} {name[:100]} has no value", f"Write {each.name} NAME=VALUE.")
        return [(name, value.strip())]
    pairs = [part.partition("=") for part in parts]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise refuse(each.line, f"{each.name}: {name[:100]!r} is no NAME=VALUE", "Quote values that hold spaces.")
    return [(name, value) for name, _, value in pairs]


def _escape(lines: list[str]) -> str:
    """The parser directive `escape`, in the comments at the very top."""
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        if match[1].lower() == "escape":
            if match[2] not in ("\\", "`"):
                raise refuse(number, "the escape character is \\ or `")
            return match[2]
    return "\\"


def _instructions(lines: list[str], escape: str) -> Iterator[Instruction]:
    continued = re.compile(rf"(?<!{re.escape(escape)}){re.escape(escape)}[ \t]*$")
    at = 0
    while at < len(lines):
        begin, joined, open_line = at, "", False
        while at < len(lines):
            line = lines[at]
            at += 1
            if not line.strip() or line.lstrip().startswith("#"):
                if not open_line:
                    begin = at
                continue
            body = continued.sub("", line)
            joined += body if open_line else body.lstrip()
            open_line = body != line
            if not open_line:
                break
        if joined.strip():
            each = _instruction(joined.rstrip(), begin + 1, escape)
            if each.argv is None and each.name in ("RUN", "COPY", "ADD"):
                heredocs, at = _heredocs(each, lines, at)
                each = Instruction(
                    name=each.name,
                    line=each.line,
                    text=each.text,
                    flags=each.flags,
                    heredocs=heredocs,
                    escape=escape,
                )
            yield each


def _instruction(joined: str, line: int, escape: str) -> Instruction:
    word, text = (*joined.split(maxsplit=1), "")[:2]
    name, text = word.upper(), text.strip()
    if name == "ONBUILD":
        raise Unsupported(
            f"Dockerfile line {line}: ONBUILD is not supported", remedy="Write it where it is to happen.", line=line
        )
    if name not in KNOWN:
        raise Unsupported(
            f"Dockerfile line {line}: unknown instruction {word[:50]!r}",
            remedy=f"Known: {', '.join(sorted(KNOWN))}.",
            line=line,
        )
    flags: dict[str, list[str]] = {}
    known = _FLAGS.get(name, set())
    while known and (match := _FLAG.match(text)):
        if match[1] not in known:
            raise Unsupported(f"Dockerfile line {line}: {name} --{match[1]} is not supported", line=line)
        flags.setdefault(match[1], []).append(match[2] or "")
        text = text[match.end() :]
    for flag, values in flags.items():
        if len(values) > 1 and flag not in ("exclude", "mount"):
            raise refuse(line, f"{name} --{flag} is said twice")
    if not text:
        raise refuse(line, f"{name} says nothing")
    argv = None
    if name in _EXEC and text.startswith("["):
        argv = _exec_form(text)
    if name == "SHELL" and not argv:
        raise refuse(line, "SHELL takes a list in JSON", 'Like SHELL ["/bin/bash", "-c"].')
    return Instruction(name=name, line=line, text=text, flags=flags, argv=argv, escape=escape)


def _exec_form(text: str) -> list[str] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else None


def _heredocs(each: Instruction, lines: list[str], at: int) -> tuple[list[Heredoc], int]:
    found = []
    for match in _HEREDOC.finditer(each.text):
        content = []
        while True:
            if at >= len(lines):
                raise refuse(each.line, f"the heredoc {match[3]} has no end")
            line = lines[at].lstrip("\t") if match[1] else lines[at]
            at += 1
            if line == match[3]:
                break
            content.append(f"{line}\n")
        found.append(Heredoc(match[3], "".join(content), not match[2]))
    return found, at


def heredoc_mark(word: str) -> str | None:
    """The name of the heredoc that a word of COPY stands for."""
    match = _HEREDOC.fullmatch(word)
    return match[3] if match else None


def _stage(each: Instruction, before: list[Stage]) -> Stage:
    parts = words.split(each.text, each.escape)
    name = None
    if len(parts) == 3 and parts[1].lower() == "as":
        name = parts[2].lower()
        if not _STAGE.fullmatch(name) or any(stage.name == name for stage in before):
            raise refuse(each.line, f"{parts[2][:100]!r} can't be a stage's name, or is one already")
    elif len(parts) != 1:
        raise refuse(each.line, "FROM takes a name, or NAME AS STAGE")
    platform = each.flags.get("platform", [None])[0]
    return Stage(line=each.line, base=parts[0], name=name, platform=platform, instructions=[])

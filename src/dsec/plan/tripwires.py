"""Tripwires, decided: from rules to what must be watched, and from what was seen to hits. No I/O but reading the
built-in rule sets once.

Invariants: matching is bounded whatever the agent names its files (a glob has few wildcards, see `_check_glob`); one
rule raises `FIRST` events at once, then one in `EVERY_S` that says how many it stands for, so that nobody can flood the
event log.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.errors import InvalidRequest, Unsupported
from dsec.spec.tripwires import (
    DecoyRule,
    Glob,
    MaskedRule,
    NetworkRule,
    PathRule,
    ProcessRule,
    Rule,
    RuleSet,
    Touch,
)

MAX_RULES = 200
MAX_DECOYS = 32
FIRST = 3
EVERY_S = 10.0
_RULES = Path(__file__).parent / "rules"
_WILD = re.compile(r"[*?]")

Matches = Callable[[str], object]


@cache
def rule_sets() -> dict[str, RuleSet]:
    """The built-in ones, by name."""
    return {path.stem: msgspec.toml.decode(path.read_bytes(), type=RuleSet) for path in sorted(_RULES.glob("*.toml"))}


def resolve(tripwires: Sequence[str | Rule]) -> list[Rule]:
    """The rules that a sandbox's `tripwires` stand for, in order; a later one replaces an earlier one of the same id.

    Raises `InvalidRequest` for what doesn't exist or can't be matched.
    """
    found: dict[str, Rule] = {}
    for item in tripwires:
        if isinstance(item, str):
            known = rule_sets().get(item)
            if known is None:
                raise _invalid(f"there is no rule set {item!r}", f"Use one of: {', '.join(rule_sets())}.")
            found |= {rule.id: rule for rule in known.rule}
        else:
            _check(item)
            found[item.id] = item
    if len(found) > MAX_RULES:
        raise _invalid(f"{len(found)} rules are too many", f"At most {MAX_RULES}.")
    if sum(isinstance(rule, DecoyRule) for rule in found.values()) > MAX_DECOYS:
        raise _invalid("too many decoys", f"At most {MAX_DECOYS}.")
    return list(found.values())


def from_within(tripwires: Sequence[str | Rule]) -> tuple[list[Rule], list[str]]:
    """As `resolve`, for a sandbox with a kernel of its own that tells what happens in it; and the ids of those rules of
    sets that mean nothing there: it has no masks. Raises `Unsupported` too, for such a rule that isn't of a set."""
    for each in tripwires:
        if isinstance(each, MaskedRule):
            raise Unsupported(
                f"rule {each.id!r}: a machine has no masked files, its /proc and /sys are its own kernel's",
                remedy="Leave it out, or use a container.",
                field="tripwires",
            )
    rules = resolve(tripwires)
    left_out = [rule.id for rule in rules if isinstance(rule, MaskedRule)]
    return [rule for rule in rules if not isinstance(rule, MaskedRule)], left_out


def from_outside(tripwires: Sequence[str | Rule]) -> list[Rule]:
    """As `resolve`, for a sandbox into which nobody can look. Raises `Unsupported` too, for rules about what happens in
    there."""
    rules = resolve(tripwires)
    inside = [rule.id for rule in rules if not isinstance(rule, NetworkRule)]
    if inside:
        raise Unsupported(
            "of a machine without a guest of ours only tripwires of the kind network can be watched: its files and "
            f"processes can't be seen for {', '.join(inside[:5])}{', ...' if len(inside) > 5 else ''}",
            remedy="Leave them out, or use a disk with our guest, a microVM or a container.",
            field="tripwires",
        )
    return rules


def _check(rule: Rule) -> None:
    if isinstance(rule, DecoyRule):
        _check_place(rule.path)
        if _WILD.search(rule.path) or rule.path.endswith("/") or "/../" in rule.path:
            raise _invalid(f"rule {rule.id!r}: a decoy's path names one file", "")
    elif isinstance(rule, PathRule):
        for glob in (*rule.paths, *rule.exclude, *rule.unless_exe):
            _check_place(glob)
    elif isinstance(rule, ProcessRule):
        for glob in rule.exe:
            _check_place(glob)
    elif isinstance(rule, MaskedRule):
        for glob in rule.paths:
            _check_place(glob)


def _check_place(glob: str) -> None:
    if not glob.startswith(("/", "**/", "~/")) or "\0" in glob or "//" in glob:
        raise _invalid(f"{glob!r} is not a place in a sandbox", "A path begins with /, ~/ or **/.")
    parts = glob.split("/")
    if parts.count("**") > 2 or any(part.count("*") > 2 or ("**" in part and part != "**") for part in parts):
        raise _invalid(
            f"{glob!r} has too many wildcards", "At most two `**`, each between slashes, and two `*` in one name."
        )


def _invalid(message: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(
        f"tripwires: {message}", remedy=remedy or "docs/TRIPWIRES.md has the format.", field="tripwires"
    )


class Seen(Struct, frozen=True):
    """What was seen of a file: `path` as the sandbox names it."""

    touch: Touch
    path: str


class _Paths:
    """A path rule, ready to match."""

    def __init__(self, rule: PathRule, home: str) -> None:
        self.rule = rule
        self.on = frozenset(rule.on)
        self.matches = _matcher(rule.paths, home)
        self.excluded = _matcher(rule.exclude, home)
        self.spared = _matcher(rule.unless_exe, home)
        self.bases = [base for glob in rule.paths if (base := _base(_expand(glob, home))) is not None]


class Plan:
    """What one sandbox's rules ask for."""

    def __init__(self, rules: Iterable[Rule], *, home: str, workdir: str) -> None:
        """`home`: what `~` stands for."""
        self.rules = list(rules)
        self._home = home
        self.by_id = {rule.id: rule for rule in self.rules}
        self.decoys = {_expand(r.path, home): r for r in self.rules if isinstance(r, DecoyRule)}
        self._paths = [_Paths(rule, home) for rule in self.rules if isinstance(rule, PathRule)]
        self._programs = [
            (r, _matcher(r.exe, home), [fnmatch.translate(g) for g in r.argv])
            for r in self.rules
            if isinstance(r, ProcessRule)
        ]
        self._networks = [r for r in self.rules if isinstance(r, NetworkRule)]
        masked = [(r, _matcher(r.paths, home)) for r in self.rules if isinstance(r, MaskedRule)]
        self._masked = masked
        globs = {t: [g for p in self._paths if t in p.on for g in p.rule.paths] for t in ("read", "write", "remove")}
        self._any = {touch: _matcher(some, home) for touch, some in globs.items()}
        self.fixed = sorted({_expand(g, home) for some in globs.values() for g in some if not _WILD.search(g)})
        """Files and directories that are watched by their full name."""
        self.reads_everywhere = bool(globs["read"])
        self.writes_everywhere = bool(globs["write"])
        """Of files with a full name too: a link of another name may be a file of its own to the kernel."""
        self.starts = bool(self._programs or self._paths or self.decoys)
        """Whether starts of programs must be seen: they also say who did what, once a process has ended."""
        self.names = bool(globs["write"] or globs["remove"])
        """Whether creating, renaming and removing must be seen."""
        changed = {_expand(g, home) for touch in ("write", "remove") for g in globs[touch]}
        deep = {_base(g) for g in changed if "/**" in g}
        if workdir != "/" and any(g.startswith("**/") for g in changed):
            deep.add(workdir.rstrip("/"))
        self.walks = sorted(base for base in deep if base is not None and base != "/")
        """Where directories are looked for, at the start, whose entries must be watched."""
        self.directories = sorted({base for g in changed if (base := _base(g)) is not None})
        """Directories whose entries must be watched, if they match anything."""

    def wanted(self) -> list[bytes]:
        """What a machine's guest is asked to tell (native/common/wire.h, LOOKING OUT). It tells more than hits."""
        found = [f"F{path}" for path in (*self.decoys, *self.fixed)]
        letters: tuple[tuple[Touch, str], ...] = (("read", "r"), ("write", "w"), ("remove", "m"))
        for touch, letter in letters:
            for each in self._paths:
                if touch in each.on:
                    found += [letter + _rooted(_expand(glob, self._home)) for glob in each.rule.paths]
        for rule, _, _ in self._programs:
            found += ["s" + _rooted(_expand(glob, self._home)) for glob in rule.exe]
        return [text.encode() for text in dict.fromkeys(found)]

    def masked(self, path: str) -> list[Rule]:
        """Rules about a mask over `path`."""
        return [rule for rule, matches in self._masked if matches(path)]

    def touched(self, seen: Seen) -> list[tuple[Rule, Matches]]:
        """Rules about this path, each with what spares a program by its path."""
        if not self._any[seen.touch](seen.path) and seen.touch != "remove":
            return []
        return [
            (each.rule, each.spared)
            for each in self._paths
            if seen.touch in each.on and self._hit(each, seen) and not each.excluded(seen.path)
        ]

    @staticmethod
    def _hit(each: _Paths, seen: Seen) -> bool:
        """Moving a directory away moves what is watched below it."""
        if each.matches(seen.path):
            return True
        return seen.touch == "remove" and any(base.startswith(f"{seen.path}/") for base in each.bases)

    def watches_entries(self, directory: str) -> bool:
        """Whether names in this directory matter: something directly in it could match."""
        probe = f"{directory.rstrip('/')}/\N{BULLET}"
        if self._any["write"](probe) or self._any["remove"](probe):
            return True
        return any(fixed.rpartition("/")[0] == directory.rstrip("/") for fixed in self.fixed)

    def started(self, exe: str) -> list[tuple[ProcessRule, list[str]]]:
        """Rules about this program, each with the patterns (regular expressions) of its command line."""
        return [(rule, argv) for rule, matches, argv in self._programs if matches(exe)]

    def refused(self, name: str) -> list[Rule]:
        """Rules about a connection to `name` that the policy refused."""
        return [r for r in self._networks if any(fnmatch.fnmatchcase(name.lower(), g.lower()) for g in r.names)]


class Pace:
    """How many events one rule of one sandbox raises."""

    __slots__ = ("_due", "_held", "hits")

    def __init__(self) -> None:
        self.hits = 0
        self._due = 0.0
        self._held = 0

    def hit(self, now: float) -> int:
        """How many hits an event now stands for; 0: none is due."""
        self.hits += 1
        self._held += 1
        if self.hits > FIRST and now < self._due:
            return 0
        self._due = now + EVERY_S
        held, self._held = self._held, 0
        return held


def _expand(glob: Glob, home: str) -> str:
    return home + glob[1:] if glob.startswith("~/") else glob


def _rooted(glob: str) -> str:
    """The same, beginning with a slash."""
    return f"/{glob}" if glob.startswith("**/") else glob


def _base(glob: str) -> str | None:
    """The directories that a glob names before its first wildcard; for a plain path the directory that it is in."""
    if glob.startswith("**/"):
        return None
    parts = glob.split("/")
    wild = next((i for i, part in enumerate(parts) if _WILD.search(part)), len(parts) - 1)
    return "/".join(parts[:wild]) or "/"


def _matcher(globs: Sequence[Glob], home: str) -> Matches:
    if not globs:
        return _never
    return re.compile("|".join(f"(?:{_regex(_expand(glob, home))})" for glob in globs), re.DOTALL).fullmatch


def _never(_: str) -> None:
    return None


def _regex(glob: str) -> str:
    """`**` is any number of directories, also none; `*` and `?` stay within a name; a trailing `/**` is the directory
    too."""
    text, parts = "", glob.split("/")
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if part == "**":
            text = text.removesuffix("/") + "(?:/.*)?" if last else text + ("(?:.*/)?" if text else "/(?:.*/)?")
        else:
            text += "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in part)
            text += "" if last else "/"
    return text

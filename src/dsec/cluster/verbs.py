"""Which right a call of the API takes: one table, by method and path. Pure.

Who may do nothing of a kind is refused before the call reaches an edge. What isn't in the table changes something, so
it takes the right to use sandboxes, or, where it is only read, to read them.
"""

from __future__ import annotations

from dsec.spec.iam import Verb

_SANDBOX_LOGS = frozenset({"events", "trajectory", "log", "tripwires"})
_SNAPSHOTS = frozenset({"snapshot", "snapshots", "pack_diff"})
_MANY = {"delete": Verb.DELETE, "batch": Verb.CREATE, "rebuild": Verb.CREATE}
_TOP = {
    "builds": (Verb.LAYERS_WRITE, Verb.LAYERS_WRITE),
    "environments": (Verb.LAYERS_READ, Verb.LAYERS_WRITE),
    "layers": (Verb.LAYERS_READ, Verb.LAYERS_WRITE),
    "judge": (Verb.CREATE, Verb.CREATE),
    "functions": (Verb.CREATE, Verb.CREATE),
    "runs": (Verb.READ, Verb.CREATE),
    "keys": (Verb.KEYS, Verb.KEYS),
    "nodes": (Verb.OPERATE, Verb.OPERATE),
    "audit": (Verb.AUDIT, Verb.AUDIT),
}
"""By the first part of a path: to read, to change."""
_RUNS_CODE = frozenset({"run_code", "run_jupyter", "submit", "sandboxfusion"})
"""SandboxFusion's, in sandboxes of their own."""
_DATA = frozenset({"files"})
"""E2B's data plane, where a GET reads what is inside."""


def verb_of(method: str, path: str) -> Verb | None:
    """The right that a call of `/v1/...` takes; None: its handler looks itself. `path`: without arguments, as it was
    sent."""
    reads = method in ("GET", "HEAD")
    parts = [part for part in path.split("/") if part]  # as an edge reads it: of two slashes, one doesn't count
    if not parts or parts[0] != "v1" or len(parts) < 2 or parts[1] == "ping":
        return _of_others(method, parts, reads)
    head, _, many = parts[1].partition(":")
    if head in ("projects", "roles"):
        return None
    if head == "sandboxes":
        return _of_sandbox(method, parts[2:], many, reads)
    if head in _TOP:
        return _TOP[head][0 if reads and head != "builds" else 1]
    return Verb.READ if reads else Verb.USE


def _of_others(method: str, parts: list[str], reads: bool) -> Verb:
    """Of E2B's, SWE-ReX's and SandboxFusion's calls."""
    if parts[0] in ("v2", "v3"):
        parts = parts[1:]
    head, rest = (parts[0] if parts else ""), parts[1:]
    if head in _RUNS_CODE:
        return Verb.CREATE
    if head == "templates":
        return Verb.LAYERS_READ if reads else Verb.LAYERS_WRITE
    if head == "snapshots":
        return Verb.LAYERS_READ
    if head != "sandboxes":
        return Verb.READ if reads and head not in _DATA else Verb.USE
    if not rest:
        return Verb.READ if reads else Verb.CREATE
    if rest[1:] == ["snapshots"]:
        return Verb.LAYERS_READ if reads else Verb.LAYERS_WRITE
    if rest[1:] == ["logs"]:
        return Verb.LOGS
    if rest[1:] == ["fork"]:
        return Verb.CREATE
    return Verb.DELETE if method == "DELETE" else Verb.READ if reads else Verb.USE


def _of_sandbox(method: str, rest: list[str], many: str, reads: bool) -> Verb:
    if not rest:
        return _MANY.get(many, Verb.USE) if many else (Verb.READ if reads else Verb.CREATE)
    names = {part.partition(":")[0] for part in rest[1:]}
    if len(rest) == 1:
        return Verb.DELETE if method == "DELETE" else Verb.READ if reads else Verb.USE
    if rest[1] == "fork":
        return Verb.CREATE
    if rest[1] == "verify":
        return Verb.GRADE
    if rest[1] in _SNAPSHOTS or many in _SNAPSHOTS:
        return Verb.LAYERS_READ if reads else Verb.LAYERS_WRITE
    if rest[1] in ("events", "trajectory", "tripwires") or (rest[1] == "sessions" and names & _SANDBOX_LOGS):
        return Verb.LOGS
    if rest[1] == "usage" or (reads and rest[1:] == ["exec"]):
        return Verb.READ
    return Verb.USE

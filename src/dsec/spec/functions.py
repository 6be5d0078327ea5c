"""Function calls: what is called, with what, and what comes of it. The types for wire and API.

Values are frozen; unknown fields are refused. docs/FUNCTIONS.md says what holds.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from dsec.spec.causes import Cause
from dsec.spec.judging import Language
from dsec.spec.sandbox import MIB, Name

MAX_CALLS = 100_000
MAX_FILES = 256
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Text = Annotated[str, Meta(max_length=4 * MIB)]
Module = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,199}$(?!\n)")]


class FunctionLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one call."""

    wall_s: Seconds = 30.0
    cpu_s: Seconds = 30.0
    """Of all its processes together."""
    memory_bytes: Annotated[int, Meta(ge=16 * MIB, le=1 << 40)] = 512 * MIB
    """What it has beyond the imported libraries, its files in /tmp included."""
    cpus: Annotated[float, Meta(ge=0.01, le=1024)] = 1.0
    pids: Annotated[int, Meta(ge=1, le=4096)] = 64
    output_bytes: Annotated[int, Meta(ge=0, le=64 * MIB)] = 1 * MIB
    """stdout and stderr together; more ends it."""
    result_bytes: Annotated[int, Meta(ge=1, le=256 * MIB)] = 16 * MIB
    """Of the result as msgpack, files that come back included."""
    compile_s: Seconds = 30.0


class FunctionSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is called."""

    environment: Name
    language: Language = Language.PYTHON
    source: Text = ""
    """Code. With `name`, it defines what is called; without, it is a program that each call runs."""
    name: Annotated[
        str, Meta(pattern=r"^(([A-Za-z_][A-Za-z0-9_.]*:)?[A-Za-z_][A-Za-z0-9_.]*)?$(?!\n)", max_length=400)
    ] = ""
    """Python only: a name in `source`, or without a source `module:name`."""
    imports: Annotated[list[Module], Meta(max_length=64)] = []
    """Python only: modules that are there already when a call begins."""
    files: Annotated[dict[str, bytes], Meta(max_length=MAX_FILES)] = {}
    """Into the working directory of each call."""
    take: Annotated[list[str], Meta(max_length=MAX_FILES)] = []
    """Files that come back, where they are there when the call ends."""
    env: Annotated[dict[str, str], Meta(max_length=MAX_FILES)] = {}
    limits: FunctionLimits = FunctionLimits()


class FunctionCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    stdin: bytes = b""
    files: Annotated[dict[str, bytes], Meta(max_length=MAX_FILES)] = {}


class FunctionBatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Calls of one function."""

    function: FunctionSpec
    calls: Annotated[list[FunctionCall], Meta(min_length=1, max_length=MAX_CALLS)]
    ordered: bool = False
    """Results in the order of the calls; else as they come."""
    stop: bool = False
    """Begin no more calls after the first one, in time, that failed."""


class FunctionError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the function raised, in its own words: it is the function's code that says so."""

    type: str
    message: str = ""
    traceback: str = ""


class FunctionResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one call."""

    index: int
    ok: bool = False
    """It returned, or exited with code 0."""
    value: Any = None
    error: FunctionError | None = None
    cause: Cause = Cause.EXITED
    infra: bool = False
    message: str = ""
    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    files: dict[str, bytes] = {}
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int = 0

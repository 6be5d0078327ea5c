"""From a caller's `ExecSpec` to the guest's request: checks, defaults, keys. Pure.

The guest keeps a key as 32 bytes, half the hash of the caller's key and half the hash of the request, so that an edge
that takes over can tell a repeated request from a different one under the same key.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from dsec.edge.outcome import Asked
from dsec.errors import InvalidRequest
from dsec.spec.operations import ExecFlag, OpRequest
from dsec.spec.sandbox import ExecSpec, SandboxSpec, invalid_exec
from dsec.spec.short_hash import sha256

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HALF_KEY = 16
_SCOPES = {"leader": 0, "group": 1, "all": 2}
_SIGKILL = 9
_MAX_TIMEOUT_MS = (1 << 53) - 1
_NO_FLAG = ExecFlag(0)
_encode = msgspec.json.Encoder().encode


def check(spec: ExecSpec) -> None:
    """Raises `InvalidRequest` for what the kernel could never run."""
    try:
        why = invalid_exec(spec)
    except UnicodeEncodeError:
        why = "argv or env hold characters that have no bytes (lone surrogates)"
    if why is not None:
        raise InvalidRequest(why)


def hash_of(key: str) -> bytes:
    """The first half of a guest key."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()[:HALF_KEY]


def guest_key_of(spec: ExecSpec) -> bytes:
    """The whole guest key of a request that has a key. Raises `InvalidRequest` for a bad key."""
    key = spec.key or ""
    if key.startswith("~") or not 1 <= len(key) <= 120:
        raise InvalidRequest("a key has 1 to 120 characters and does not begin with '~'", field="key")
    strings: list[object] = [spec.argv, spec.env, spec.cwd, spec.user, spec.stdin, spec.command_timeout_s]
    strings += [spec.output_bytes, spec.merge_stderr, spec.kill_leftovers]
    if spec.pty is not None:  # not its size: a client that comes back may have another window
        strings.append("pty")
    try:
        request = _encode(strings)
    except UnicodeEncodeError:  # arguments that aren't Unicode, from a caller in process
        request = repr(strings).encode("ascii", "backslashreplace")
    return hash_of(key) + sha256(request).digest()[:HALF_KEY]


class Environ(Struct, frozen=True):
    """The variables of a command."""

    sandbox: SandboxSpec
    network_env: Mapping[str, str] | None
    variables: tuple[bytes, ...]
    path: str


def environ_of(sandbox: SandboxSpec, spec: ExecSpec, network_env: Mapping[str, str] | None) -> Environ:
    """The command's own variables over the sandbox's over the network's over the defaults. Raises `InvalidRequest`."""
    env = {"PATH": PATH}
    if (spec.user if spec.user is not None else sandbox.user) in ("root", "0"):
        env["HOME"] = "/root"
    if network_env:  # HTTP_PROXY of the caller's stands against http_proxy of the network's too
        said = {name.lower() for name in (*sandbox.env, *spec.env)}
        env.update((name, value) for name, value in network_env.items() if name.lower() not in said)
    env.update(sandbox.env)
    env.update(spec.env)
    try:
        variables = tuple([_bytes(f"{name}={value}") for name, value in env.items()])
    except UnicodeEncodeError:
        raise InvalidRequest("env holds characters that have no bytes (lone surrogates)") from None
    return Environ(sandbox, network_env, variables, env["PATH"])


def request_of(
    sandbox: SandboxSpec, spec: ExecSpec, guest_key: bytes | None, environ: Environ, *, patient: bool = False
) -> tuple[OpRequest, Asked]:
    """The guest's request: the command's own values over the sandbox's. `patient`: the result is what counts, that it
    started may be known later."""
    user = spec.user if spec.user is not None else sandbox.user
    cwd = spec.cwd if spec.cwd is not None else sandbox.workdir
    timeout_s = spec.command_timeout_s if spec.command_timeout_s is not None else sandbox.command_timeout_s
    output_bytes = spec.output_bytes if spec.output_bytes is not None else sandbox.output_bytes
    flags = _NO_FLAG if spec.pty is not None or not patient else ExecFlag.PATIENT
    if spec.stdin or spec.kill_leftovers or spec.merge_stderr or spec.pty is not None:
        flags |= ExecFlag.STDIN if spec.stdin else _NO_FLAG
        flags |= ExecFlag.KILL_LEFTOVERS if spec.kill_leftovers else _NO_FLAG
        flags |= ExecFlag.MERGE if spec.merge_stderr else _NO_FLAG
        flags |= ExecFlag.PTY if spec.pty is not None else _NO_FLAG
    try:
        request = OpRequest(
            argv=tuple([_bytes(argument) for argument in spec.argv]),
            env=environ.variables,
            cwd=_bytes(cwd),
            user=_bytes(user),
            timeout_ms=None if timeout_s is None else min(max(1, round(timeout_s * 1000)), _MAX_TIMEOUT_MS),
            output_cap=output_bytes,
            key=guest_key,
            flags=flags,
            open_files=sandbox.open_files,
            pty_size=None if spec.pty is None else spec.pty.cols << 16 | spec.pty.rows,
        )
    except UnicodeEncodeError:
        raise InvalidRequest("argv, cwd or user hold characters that have no bytes (lone surrogates)") from None
    pty = spec.pty is not None
    return request, Asked(spec.argv[0], user, cwd, environ.path, timeout_s, output_bytes, spec.argv, pty)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def scope_of(scope: str, signal: int) -> int:
    """Whom a signal is for, as the guest counts. Raises `InvalidRequest` for what makes no sense."""
    if scope not in _SCOPES:
        raise InvalidRequest(f"scope is one of {', '.join(_SCOPES)}", field="scope")
    if not 1 <= signal <= 64 or (scope == "all" and signal != _SIGKILL):
        raise InvalidRequest("a signal is 1 to 64; the scope 'all' takes 9 (SIGKILL) alone", field="signal")
    return _SCOPES[scope]

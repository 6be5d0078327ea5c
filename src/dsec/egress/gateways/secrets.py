"""The server's secrets: values that are added to requests outside a sandbox and never enter one.

`secrets.toml` in the state directory, mode 0600, belongs to the operator:

    [github]
    value = "..."                # or: env = "NAME", a variable of the server's
    hosts = ["github.com"]       # where it may be sent; nowhere else, whatever a policy says
    projects = ["default"]       # whose sandboxes may use it; absent: all

A header's value names them: `Bearer secret:github`. A permission can be written by anybody who may write a policy, so a
secret's own list of hosts is what keeps it from being sent to a host of theirs. Errors and logs hold names only.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

FILE_NAME = "secrets.toml"
SHORTEST = 8
"""Characters that a secret has at least: answers are searched for it, and a shorter one would be found by chance."""

_REFERENCE = re.compile(r"secret:([A-Za-z0-9_-]+)")


class SecretError(Exception):
    """A secret that can't be used here; the text names it, never its value."""


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    hosts: list[str]
    value: str = ""
    env: str = ""
    projects: list[str] | None = None


class Headers(Struct, frozen=True):
    """Headers with their secrets filled in, and the secrets, for taking them out of what comes back."""

    values: Mapping[str, str]
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Headers({', '.join(self.values)})"


class Secrets:
    """Reads the file anew when it changed, so that a secret can be replaced while the server runs."""

    def __init__(self, state: Path, environment: Mapping[str, str] | None = None) -> None:
        self._path = state / FILE_NAME
        self._environment = os.environ if environment is None else environment
        self._stamp: tuple[int, int] | None = None
        self._entries: dict[str, _Entry] = {}

    def fill(self, headers: Mapping[str, str], *, host: str, project: str) -> Headers:
        """`headers` for a request to `host` (with its port, if it has one) on behalf of a sandbox of `project`. Raises
        `SecretError`."""
        found: list[str] = []

        def value(match: re.Match[str]) -> str:
            secret = self._value(match[1], host, project)
            found.append(secret)
            return secret

        filled = {name: _REFERENCE.sub(value, text) for name, text in headers.items()}
        for name, text in filled.items():
            if "\r" in text or "\n" in text:
                raise SecretError(f"the header {name} would hold a line break")
        return Headers(filled, tuple(found))

    def _value(self, name: str, host: str, project: str) -> str:
        entry = self._read().get(name)
        if entry is None:
            raise SecretError(f"there is no secret {name}")
        if host.lower() not in entry.hosts:
            raise SecretError(f"the secret {name} isn't for {host}")
        if entry.projects is not None and project not in entry.projects:
            raise SecretError(f"the secret {name} isn't for the project {project}")
        value = entry.value or self._environment.get(entry.env, "")
        if len(value) < SHORTEST:
            raise SecretError(f"the secret {name} has no value, or one of fewer than {SHORTEST} characters")
        return value

    def _read(self) -> dict[str, _Entry]:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return {}
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise SecretError(f"{FILE_NAME} can be read by others than its owner: chmod 600")
            try:
                self._entries = msgspec.convert(tomllib.loads(self._path.read_text()), dict[str, _Entry])
            except (msgspec.ValidationError, tomllib.TOMLDecodeError):
                # The decoder's message may quote the file.
                raise SecretError(f"{FILE_NAME} isn't valid") from None
            self._stamp = stamp
        return self._entries


class Scrubber:
    """Takes secrets out of a body that streams by: each becomes as many asterisks. Holds back no more than what may be
    the beginning of one."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._secrets = [secret.encode() for secret in secrets]
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What can go on."""
        if not self._secrets:
            return data
        data = self._held + data
        for secret in self._secrets:
            data = data.replace(secret, b"*" * len(secret))
        keep = max(_begun(data, secret) for secret in self._secrets)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def end(self) -> bytes:
        """The rest."""
        held, self._held = self._held, b""
        return held

    def text(self, value: str) -> str:
        """A header's value without them."""
        for secret in self._secrets:
            value = value.replace(secret.decode(), "*" * len(secret))
        return value


def _begun(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of `secret`."""
    for length in range(min(len(secret) - 1, len(data)), 0, -1):
        if secret.startswith(data[-length:]):
            return length
    return 0

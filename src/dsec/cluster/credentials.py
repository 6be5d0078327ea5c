"""Who may say what on the bus: a key pair for each edge and for the apiservers, and the server configuration that holds
them to their subjects.

An edge publishes its own reports, its wish to join and the logs of its sandboxes, hears what is meant for it and which
numbers are heard, and nothing else: no other edge's subjects, no key-value store, no stream. Only apiservers reach
JetStream. The server knows public keys alone, so that its configuration holds no secret; each seed is in one file of
its own (mode 0600).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec
import nkeys
from msgspec import Meta, Struct

from dsec.errors import InvalidRequest
from dsec.spec.cluster import EdgeNumber

APISERVER = "apiserver"
_URL = re.compile(r"(nats|tls)://[A-Za-z0-9.\[\]:-]{1,250}")
_LOOPBACK = re.compile(r"nats://(127\.[0-9.]+|localhost|\[::1\])(:[0-9]+)?")


class Credentials(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a process shows to the bus."""

    user: Annotated[str, Meta(pattern=r"^(apiserver|edge-[0-9]{1,5})$(?!\n)")]
    seed: str
    edge: EdgeNumber | None = None
    """None: an apiserver's."""
    ca_file: str = ""
    """Of the servers' certificates, for tls:// URLs; empty: the system's."""


def read_credentials(path: Path) -> Credentials:
    """Raises `InvalidRequest`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credentials)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"{path} holds no credentials: {error}", remedy="`dsec cluster init` writes them."
        ) from None


def check_urls(urls: list[str], *, plain: bool) -> list[str]:
    """The servers to join. Raises `InvalidRequest` for what is no URL of NATS, and for one without TLS to another
    machine unless `plain` says that the network between is trusted: API keys and tokens pass there."""
    for url in urls:
        if not _URL.fullmatch(url):
            raise InvalidRequest(f"{url[:200]!r} is no nats:// or tls:// URL", remedy="For example tls://nats-0:4222.")
        if url.startswith("nats://") and not plain and not _LOOPBACK.fullmatch(url):
            raise InvalidRequest(
                f"{url} has no TLS, and tokens of edges pass there",
                remedy="Use tls://, or say --plain where nobody else is on that network.",
            )
    return urls


def make_cluster(directory: Path, edges: int, ca_file: str = "") -> list[Path]:
    """Keys of a new cluster: `nats.conf` (to be included by each server), `apiserver.json`, `edge-N.json`. `ca_file`:
    of the servers' certificates, where it is on all machines. Returns what was written. Raises `InvalidRequest` where
    the directory has a cluster's already: its keys aren't replaced."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (directory / "nats.conf").exists():
        raise InvalidRequest(f"{directory} holds a cluster's keys already", remedy="Name an empty directory.")
    users, written = [], []
    for name, edge in [(APISERVER, None), *((f"edge-{number}", number) for number in range(1, edges + 1))]:
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
        public = nkeys.from_seed(bytearray(seed)).public_key.decode()
        users.append(f"    {{ nkey: {public}, permissions: {_permissions(name, edge)} }} # {name}\n")
        path = directory / f"{name}.json"
        _write(path, msgspec.json.encode(Credentials(user=name, seed=seed.decode(), edge=edge, ca_file=ca_file)))
        written.append(path)
    conf = directory / "nats.conf"
    text = "authorization {\n  timeout: 5\n  users: [\n" + "".join(users) + "  ]\n}\n"
    _write(conf, text.encode())
    return [conf, *written]


def _permissions(name: str, edge: int | None) -> str:
    if edge is None:
        return json.dumps({"publish": [">"], "subscribe": [">"]})
    return json.dumps(
        {
            "publish": [f"dsec.beat.{edge}", f"dsec.join.{edge}", f"dsec.log.*.{edge}.>"],
            "subscribe": [f"dsec.edge.{edge}.>", "dsec.heard", f"_INBOX.{name}.>"],
            "allow_responses": True,
        }
    )


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)

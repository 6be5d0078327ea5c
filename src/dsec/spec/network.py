"""What a sandbox may reach, as its caller says it: named permissions, their options, and the forms of a name.

Owns the grammar of permissions and the one form of a host name. Invariants: a name that passed `host_name` is lower
case, ASCII, without a trailing dot, and never an address in any spelling that a resolver would take for one; the same
permission in two spellings has one canonical text.

    pypi                    a named permission: built in, or an operator's
    git:github.com/org/repo a named permission with an argument
    host:NAME[:PORT]        one name; without a port 80 and 443. *.NAME: every name below NAME, at any depth
    ip:ADDRESS[/BITS][:PORT]  addresses that a program names itself ([ADDRESS]:PORT for IPv6)
    sandbox:NAME:PORT       a port of the sandbox of this name, of the same project and run
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import idna
from msgspec import Meta, Struct

MAX_PERMISSIONS = 4096
MAX_TEXT = 512
DEFAULT_PORTS = (80, 443)
Port = Annotated[int, Meta(ge=1, le=65535)]
Texts = Annotated[list[Annotated[str, Meta(min_length=1, max_length=500)]], Meta(max_length=100)]
Pattern = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Block = ipaddress.IPv4Network | ipaddress.IPv6Network

_KIND = re.compile(r"[a-z][a-z0-9-]{0,63}")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ARGUMENT = re.compile(r"[!-~]{1,500}")


class PermissionOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a permission is granted. Which options one takes, its definition says; limits are taken by all. Of a
    definition's limit and a policy's the lower one holds."""

    before: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d(T[0-9:.]+Z?)?$(?!\n)")] | None = None
    """Packages: only what was released before this date or time (UTC)."""
    allow: Texts | None = None
    """Packages: only these."""
    deny: Texts | None = None
    """Packages: not these."""
    paths: Texts | None = None
    """HTTP gateways: only these paths; `*` at the end stands for all below."""
    methods: Annotated[list[Annotated[str, Meta(pattern=r"^[A-Z]{1,20}$(?!\n)")]], Meta(max_length=20)] | None = None
    intercept: bool | None = None
    """HTTP gateways: at the host's own name too, TLS answered by the edge with a certificate authority of the
    sandbox's."""
    write: bool | None = None
    """git: pushing too."""
    refs: Texts | None = None
    """git: only these."""
    pins: dict[str, str] | None = None
    """git: refs as they were, by commit."""
    suites: Texts | None = None
    """apt: only these."""
    models: Texts | None = None
    """Inference: only these."""
    requests: Annotated[int, Meta(ge=0)] | None = None
    """Inference: so many."""
    tokens: Annotated[int, Meta(ge=0)] | None = None
    """Inference: so many."""
    ports: Annotated[list[Port], Meta(min_length=1, max_length=100)] | None = None
    """Hosts and addresses: these ports."""
    private: bool | None = None
    """The name may lead to private, shared or loopback addresses. Needs a key that may grant that."""
    connections: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """At the same time."""
    bytes: Annotated[int, Meta(ge=1, le=1 << 60)] | None = None
    """Both directions together, over the sandbox's life (counted anew by a server that was started again)."""
    bytes_per_s: Annotated[int, Meta(ge=1024, le=1 << 40)] | None = None
    """Both directions together."""
    requests_per_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Gateways."""


Network = dict[str, bool | PermissionOptions]
LIMITS = frozenset({"connections", "bytes", "bytes_per_s", "requests_per_s"})


class Reason(StrEnum):
    """Why a connection was allowed, refused or cut: stable, in the event log and in metrics."""

    GRANTED = "granted"
    # refused before anything left the node
    NOT_GRANTED = "not_granted"  # no permission names it
    PORT_NOT_GRANTED = "port_not_granted"  # the name is granted, at other ports
    FORBIDDEN = "forbidden"  # a permission that is False
    ADDRESS_NOT_GRANTED = "address_not_granted"  # an address instead of a name
    UNKNOWN_ADDRESS = "unknown_address"  # a stand-in address that stands for nothing
    PRIVATE_ADDRESS = "private_address"  # the name leads to a private, loopback, link-local or metadata address
    UNRESOLVED = "unresolved"  # the name has no address outside
    CONNECTIONS_LIMIT = "connections_limit"
    BYTES_LIMIT = "bytes_limit"
    # refused by what was said
    TLS_NAME_MISMATCH = "tls_name_mismatch"  # SNI is another name
    TLS_NAME_MISSING = "tls_name_missing"
    NOT_TLS = "not_tls"  # at port 443
    HTTP_HOST_MISMATCH = "http_host_mismatch"  # Host is another name
    HTTP_MALFORMED = "http_malformed"  # or ambiguous: what could smuggle a request
    SAID_NOTHING = "said_nothing"  # no whole TLS or HTTP head in time
    # ended
    CONNECT_FAILED = "connect_failed"
    IDLE = "idle"
    RESET = "reset"
    POLICY_CHANGED = "policy_changed"
    ENDED = "ended"  # the sandbox, or this server


class Permission(Struct, frozen=True):
    """One permission's name, taken apart."""

    text: str
    """Canonical."""
    kind: str
    argument: str = ""
    host: str = ""
    """`host`: a name or `*.` and a name; `sandbox`: its name."""
    port: int | None = None
    block: str = ""
    """`ip`."""


class KeyPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The most that an API key may grant, and what E2B's clients get."""

    allow: Annotated[tuple[Pattern, ...], Meta(max_length=MAX_PERMISSIONS)] = ("*",)
    """Canonical permissions; `*` at the end stands for any ending. `internet`, `ip:...` and whatever is private need
    more: the next two."""
    internet: bool = False
    """`internet`, and public addresses by `ip:`."""
    private: bool = False
    """The option `private`, and private addresses by `ip:`."""
    default: Network = {}
    """For E2B creations that say nothing about the network."""


class NetworkInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sandbox's network as it is now."""

    policy: Network
    environment: dict[str, str] = {}
    """Variables that commands get, unless they or the sandbox say otherwise."""
    open: int = 0
    """Connections."""
    out_bytes: int = 0
    """By connections that have ended, since this server began; what gateways moved isn't in it."""
    in_bytes: int = 0
    refused: int = 0
    """Connections."""


def host_name(text: str) -> str:
    """The one form of a host name. Raises ValueError with the reason."""
    name = text[:-1] if text.endswith(".") else text
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError) as error:
            raise ValueError(f"{text[:80]!r} is not an internationalised name: {error}") from None
    name = name.lower()
    labels = name.split(".")
    if not 1 <= len(name) <= 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text[:80]!r} is not a host name")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{text[:80]!r} is an address, not a name: grant it as ip:ADDRESS")
    if any(label.startswith("xn--") for label in labels):
        try:
            idna.decode(name)
        except (idna.IDNAError, UnicodeError) as error:
            raise ValueError(f"{text[:80]!r} is not valid punycode: {error}") from None
    return name


def block_of(text: str) -> Block:
    """An address or block of addresses; IPv4 within IPv6 is the IPv4 block. Raises ValueError."""
    try:
        block = ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not an address or a block of addresses (host bits are 0)") from None
    if isinstance(block, ipaddress.IPv6Network) and block.prefixlen >= 96:
        mapped = block.network_address.ipv4_mapped
        if mapped is not None:
            return ipaddress.ip_network((mapped, block.prefixlen - 96))
    return block


def permission(text: str) -> Permission:
    """A permission's name, taken apart. Raises ValueError with the reason."""
    if not 1 <= len(text) <= MAX_TEXT:
        raise ValueError(f"a permission has 1 to {MAX_TEXT} characters")
    kind, colon, argument = text.partition(":")
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{text[:80]!r} does not begin with a name of lower-case letters, digits and hyphens")
    if not argument and (colon or kind in ("host", "ip", "sandbox")):
        raise ValueError(f"{text[:80]!r} has nothing after a colon")
    if kind == "host":
        return _host(argument)
    if kind == "ip":
        return _ip(argument)
    if kind == "sandbox":
        name, _, number = argument.rpartition(":")
        host, port = host_name(name), _port(number)
        return Permission(f"sandbox:{host}:{port}", kind, argument, host, port)
    if not argument:
        return Permission(kind, kind)
    if not _ARGUMENT.fullmatch(argument):
        raise ValueError(f"{text[:80]!r}: after the colon come 1 to 500 visible ASCII characters")
    return Permission(f"{kind}:{argument}", kind, argument)


def permissions(network: Mapping[str, bool | PermissionOptions]) -> list[tuple[Permission, bool | PermissionOptions]]:
    """A policy, taken apart. Raises ValueError: what is wrong with it, by name."""
    if len(network) > MAX_PERMISSIONS:
        raise ValueError(f"a policy has at most {MAX_PERMISSIONS} permissions, this one {len(network)}")
    seen: dict[str, str] = {}
    found = []
    for text, grant in network.items():
        each = permission(text)
        if each.text in seen:
            raise ValueError(f"{text[:80]!r} and {seen[each.text][:80]!r} are the same permission")
        seen[each.text] = text
        found.append((each, grant))
    return found


def options_of(grant: bool | PermissionOptions) -> PermissionOptions | None:
    """The options of a grant; None where it is refused."""
    if isinstance(grant, bool):
        return PermissionOptions() if grant else None
    return grant


def _host(argument: str) -> Permission:
    name, colon, number = argument.rpartition(":")
    if not colon:
        name, number = argument, ""
    port = _port(number) if colon else None
    star = name.startswith("*.")
    if "*" in name[2 if star else 0 :]:
        raise ValueError(f"{argument[:80]!r}: a wildcard is the whole first label, as in *.example.com")
    host = ("*." if star else "") + host_name(name[2:] if star else name)
    if star and "." not in host[2:]:
        raise ValueError(f"{argument[:80]!r} is all names of a top-level domain")
    return Permission(f"host:{host}" + (f":{port}" if port else ""), "host", argument, host, port)


def _ip(argument: str) -> Permission:
    text, port = argument, None
    if argument.startswith("["):
        inside, bracket, rest = argument[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{argument[:80]!r} is not [ADDRESS] or [ADDRESS]:PORT")
        text, port = inside, _port(rest[1:]) if rest else None
    elif argument.count(":") == 1:
        text, _, number = argument.partition(":")
        port = _port(number)
    block = block_of(text)
    shown = str(block.network_address) if block.prefixlen == block.max_prefixlen else str(block)
    if port is None:
        return Permission(f"ip:{shown}", "ip", argument, block=str(block))
    shown = f"[{shown}]:{port}" if block.version == 6 else f"{shown}:{port}"
    return Permission(f"ip:{shown}", "ip", argument, port=port, block=str(block))


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    raise ValueError(f"{text[:20]!r} is not a port, 1 to 65535")

"""Files that ADD names by a URL, fetched on the node as one of the build's commands would: only from names that the
build's network grants, at the addresses that this grant allows, also after a redirect.

Nothing of the node goes along: no credentials, no cookies, no proxy.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import hashlib
import ipaddress
import re
import socket
import stat
import time
from collections.abc import Sequence
from typing import BinaryIO
from urllib.parse import unquote

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from dsec.builder.copying import Source
from dsec.builder.files import Files
from dsec.egress.node import Egress
from dsec.errors import BuildFailed, InvalidRequest, TooLarge
from dsec.plan.egress import Policy, Rule
from dsec.spec.network import Network, Reason, host_name
from dsec.store.format import BLOCK
from dsec.store.tree import Content, Node, directory

MAX_REDIRECTS = 5
FILE_BYTES = 8 << 30
"""Of one file."""
_PIECE = 1 << 18
_PIECE_BITS = 30
_MODE = stat.S_IFREG | 0o600
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHECKSUM = re.compile(r"sha256:([0-9a-f]{64})")


def checksum_of(text: str) -> str:
    """The digest that `--checksum` asks for. Raises ValueError."""
    found = _CHECKSUM.fullmatch(text.lower())
    if found is None:
        raise ValueError(f"--checksum={text[:100]} is not sha256: and 64 hexadecimal digits")
    return found[1]


class Downloads:
    """Of one node."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress

    async def fetch(
        self, network: Network, url: str, checksum: str | None, file: BinaryIO, timeout_s: float
    ) -> tuple[Files, Source]:
        """What a URL has, into `file`, which has to stay open as long as what is returned is used. Its name may be
        empty.

        Raises `InvalidRequest` for what can't be asked for or isn't granted, `BuildFailed` where the server doesn't
        hand it out or it isn't what the checksum says, `TooLarge`.
        """
        policy = self._egress.compile(network)
        connector = aiohttp.TCPConnector(resolver=_Granted(self._egress, policy), force_close=True)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30, sock_read=60)
        try:
            async with aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout, auto_decompress=False
            ) as session:
                return await self._fetch(session, policy, _parsed(url), checksum, file)
        except (aiohttp.ClientError, TimeoutError) as error:
            why = "it took too long" if isinstance(error, TimeoutError) else str(error)
            if isinstance(error, aiohttp.ClientConnectorError):
                why = error.os_error.strerror or why
            raise BuildFailed(f"{url[:200]} can't be fetched: {why[:300]}", remedy="Try again.") from error

    async def _fetch(
        self, session: aiohttp.ClientSession, policy: Policy, url: URL, checksum: str | None, file: BinaryIO
    ) -> tuple[Files, Source]:
        name = unquote(url.raw_path.rsplit("/", 1)[-1])
        if name in (".", "..") or "/" in name or "\0" in name:
            name = ""
        for _ in range(MAX_REDIRECTS + 1):
            rule = granted(policy, url)
            async with session.get(url, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as answer:
                target = answer.headers.get("Location")
                if answer.status in _REDIRECTS and target:
                    url = _parsed(str(url.join(URL(target))))
                    continue
                if answer.status != 200:
                    raise BuildFailed(f"{url.host} answered {answer.status} for {url.path[:200]}")
                size, digest = await _kept(answer, rule, file)
                changed = _changed(answer.headers.get("Last-Modified", ""))
            break
        else:
            raise BuildFailed(f"{url.host} redirects in circles")
        if checksum is not None and digest != checksum:
            raise BuildFailed(
                f"what {url.host} has at {url.path[:200]} is sha256:{digest}, not sha256:{checksum}",
                remedy="It was replaced, or the Dockerfile's checksum is another file's.",
            )
        return _one(name.encode(errors="surrogateescape"), size, changed, file)


def _parsed(text: str) -> URL:
    try:
        url = URL(text)
        port = url.port
    except ValueError as error:
        raise InvalidRequest(f"{text[:200]!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or not port:
        raise InvalidRequest(
            f"{text[:200]!r}: only http and https are supported",
            remedy="A repository is cloned in a RUN, with the permission git:HOST/PATH.",
        )
    if url.user or url.password:
        raise InvalidRequest(
            f"a URL of {url.host} holds credentials", remedy="They belong to a gateway (docs/GATEWAYS.md)."
        )
    return url


def granted(policy: Policy, url: URL) -> Rule:
    """The grant by which a URL may be asked for. Raises `InvalidRequest`."""
    host, port = url.host or "", url.port or 0
    try:
        decision = policy.decide_address(ipaddress.ip_address(host), port)
        permission = f"ip:{host}:{port}"
    except ValueError:
        try:
            name = host_name(host)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        decision = policy.decide(name, port)
        permission = f"host:{name}" if url.is_default_port() else f"host:{name}:{port}"
    rule = decision.rule
    if not decision.allowed or rule is None or rule.gateway or rule.sandbox:
        raise InvalidRequest(
            f"the build doesn't name {host} at port {port} ({decision.reason})",
            remedy=f"Name it: --network {permission}",
        )
    return rule


class _Granted(AbstractResolver):
    """Of a name the addresses that its grant allows."""

    def __init__(self, egress: Egress, policy: Policy) -> None:
        self._egress = egress
        self._policy = policy

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        name = host_name(host)
        rule = self._policy.decide(name, port).rule
        addresses = [ipaddress.ip_address(each.partition("%")[0]) for each in await self._egress.resolver.resolve(name)]
        allowed = [
            each
            for each in addresses
            if rule is not None and self._policy.check_address(rule, each, port) is Reason.GRANTED
        ]
        if not allowed:
            beyond = " that the build may reach" if addresses else ""
            raise OSError(errno.EHOSTUNREACH, f"{name} has no address{beyond}")
        return [
            ResolveResult(
                hostname=host,
                host=str(each),
                port=port,
                family=socket.AF_INET if each.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for each in allowed
        ]

    async def close(self) -> None:
        """Nothing is open."""


async def _kept(answer: aiohttp.ClientResponse, rule: Rule, file: BinaryIO) -> tuple[int, str]:
    """The body in `file`: its size and SHA-256."""
    found, size, began = hashlib.sha256(), 0, time.monotonic()
    most = min(FILE_BYTES, rule.bytes or FILE_BYTES)
    async for piece in answer.content.iter_chunked(_PIECE):
        size += len(piece)
        if size > most:
            raise TooLarge(f"a file of more than {most} bytes")
        found.update(piece)
        await asyncio.to_thread(file.write, piece)
        if rule.bytes_per_s:
            await asyncio.sleep(max(0.0, size / rule.bytes_per_s - (time.monotonic() - began)))
    await asyncio.to_thread(file.flush)
    return size, found.hexdigest()


def _changed(text: str) -> int:
    """Nanoseconds; 0 where the server doesn't say when."""
    try:
        return max(0, int(email.utils.parsedate_to_datetime(text).timestamp())) * 10**9
    except (ValueError, OverflowError):
        return 0


def _one(name: bytes, size: int, mtime_ns: int, file: BinaryIO) -> tuple[Files, Source]:
    top = directory()
    step = 1 << _PIECE_BITS
    blocks: Sequence[int] = range(0, -(-size // BLOCK), step // BLOCK)
    node = Node(_MODE, mtime_ns=mtime_ns, content=Content(size, b"", _PIECE_BITS, tuple(blocks)))
    top.children[name] = node
    return Files(top, lambda _: file), Source(name, node)

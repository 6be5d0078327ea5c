"""The client with which gateways speak to their upstreams: TLS and addresses checked, time limits between bytes, bodies
streamed, redirects followed only where the caller says. Nothing of a sandbox's environment or cookies is kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict
from yarl import URL

from dsec.egress.gateways.answers import TooBig, UpstreamError
from dsec.plan.addresses import plain, public

MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})

AddressCheck = Callable[[str, str], bool]
"""`(host, address)`: whether a name may be reached at an address that it resolved to."""


def is_public(_host: str, address: str) -> bool:
    """Whether an address is one of the internet's, also behind its IPv6 disguises."""
    return public(plain(ipaddress.ip_address(address.split("%", 1)[0])))


class _Resolver(AbstractResolver):
    def __init__(self, permitted: Callable[[str, int, str], bool]) -> None:
        self._inner = aiohttp.ThreadedResolver()
        self._permitted = permitted

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        kept = [each for each in found if self._permitted(host, port, each["host"])]
        if not kept:
            raise OSError(f"{host} has no address that may be reached")
        return kept

    async def close(self) -> None:
        await self._inner.close()


class Outside:
    """One a node, shared by its gateways. `trusted`: hosts that the operator's configuration names (`host` or
    `host:port`), which may have any address, such as one of the local network; all others need a public one."""

    def __init__(
        self,
        *,
        trusted: Iterable[str] = (),
        address_check: AddressCheck = is_public,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 60.0,
    ) -> None:
        self._trusted: set[str] = set()
        self.trust(trusted)
        self._check = address_check
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    def trust(self, hosts: Iterable[str]) -> None:
        """These may have any address."""
        self._trusted |= {host.lower() for host in hosts}

    def _permitted(self, host: str, port: int, address: str) -> bool:
        return bool({host.lower(), f"{host.lower()}:{port}"} & self._trusted) or self._check(host, address)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # made late: it needs the loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=256, limit_per_host=64, resolver=_Resolver(self._permitted)),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                auto_decompress=False,
                trust_env=True,  # the node's own way out, where it needs a proxy
                skip_auto_headers=("User-Agent", "Accept", "Content-Type", "Accept-Encoding"),
            )
        return self._session

    @asynccontextmanager
    async def open(
        self,
        method: str,
        url: URL,
        *,
        headers: Mapping[str, str] | CIMultiDict[str] = {},  # noqa: B006 (never written to)
        private: Mapping[str, str] = {},
        data: Any = None,
        follow: Callable[[URL], bool] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request; the answer's body is the caller's to read. `private` headers go to the first origin only.
        `follow`: the hosts to which redirects of GET and HEAD are followed; without it they are answers.

        Raises `UpstreamError`; within the context too, when the body breaks off.
        """
        origin, response = url.origin(), None
        try:
            for _ in range(MAX_REDIRECTS + 1):
                if url.scheme not in {"http", "https"} or not url.host or url.user or url.password:
                    raise UpstreamError("the address isn't one for HTTP")
                if _is_literal(url.host) and not self._permitted(url.host, url.port or 0, url.host):
                    raise UpstreamError(f"{url.host} may not be reached")
                sent = CIMultiDict(headers)
                sent.setdefault("User-Agent", "dsec-gateway")
                if url.origin() == origin:
                    sent.update(private)
                response = await self._client().request(method, url, headers=sent, data=data, allow_redirects=False)
                target = response.headers.get("Location")
                if response.status not in REDIRECTS or follow is None or target is None:
                    break
                response.release()
                url = url.join(URL(target)).with_fragment(None)
                if not follow(url) or (origin.scheme == "https" and url.scheme != "https"):
                    raise UpstreamError(f"it redirects to {url.host}, which its configuration doesn't name")
            else:
                raise UpstreamError("it redirects in circles")
            yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise UpstreamError(_reason(error)) from error
        finally:
            if response is not None:
                response.close() if not response.content.at_eof() else response.release()

    async def close(self) -> None:
        """Let go of all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.split("%", 1)[0])
    except ValueError:
        return False
    return True


def _reason(error: Exception) -> str:
    """A cause in words that hold no URL (its query may be private) and no header."""
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "the server outside did not answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "the server outside has no valid certificate"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection to {error.host}:{error.port} ({error.os_error.strerror or error.os_error})"
    return f"the server outside broke off ({type(error).__name__})"


async def chunks(response: aiohttp.ClientResponse, limit: int) -> AsyncIterator[bytes]:
    """The body, at most `limit` bytes of it. Raises `TooBig`, and what `Outside.open` translates."""
    seen = 0
    async for data in response.content.iter_any():
        seen += len(data)
        if seen > limit:
            raise TooBig(f"the server outside sent more than {limit} bytes")
        yield data


def decoded(body: bytes, encoding: str | None, limit: int) -> bytes:
    """A body without its content encoding, at most `limit` bytes of it. Raises `TooBig`, `UpstreamError`."""
    if encoding in {None, "", "identity"}:
        return body
    if encoding != "gzip":
        raise UpstreamError("the server outside sent an encoding that it wasn't asked for")
    decoder = zlib.decompressobj(31)
    try:
        text = decoder.decompress(body, limit)
    except zlib.error as error:
        raise UpstreamError("the server outside sent a damaged body") from error
    if decoder.unconsumed_tail:
        raise TooBig(f"the server outside sent more than {limit} bytes")
    if not decoder.eof:
        raise UpstreamError("the server outside sent a body without its end")
    return text

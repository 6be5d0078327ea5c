"""What the gateways share: one call's context and answers, the grants' options, fetches through the cache, the audit.

A subclass writes `serve`: it answers through the `Call`, or raises `Refusal` or `UpstreamError`. Whatever was begun and
can't be ended is cut, so that no half of an answer looks like a whole one.
"""

from __future__ import annotations

import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct
from yarl import URL

from dsec.egress.gateway import Grant, Visit
from dsec.egress.gateways.answers import Refusal, UpstreamError, broken, forbidden, missing
from dsec.egress.gateways.cache import Body, Cache, Item
from dsec.egress.gateways.config import GatewaysConfig, Upstream
from dsec.egress.gateways.outside import Outside, chunks, decoded
from dsec.egress.gateways.paths import BadPath, segments
from dsec.egress.gateways.secrets import Headers, SecretError, Secrets
from dsec.errors import InvalidRequest

Options = TypeVar("Options", bound=Struct)

LIMITS = frozenset({"connections", "bytes", "bytes_per_s", "requests_per_s"})
"""Options that the egress itself holds to."""
KEPT_HEADERS = ("ETag", "Last-Modified", "Content-Type")
CONDITIONS = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}


class Shared(Struct, frozen=True):
    """One of each a node."""

    config: GatewaysConfig
    outside: Outside
    cache: Cache
    secrets: Secrets


class Call:
    """One request to a gateway."""

    def __init__(self, request: web.BaseRequest, visit: Visit) -> None:
        self.request = request
        self.visit = visit
        self.grant = visit.grants[0]
        """Whose permission it counts as; a gateway with several chooses."""
        self.response: web.StreamResponse | None = None
        self.sent = 0
        """Bytes of the answer's body so far."""
        self.noted: dict[str, Any] = {}
        """For the audit, beside what every request has."""

    @property
    def permission(self) -> str:
        return self.grant.permission

    def path(self) -> list[str]:
        """The decoded segments. Raises `Refusal`."""
        try:
            return segments(self.request.rel_url.raw_path)
        except BadPath as error:
            raise Refusal(400, f"not a path that this gateway takes: {error}") from error

    def reading(self) -> None:
        """Raises `Refusal` for a request that isn't GET or HEAD."""
        if self.request.method not in {"GET", "HEAD"}:
            raise forbidden(self.permission, f"it is read-only, {self.request.method} is not for reading")

    async def begin(self, status: int, headers: Mapping[str, str]) -> web.StreamResponse:
        """The answer's head."""
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self.request)
        return self.response

    async def write(self, data: bytes) -> None:
        """More of the answer's body."""
        assert self.response is not None
        self.sent += len(data)
        await self.response.write(data)

    async def text(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
        """A short answer in words."""
        headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store", **(headers or {})}
        return await self.page(text.encode() + b"\n", headers, status=status)

    async def page(self, body: bytes, headers: Mapping[str, str], *, status: int = 200) -> web.StreamResponse:
        """A whole body; a page with status 200 has a tag, by which an unchanged one isn't sent again."""
        headers = dict(headers)
        if status == 200:
            headers["ETag"] = tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            if _matches(self.request.headers.get("If-None-Match"), tag):
                return await self.begin(304, {"ETag": tag})
        response = await self.begin(status, {**headers, "Content-Length": str(len(body))})
        if self.request.method != "HEAD":
            await self.write(body)
        return response

    async def item(self, item: Item, headers: Mapping[str, str]) -> web.StreamResponse:
        """An object of the cache's, or the range of it that was asked for. Its length is known when it has arrived;
        before that it is sent in chunks as it comes."""
        asked = self.request.headers.get("Range")
        wanted = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", asked.strip()) if asked else None
        if wanted or self.request.method == "HEAD":
            await item.arrived()
        headers = {**headers, "Accept-Ranges": "bytes"}
        if modified := item.headers.get("Last-Modified"):
            headers["Last-Modified"] = modified
        tag = f'"{item.sha256[:32]}"' if item.sha256 else None
        if tag:
            headers["ETag"] = tag
            unmodified = modified and self.request.headers.get("If-Modified-Since") == modified
            if _matches(self.request.headers.get("If-None-Match"), tag) or (
                "If-None-Match" not in self.request.headers and unmodified
            ):
                return await self.begin(304, {"ETag": tag})
        start, end, status = 0, item.size, 200
        if wanted and end is not None and self.request.headers.get("If-Range", tag) in {tag, modified}:
            span = _span(wanted[1], wanted[2], end)
            if span is None:
                return await self.begin(416, {"Content-Range": f"bytes */{end}", "Content-Length": "0"})
            headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{end}"
            start, end, status = *span, 206
        if end is not None:
            headers["Content-Length"] = str(end - start)
        response = await self.begin(status, headers)
        if self.request.method != "HEAD":
            async for data in item.read(start, end):
                await self.write(data)
        return response


def _own(grant: Grant) -> dict[str, Any]:
    """A grant's options for the gateway."""
    return {name: value for name, value in grant.options.items() if name not in LIMITS | {"target"}}


def _matches(header: str | None, tag: str) -> bool:
    return header is not None and (
        header.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in header.split(",")]
    )


def _span(first: str, last: str, size: int) -> tuple[int, int] | None:
    """`bytes=first-last` of a body of `size` bytes as (start, end); None where it has no such bytes."""
    if not first:
        return (max(size - int(last), 0), size) if last and int(last) > 0 and size else None
    end = min(int(last) + 1, size) if last else size
    return (int(first), end) if int(first) < end else None


class BaseGateway(ABC):
    """See `dsec.egress.gateway.Gateway`."""

    kinds: tuple[str, ...]
    hosts: tuple[str, ...]
    options: type[Struct]
    """What a grant's options may hold."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    @abstractmethod
    async def serve(self, call: Call) -> web.StreamResponse:
        """Answer. Raises `Refusal`, `UpstreamError`, `SecretError`."""

    @abstractmethod
    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        """Variables that point the tools inside at it."""

    def check(self, grant: Grant) -> None:
        """A permission before it is granted. Raises `InvalidRequest`."""
        try:
            msgspec.convert(_own(grant), self.options)
        except (msgspec.ValidationError, ValueError) as error:
            raise InvalidRequest(
                f"the options of the permission {grant.permission}: {error}", remedy="docs/GATEWAYS.md has them."
            ) from error

    async def handle(self, request: web.BaseRequest, visit: Visit) -> web.StreamResponse:
        """Answer, and note it."""
        call, begun = Call(request, visit), time.monotonic()
        try:
            try:
                return await self.serve(call)
            except SecretError as error:
                raise broken(call.permission, str(error)) from error
            except UpstreamError as error:
                raise broken(call.permission, str(error)) from error
        except Refusal as refusal:
            if call.response is not None:  # the head is out: what follows must not look like the end of the body
                call.noted["cut"] = refusal.text
                if request.transport is not None:
                    request.transport.abort()
                return call.response
            call.noted["refused"] = refusal.text
            return await call.text(refusal.status, refusal.text, refusal.headers)
        finally:
            response = call.response
            visit.note(
                "gateway",
                {
                    "permission": call.permission,
                    "method": request.method,
                    "path": request.rel_url.raw_path[:512],
                    "status": response.status if response is not None else 0,
                    "bytes": call.sent,
                    "duration_ms": round((time.monotonic() - begun) * 1000, 1),
                    **call.noted,
                },
            )

    async def close(self) -> None:  # noqa: B027 (most have nothing of their own)
        """What is shared is closed by who made it."""

    # --- for subclasses ---

    def read_options(self, grant: Grant, kind: type[Options]) -> Options:
        """The options of a grant; those that `check` would refuse serve nothing."""
        try:
            return msgspec.convert(_own(grant), kind)
        except (msgspec.ValidationError, ValueError) as error:
            raise broken(grant.permission, f"its options are not valid ({error})") from error

    def target(self, grant: Grant) -> str:
        """What a grant is for: its argument; or what an operator's permission of another name says (`target`)."""
        return grant.argument or str(grant.options.get("target", ""))

    def trust(self, upstream: Upstream) -> None:
        """An upstream that the node's own tools use may have an address of the local network."""
        self._shared.outside.trust([URL(upstream.url).authority])

    def credentials(self, call: Call, upstream: Upstream, extra: Mapping[str, str] = {}) -> Headers:
        """The headers that are added at an upstream, secrets filled in."""
        headers = {**upstream.headers, **extra}
        return self._shared.secrets.fill(headers, host=URL(upstream.url).authority, project=call.visit.project)

    def partition(self, call: Call, private: Headers) -> str:
        """Who shares what is cached: everybody what anybody may fetch; what took credentials only the project that had
        exactly these."""
        if not private.values:
            return "public"
        digest = hashlib.sha256(msgspec.json.encode([call.visit.project, sorted(private.values.items())]))
        return digest.hexdigest()

    async def fetch_page(
        self, call: Call, upstream: Upstream, url: URL, headers: Mapping[str, str], *, missing_text: str
    ) -> Item:
        """An index page, through the cache. The caller closes the item. Raises `Refusal` 404, `UpstreamError`."""
        private = self.credentials(call, upstream)
        key = "\n".join([self.partition(call, private), "page", str(url), str(sorted(headers.items()))])

        async def fetch(old: Mapping[str, str]) -> Body | None:
            conditions = {CONDITIONS[name]: old[name] for name in CONDITIONS if name in old}
            return await self._body(
                url, {**headers, **conditions}, private, upstream, missing_text, limit=self._shared.config.index_bytes
            )

        config = self._shared.config
        return await self._shared.cache.page(key, fetch, limit=config.index_bytes, ttl_s=config.index_ttl_s)

    async def read_page(
        self, call: Call, upstream: Upstream, url: URL, headers: Mapping[str, str], *, missing_text: str
    ) -> tuple[bytes, Item]:
        """The same, decoded, with the item for its headers and digest (closed)."""
        item = await self.fetch_page(
            call, upstream, url, {**headers, "Accept-Encoding": "gzip"}, missing_text=missing_text
        )
        try:
            limit = self._shared.config.index_bytes
            return decoded(await item.whole(), item.headers.get("Content-Encoding"), limit), item
        finally:
            item.close()

    async def fetch_file(
        self, call: Call, upstream: Upstream, url: URL, *, sha256: str | None, missing_text: str,
        headers: Mapping[str, str] = {"Accept-Encoding": "identity"},
    ) -> Item:  # fmt: skip
        """A file that never changes, through the cache. The caller closes the item. Raises as `fetch_page`."""
        same = url.origin() == URL(upstream.url).origin()
        private = self.credentials(call, upstream) if same else Headers({})
        key = "\n".join([self.partition(call, private), "file", str(url), sha256 or ""])

        async def fetch() -> Body:
            body = await self._body(
                url, headers, private, upstream, missing_text, limit=self._shared.config.object_bytes
            )
            if body is None:
                raise UpstreamError("the server outside says that nothing changed where nothing was known")
            return body

        return await self._shared.cache.get(key, fetch, limit=self._shared.config.object_bytes, sha256=sha256)

    async def _body(
        self,
        url: URL,
        headers: Mapping[str, str],
        private: Headers,
        upstream: Upstream,
        missing_text: str,
        *,
        limit: int,
    ) -> Body | None:
        stack = AsyncExitStack()
        try:
            response = await stack.enter_async_context(
                self._shared.outside.open(
                    "GET", url, headers=headers, private=private.values, follow=follows(upstream, url)
                )
            )
            if response.status == 304:
                await stack.aclose()
                return None
            if response.status in {404, 410}:
                raise missing(missing_text)
            if response.status in {401, 403, 451} and not private.values:
                raise missing(f"{missing_text} (the server outside doesn't give it: {response.status})")
            if response.status != 200:
                raise UpstreamError(f"the server outside answered {response.status}")
            expected = response.headers.get("Content-Length", "")
            if expected.isdigit() and int(expected) > limit:
                raise UpstreamError(f"it has {expected} bytes, more than the {limit} that are taken")
        except BaseException:
            await stack.aclose()
            raise
        kept = {
            name: response.headers[name] for name in (*KEPT_HEADERS, "Content-Encoding") if name in response.headers
        }

        async def data() -> AsyncGenerator[bytes, None]:
            async with stack:
                async for chunk in chunks(response, limit):
                    yield chunk

        return Body(kept, data())


def follows(upstream: Upstream, url: URL) -> Callable[[URL], bool]:
    """Where a request may be redirected to: its own host, the upstream, and what its configuration names."""
    hosts = {url.authority, URL(upstream.url).authority, *upstream.hosts}
    return lambda target: target.authority in hosts or target.host in hosts


def instant(text: str) -> datetime:
    """A point in time from an option: a date is its first moment, in UTC. Raises `ValueError`."""
    value = datetime.fromisoformat(text.strip())
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def moment(text: object) -> datetime | None:
    """A time that an index names; None where it doesn't, or not as one."""
    try:
        return instant(text) if isinstance(text, str) and text else None
    except ValueError:
        return None

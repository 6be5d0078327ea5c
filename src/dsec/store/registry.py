"""A registry over HTTP, as the OCI distribution specification says: images and blobs, with token or basic
authentication.

What is answered is believed only after its digest says so. Answers that say "later" (429, 5xx, broken connections) are
asked for again, as long as `Retry-After` or a growing pause says; a download goes on where it was cut.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from dsec.errors import DsecError, InvalidRequest, LayerCorrupt, NotFound, PermissionDenied, TooLarge, Unavailable
from dsec.store.image import (
    INDEXES,
    MANIFESTS,
    MAX_DOCUMENT,
    MAX_NESTING,
    BlobRange,
    Descriptor,
    Document,
    Image,
    ImageLayer,
    Platform,
    check_digest,
    choose,
    parse_document,
    parse_image,
)
from dsec.store.shared import Progress

ATTEMPTS = 6
LONGEST_PAUSE_S = 60.0
_READ = 256 << 10
_ACCEPT = ", ".join(sorted(INDEXES | MANIFESTS))
_REFERENCE = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?)/"
    r"(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>[a-z0-9:]+))?"
)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:\d+)?")


class Reference(NamedTuple):
    """Names an image in a registry."""

    url: str
    """The registry's."""
    name: str
    reference: str
    """A tag or a digest."""

    def __str__(self) -> str:
        mark = "@" if ":" in self.reference else ":"
        return f"{urlsplit(self.url).netloc}/{self.name}{mark}{self.reference}"


def parse_reference(text: str, default: str | None = None) -> Reference:
    """`[http[s]://]HOST[:PORT]/NAME[:TAG][@DIGEST]`. Without a scheme it is https, http for this machine itself.
    `default`: the registry of names without a host. Raises `InvalidRequest`."""
    first, below, _ = text.rsplit("://", maxsplit=1)[-1].partition("/")
    if "://" not in text and not (below and re.search(r"[.:]|^localhost$", first)):  # `python:3.11` has a tag, no host
        if default is None:
            raise InvalidRequest(
                f"{text[:200]!r} doesn't say which registry", remedy="Say HOST/NAME:TAG, or set DSEC_REGISTRY."
            )
        text = f"{default.rstrip('/')}/{text}"
    match = _REFERENCE.fullmatch(text)
    if match is None or len(text) > 1000:
        raise InvalidRequest(f"not an image of a registry: {text[:200]!r}", remedy="Like HOST:PORT/NAME:TAG.")
    scheme = match["scheme"] or ("http" if _LOOPBACK.fullmatch(match["host"]) else "https")
    reference = check_digest(match["digest"]) if match["digest"] else match["tag"] or "latest"
    return Reference(f"{scheme}://{match['host']}", match["name"], reference)


def docker_credentials(host: str, path: Path | None = None) -> str | None:
    """`user:password` for a registry from Docker's own configuration file, where it is in there."""
    path = path or Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        auths = msgspec.json.decode(path.read_bytes(), type=dict[str, object]).get("auths")
        entry = auths.get(host) or auths.get(f"https://{host}") if isinstance(auths, dict) else None
        if isinstance(entry, dict) and isinstance(entry.get("auth"), str):
            found = base64.b64decode(entry["auth"], validate=True).decode()
            return found if ":" in found else None
    except (OSError, ValueError):
        pass
    return None


class RegistrySource:
    """`image.ImageSource` of one image in a registry."""

    def __init__(
        self,
        reference: Reference,
        credentials: str | None = None,
        *,
        pause_s: float = 0.5,
        connector: Callable[[], aiohttp.BaseConnector] = aiohttp.TCPConnector,
    ) -> None:
        """`credentials`: `user:password`. `pause_s`: before the second attempt; it doubles. `connector`: makes what
        makes the connections."""
        self.name = str(reference)
        self._reference = reference
        self._base = f"{reference.url}/v2/{reference.name}"
        self._credentials = credentials
        self._pause_s = pause_s
        self._authorization: str | None = None
        self._http = aiohttp.ClientSession(
            connector=connector(),
            trust_env=True,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60),
            headers={"User-Agent": "dsec"},
        )

    async def close(self) -> None:
        await self._http.close()

    async def image(self, platform: Platform) -> Image:
        reference, media_type = self._reference.reference, ""
        expected: Descriptor | None = None
        for _ in range(MAX_NESTING):
            data, kind = await self._document(f"manifests/{reference}", _ACCEPT)
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            if reference.startswith("sha256:") and digest != reference:
                raise LayerCorrupt(f"{self.name}: the manifest {reference} is not what its digest says")
            if expected is not None and expected.size not in (0, len(data)):
                raise LayerCorrupt(f"{self.name}: the manifest {reference} is not as large as was said")
            document = parse_document(data, kind or media_type)
            if document.manifests is None:
                return parse_image(digest, document, await self._config(document), platform)
            expected = choose(document, platform)
            reference, media_type = expected.digest, expected.media_type
        raise InvalidRequest(f"{self.name}: its indexes lead to indexes, {MAX_NESTING} times over")

    async def _config(self, document: Document) -> bytes:
        assert document.config is not None
        if document.config.size > MAX_DOCUMENT:
            raise InvalidRequest(f"{self.name}: its configuration is {document.config.size} bytes large")
        data, _ = await self._document(f"blobs/{document.config.digest}", "*/*")
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != document.config.digest:
            raise LayerCorrupt(f"{self.name}: its configuration is not what its digest says")
        return data

    async def _document(self, path: str, accept: str) -> tuple[bytes, str]:
        """A small answer and its media type."""
        failure: DsecError | None = None
        for attempt in range(ATTEMPTS):
            await self._pause(attempt, failure)
            try:
                async with await self._get(path, {"Accept": accept}) as answer:
                    data = b""
                    async for piece in answer.content.iter_chunked(_READ):
                        data += piece
                        if len(data) > MAX_DOCUMENT:
                            raise TooLarge(f"{self.name}: a document is larger than {MAX_DOCUMENT >> 20} MiB")
                    return data, answer.content_type if answer.content_type != "application/octet-stream" else ""
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = self._broken(error)
            except Unavailable as error:
                failure = error
        assert failure is not None
        raise failure

    async def fetch(self, layer: ImageLayer, into: str, progress: Progress) -> BlobRange:
        assert layer.digest is not None
        failure: DsecError | None = None
        bad = 0
        attempt = 0
        with open(into, "w+b") as file:  # noqa: ASYNC230 (its I/O is the page cache's)
            while attempt < ATTEMPTS:
                await self._pause(attempt, failure)
                begun = file.tell()
                try:
                    if begun < layer.size or not begun:  # else all of it came, and then the connection broke
                        await self._download(layer, file.fileno(), begun, progress)
                    if await asyncio.to_thread(_hash, into) == layer.digest:
                        return BlobRange(into, 0, layer.size)
                    bad += 1
                    failure = LayerCorrupt(f"{self.name}: the blob {layer.digest} is not what its digest says")
                    if bad == 2:
                        break
                    file.truncate(0)
                except (aiohttp.ClientError, TimeoutError) as error:
                    failure = self._broken(error)
                except Unavailable as error:
                    failure = error
                # What came stays; an attempt that brought something doesn't count.
                attempt = attempt + 1 if file.seek(0, os.SEEK_END) <= begun else 1
        assert failure is not None
        raise failure

    async def _download(self, layer: ImageLayer, fd: int, offset: int, progress: Progress) -> None:
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        async with await self._get(f"blobs/{layer.digest}", headers) as answer:
            if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                offset = 0
                os.ftruncate(fd, 0)
            async for piece in answer.content.iter_chunked(_READ):
                if offset + len(piece) > layer.size:
                    raise LayerCorrupt(f"{self.name}: the blob {layer.digest} is larger than {layer.size} bytes")
                os.pwrite(fd, piece, offset)
                offset += len(piece)
                progress("downloading", offset, layer.size)
        if offset < layer.size:
            raise Unavailable(f"{self.name}: the blob {layer.digest} came only in part")

    # --- requests ---

    async def _get(self, path: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """A good answer. Raises `NotFound`, `PermissionDenied`, `InvalidRequest`, `Unavailable`, aiohttp's errors."""
        for again in (False, True):
            wanted = headers | ({"Authorization": self._authorization} if self._authorization else {})
            answer = await self._http.get(f"{self._base}/{path}", headers=wanted, max_redirects=5)
            if answer.status in (200, 206):
                return answer
            answer.release()
            if answer.status == 401 and not again:
                await self._authenticate(answer.headers.getall("WWW-Authenticate", []))
                continue
            raise self._refused(answer, path)
        raise AssertionError

    def _refused(self, answer: aiohttp.ClientResponse, path: str) -> DsecError:
        status = answer.status
        if status in (401, 403):
            return PermissionDenied(f"{self.name}: the registry refuses access", remedy="Check user and password.")
        if status == 404:
            return NotFound(f"{self.name}: the registry has no {path}")
        if status == 416:
            return LayerCorrupt(f"{self.name}: the registry's {path} is shorter than it says")
        if status == 429 or status >= 500:
            return Unavailable(
                f"{self.name}: the registry answered {status}",
                retry_after_s=_seconds(answer.headers.get("Retry-After")),
            )
        return InvalidRequest(f"{self.name}: the registry answered {status} to {path}")

    def _broken(self, error: BaseException) -> Unavailable:
        return Unavailable(f"{self.name}: the registry can't be reached: {str(error) or type(error).__name__}"[:500])

    async def _pause(self, attempt: int, failure: DsecError | None) -> None:
        if attempt:
            said = failure.details.get("retry_after_s") if failure is not None else None
            pause_s = said if said is not None else self._pause_s * 2 ** (attempt - 1) * random.uniform(0.7, 1.3)
            await asyncio.sleep(min(LONGEST_PAUSE_S, pause_s))

    async def _authenticate(self, challenges: list[str]) -> None:
        """Answer a challenge: the next request carries what it asks for."""
        basic = None
        if self._credentials is not None:
            basic = f"Basic {base64.b64encode(self._credentials.encode()).decode()}"
        for challenge in challenges:
            kind, _, rest = challenge.partition(" ")
            if kind.lower() == "bearer":
                self._authorization = await self._token(dict(_PARAMETER.findall(rest)), basic)
                return
            if kind.lower() == "basic" and basic is not None:
                self._authorization = basic
                return
        raise PermissionDenied(
            f"{self.name}: the registry wants a user and a password", remedy="Give them, or `docker login` there."
        )

    async def _token(self, parameters: dict[str, str], basic: str | None) -> str:
        realm = parameters.get("realm", "")
        schemes = ("https:",) if self._reference.url.startswith("https:") else ("https:", "http:")
        if not realm.lower().startswith(schemes):
            raise PermissionDenied(f"{self.name}: the registry wants a token from {realm[:200]!r}")
        query = {"service": parameters.get("service", ""), "scope": f"repository:{self._reference.name}:pull"}
        headers = {"Authorization": basic} if basic else {}
        async with self._http.get(realm, params={k: v for k, v in query.items() if v}, headers=headers) as answer:
            body = await answer.content.read(1 << 20)
            if answer.status == 429 or answer.status >= 500:
                raise self._refused(answer, "token")
            try:
                found = msgspec.json.decode(body, type=dict[str, object])
            except msgspec.MsgspecError:
                found = {}
            token = found.get("token") or found.get("access_token")
            if answer.status != 200 or not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
                raise PermissionDenied(f"{self.name}: the registry gives no token", remedy="Check user and password.")
            return f"Bearer {token}"


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

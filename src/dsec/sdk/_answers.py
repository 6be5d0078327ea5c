"""Answers of a server, whichever HTTP client they came by, and what is wrong with them. No policy: when to try again is
`_transport`'s business.

aiohttp is imported when it is first needed, because `import dsec` must be light.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from dsec.errors import DsecError, ErrorBody, Unavailable, from_body
from dsec.sdk._http import ConnectFailed

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_RETRIED = frozenset({429, 502, 503, 504})
_ERROR = msgspec.json.Decoder(ErrorBody)


class Answer(Protocol):
    """An answer that has begun, as `_http.Answer` has it."""

    status: int

    @property
    def at_end(self) -> bool: ...
    def header(self, name: str) -> str | None: ...
    async def read_some(self) -> bytes: ...
    async def read(self) -> bytes: ...
    def close(self) -> None: ...


class Streamed:
    """`Answer` over aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.status = response.status

    @property
    def at_end(self) -> bool:
        return self.response.content.is_eof()

    def header(self, name: str) -> str | None:
        return self.response.headers.get(name)

    async def read_some(self) -> bytes:
        return await self.response.content.readany()

    async def read(self) -> bytes:
        return await self.response.read()

    def close(self) -> None:
        if self.at_end:
            self.response.release()
        else:
            self.response.close()


class SourceFailed(Exception):
    """A streamed body's maker raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Source:
    """A streamed body; keeps what its chunks' maker raised, which aiohttp turns into a connection error."""

    def __init__(self, chunks: AsyncIterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.error: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except Exception as error:
            self.error = error
            raise


def decoded(data: bytes, kind: type[T]) -> T:
    """An answer of the server's. Raises `Unavailable` where something else answered."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(
            f"the answer is not that of a dsec server of this version: {error}",
            remedy="check the URL and `dsec version`",
        ) from error


async def failure_of(answer: Answer) -> tuple[DsecError, float | None]:
    """The error of an answer, and after how long to try again (None: not)."""
    after = answer.header("Retry-After")
    request_id = answer.header("X-Request-Id")
    try:
        data = await answer.read()
    except cut_errors():
        data = b""
    error: DsecError
    try:
        error = from_body(_ERROR.decode(data))
        foreign = False
    except (msgspec.MsgspecError, UnicodeDecodeError):  # a proxy in between, say
        text = data[:200].decode("utf-8", "replace")
        error = Unavailable(f"HTTP status {answer.status}: {text}", remedy="check the URL of the server")
        foreign = True
    if request_id:
        error.details.setdefault("request_id", request_id)
    if answer.status not in _RETRIED or not (after or foreign):
        return error, None
    try:
        return error, float(after or 0)
    except ValueError:
        return error, 1.0


def reason(error: BaseException) -> object:
    """Of a broken connection, in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


_errors: dict[str, tuple[type[BaseException], ...]] = {}


def cut_errors() -> tuple[type[BaseException], ...]:
    """What a broken connection raises."""
    found = _errors.get("cut")
    if found is None:
        import aiohttp  # noqa: PLC0415

        found = _errors["cut"] = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
    return found


def connect_errors() -> tuple[type[BaseException], ...]:
    import aiohttp  # noqa: PLC0415

    return (ConnectFailed, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

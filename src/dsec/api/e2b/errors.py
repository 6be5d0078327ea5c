"""Errors in the two forms that E2B's client reads: REST (`code` is the HTTP status) and Connect (`code` is a word).

Invariants: every error answer is JSON with `code` and `message`; a sandbox that is gone is 404 on the control plane,
and on the data plane 502 with "was not found", which is how the client tells it from a network that is down;
`Should-Retry` says whether the client's own retries may repeat the request.
"""

from __future__ import annotations

from dsec.api.e2b.models import RestError, RpcFailure
from dsec.api.exchange import Exchange, headers_of
from dsec.errors import (
    AdmissionTimeout,
    CreateFailed,
    DsecError,
    FileError,
    FileMissing,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    QuotaExceeded,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from dsec.wire.connect import Code

GONE = (SandboxNotFound, SandboxEnded, SandboxLost)
_RETRIED = (429, 502, 503, 504)


class NotYet(Unsupported):
    """A call of E2B's that this version doesn't have."""

    http_status = 501


class RpcError(Exception):
    """An error of an RPC that has no class of its own in dsec's tree."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def not_yet(what: str, instead: str = "") -> NotYet:
    return NotYet(f"{what} is not available in this version of dsec", remedy=instead)


def message_of(error: DsecError) -> str:
    """What happened and what to do about it, in one line."""
    return f"{error.message}. {error.remedy}" if error.remedy else error.message


async def fail_rest(x: Exchange, error: DsecError) -> None:
    """A control-plane error as the answer."""
    status = 404 if isinstance(error, GONE) else error.http_status
    await _answer(x, status, message_of(error), error)


async def fail_data(x: Exchange, error: DsecError) -> None:
    """An error of `/files`, `/health`, or of an RPC before anything of it was understood."""
    if isinstance(error, GONE):
        await _answer(x, 502, gone_message(error), error)
    elif isinstance(error, FileError):
        status = 507 if error.details.get("errno") in ("ENOSPC", "EDQUOT") else 400
        await _answer(x, status, message_of(error), error)
    else:
        await _answer(x, error.http_status, message_of(error), error)


def gone_message(error: DsecError) -> str:
    """The words that the client looks for."""
    return f"The sandbox was not found: {error.message}"


async def fail_unary(x: Exchange, error: DsecError | RpcError) -> None:
    """The error of a unary RPC as the answer."""
    if isinstance(error, GONE):
        await fail_data(x, error)
        return
    code, message = rpc_error(error)
    if x.began:
        await x.cut()
        return
    await x.drain()
    await x.answer(code.http_status, RpcFailure(code, message))


def rpc_error(error: DsecError | RpcError) -> tuple[Code, str]:
    """Code and message in Connect's terms."""
    if isinstance(error, RpcError):
        return error.code, error.message
    if isinstance(error, GONE):
        return Code.UNAVAILABLE, gone_message(error)
    if isinstance(error, FileError):
        return _FILE_CODES.get(str(error.details.get("errno")), Code.INVALID_ARGUMENT), message_of(error)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, message_of(error)
    return Code.INTERNAL, message_of(error)


_FILE_CODES = {
    "EEXIST": Code.ALREADY_EXISTS,
    "ENOSPC": Code.RESOURCE_EXHAUSTED,
    "EDQUOT": Code.RESOURCE_EXHAUSTED,
}
_CODES: tuple[tuple[type[DsecError], Code], ...] = (
    (FileMissing, Code.NOT_FOUND),
    (NotFound, Code.NOT_FOUND),
    (Unauthenticated, Code.UNAUTHENTICATED),
    (PermissionDenied, Code.PERMISSION_DENIED),
    (TooLarge, Code.RESOURCE_EXHAUSTED),
    (QuotaExceeded, Code.RESOURCE_EXHAUSTED),
    (Unsupported, Code.UNIMPLEMENTED),
    (InvalidRequest, Code.INVALID_ARGUMENT),
    (Unavailable, Code.UNAVAILABLE),
    (AdmissionTimeout, Code.UNAVAILABLE),
    (CreateFailed, Code.UNAVAILABLE),
    (OutcomeUnknown, Code.UNAVAILABLE),
)


async def _answer(x: Exchange, status: int, message: str, error: DsecError) -> None:
    if x.began:
        await x.cut()
        return
    await x.drain()
    headers = headers_of(error)
    if status in _RETRIED:
        headers.append((b"should-retry", b"true" if error.retryable else b"false"))
    await x.answer(status, RestError(status, message, error.code), *headers)

"""The tree of errors.

    DsecError                     code, message, remedy, retryable, infra, http_status
      CallerError                 the request is at fault
        InvalidRequest            invalid_request        400
        Unauthenticated           unauthenticated        401
        PermissionDenied          permission_denied      403
        MethodNotAllowed          method_not_allowed     405
        NotFound                  not_found              404
          SandboxNotFound         sandbox_not_found      404   never existed here, or its record is gone
          EnvironmentNotFound     environment_not_found  404
          FileMissing             file_not_found         404
        FileError                 file_error             409   errno and path: is a directory, exists, not empty, ...
        BuildFailed               build_failed           422   a command of a build failed; details say how
        Conflict                  conflict               409   a key was used for a different request
          RunFenced               run_fenced             409   a later client has taken the run over
        SandboxEnded              sandbox_ended          410   carries its cause
        PortClosed                port_closed            409   nothing listens there inside, or the connection was cut
        BadAnswer                 bad_answer             409   a program inside answered what is not HTTP
        ServiceFailed             service_failed         409   a service of a group ended or wasn't ready in time
        Misdirected               misdirected            421   a sandbox's host name under a domain that isn't ours
        TooLarge                  too_large              413
        Unsupported               unsupported            422   a feature that this server or host doesn't have (yet)
        QuotaExceeded             quota_exceeded         429
      PlatformError (infra)       the platform is at fault
        Internal                  internal               500
        Unavailable               unavailable            503   starting, stopping, unreachable: retry
        AdmissionTimeout          admission_timeout      503   no capacity before the deadline
        OutcomeUnknown            outcome_unknown        502   the guest died under an operation: it may have run
        SandboxLost               sandbox_lost           502   the node or zygote died
        CreateFailed              create_failed          502
        LayerCorrupt              layer_corrupt          502   what a store or registry gave isn't what its digest says
        RequestTimeout            request_timeout        504   request_timeout_s passed on the client

Every code has a page in docs/errors.md. A code never comes from inside a sandbox.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct


class ErrorBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire: the body of every non-2xx answer and the `error` of an item in a batch."""

    code: str
    message: str
    remedy: str = ""
    retryable: bool = False
    infra: bool = False
    details: dict[str, Any] = {}


class DsecError(Exception):
    """Base of all errors that dsec raises on purpose."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    infra: ClassVar[bool] = False
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, remedy: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]" + (f" {self.remedy}" if self.remedy else "")

    def body(self) -> ErrorBody:
        """The error as it travels."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            remedy=self.remedy,
            retryable=self.retryable,
            infra=self.infra,
            details=self.details,
        )


class CallerError(DsecError):
    """The request is at fault; repeating it unchanged fails again."""

    code = "invalid_request"
    http_status = 400


class InvalidRequest(CallerError):
    code = "invalid_request"
    http_status = 400


class Unauthenticated(CallerError):
    code = "unauthenticated"
    http_status = 401


class PermissionDenied(CallerError):
    code = "permission_denied"
    http_status = 403


class MethodNotAllowed(CallerError):
    code = "method_not_allowed"
    http_status = 405


class NotFound(CallerError):
    code = "not_found"
    http_status = 404


class SandboxNotFound(NotFound):
    code = "sandbox_not_found"


class EnvironmentNotFound(NotFound):
    code = "environment_not_found"


class FileMissing(NotFound):
    code = "file_not_found"


class FileError(CallerError):
    code = "file_error"
    http_status = 409


class BuildFailed(CallerError):
    code = "build_failed"
    http_status = 422


class Conflict(CallerError):
    code = "conflict"
    http_status = 409


class RunFenced(Conflict):
    code = "run_fenced"


class SandboxEnded(CallerError):
    code = "sandbox_ended"
    http_status = 410


class PortClosed(CallerError):
    code = "port_closed"
    http_status = 409


class BadAnswer(CallerError):
    code = "bad_answer"
    http_status = 409


class ServiceFailed(CallerError):
    code = "service_failed"
    http_status = 409


class Misdirected(CallerError):
    code = "misdirected"
    http_status = 421


class TooLarge(CallerError):
    code = "too_large"
    http_status = 413


class Unsupported(CallerError):
    code = "unsupported"
    http_status = 422


class QuotaExceeded(CallerError):
    code = "quota_exceeded"
    http_status = 429
    retryable = True


class PlatformError(DsecError):
    """The platform is at fault; the outcome says nothing about the caller's work."""

    infra = True


class Internal(PlatformError):
    code = "internal"
    http_status = 500


class Unavailable(PlatformError):
    code = "unavailable"
    http_status = 503
    retryable = True


class AdmissionTimeout(PlatformError):
    code = "admission_timeout"
    http_status = 503
    retryable = True


class OutcomeUnknown(PlatformError):
    code = "outcome_unknown"
    http_status = 502


class SandboxLost(PlatformError):
    code = "sandbox_lost"
    http_status = 502


class CreateFailed(PlatformError):
    code = "create_failed"
    http_status = 502
    retryable = True


class LayerCorrupt(PlatformError):
    code = "layer_corrupt"
    http_status = 502


class RequestTimeout(PlatformError):
    code = "request_timeout"
    http_status = 504
    retryable = True


def _tree(cls: type[DsecError]) -> list[type[DsecError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


BY_CODE: dict[str, type[DsecError]] = {cls.code: cls for cls in _tree(DsecError)}  # leaves win


def from_body(body: ErrorBody) -> DsecError:
    """The exception for an error that came over the wire; an unknown code becomes the base of its side."""
    cls = BY_CODE.get(body.code) or (Internal if body.infra else CallerError)
    return cls(body.message, remedy=body.remedy, **body.details)

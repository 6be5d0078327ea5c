"""Single function calls by a short way: the request that the SDK sends, read and answered without a task.

As `dsec.api.quick` for commands, with its invariants, but one: a call has no time after which it goes the ordinary way,
because nothing could be attached to there. Who goes away ends it here as there.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from dsec.api.functions import RESULTS, framed, unpacked
from dsec.api.metrics import ServerMetrics
from dsec.api.quick import MAX_REQUEST, Door
from dsec.errors import DsecError
from dsec.ports import FunctionHost, QuickCall
from dsec.spec.functions import FunctionResult

CALLS = b"POST /v1/functions HTTP/1.1\r\n"
_REQUEST = re.compile(
    re.escape(CALLS) + rb"Host: ([!-~]{1,300})\r\n"
    rb"Authorization: Bearer ([!-~]{1,300})\r\n"
    rb"Content-Type: application/msgpack\r\n"
    rb"(?:X-Dsec-Run: ([ -~]{1,1024})\r\n)?"
    rb"X-Request-Id: ([!-~]{1,128})\r\n"
    rb"Content-Length: ([1-9][0-9]{0,4})\r\n"
    rb"\r\n"
)
"""A header that isn't here, comes twice or in another order makes it an ordinary request."""
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: " + RESULTS + b"\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n"


class CallLane:
    """The short way of calls: a `ShortWay`. For the event loop."""

    def __init__(self, functions: FunctionHost, door: Door, metrics: ServerMetrics) -> None:
        self._functions = functions
        self._door = door
        self._metrics = metrics

    def begin(self, request: bytes, answered: Callable[[bytes, bool], None]) -> QuickCall | None:
        """See `ShortWay`."""
        found = _REQUEST.match(request) if len(request) <= MAX_REQUEST else None
        if found is None or found.end() + int(found[5]) != len(request):
            return None
        host, bearer, run, request_id, _ = found.groups()

        def told(result: FunctionResult) -> None:
            self._metrics.requests += 1
            self._metrics.quick += 1
            body = framed(result)
            answered(_HEAD % (request_id, len(body)) + body, True)

        try:
            principal = self._door.admit(host, bearer, run)
            if principal is None or principal.sandbox_id is not None:
                return None
            return self._functions.begin(principal.project, unpacked(request[found.end() :]), told)
        except (DsecError, OSError, msgspec.MsgspecError):
            return None  # the ordinary way says what is the matter

"""Function calls: a function on the server's side, called like one here."""

from __future__ import annotations

import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from dsec.errors import DsecError, InvalidRequest, PlatformError
from dsec.sdk._answers import Answer, cut_errors
from dsec.sdk._transport import Retry, Transport
from dsec.spec.causes import Cause
from dsec.spec.functions import FunctionBatch, FunctionCall, FunctionError, FunctionResult, FunctionSpec
from dsec.wire import packed

_PATH = "/v1/functions"
_PACKED = {"Content-Type": "application/msgpack"}
_BY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*")
_MOST_AT_ONCE = 2000
"""Calls of one request."""
_LENGTH = struct.Struct("<I")


class FunctionFailed(DsecError):
    """A call did not return; `result` says how it ended."""

    code = "function_failed"
    http_status = 400

    def __init__(self, result: FunctionResult) -> None:
        error = result.error
        if error is not None:
            said = f"{error.type}: {error.message}" if error.message else error.type
        else:
            said = result.message or f"exit code {result.exit_code} ({result.cause})"
        trace = error.traceback if error is not None else ""
        super().__init__(f"call {result.index} failed: {said}" + (f"\n{trace}" if trace else ""))
        self.result = result
        self.infra = result.infra  # type: ignore[misc]


class AsyncFunction:
    """A function that is called in fresh, jailed processes on the server's side. Make it with `AsyncClient.function`.

    Calls have no state: what one changes (globals, files, processes) no other sees.
    """

    def __init__(self, transport: Transport, spec: FunctionSpec) -> None:
        """Not for callers: use `AsyncClient.function`."""
        self._transport = transport
        self.spec: FunctionSpec = spec

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; its value. Cancelling it ends the call. Raises `FunctionFailed` with what it raised or how it ended,
        and as `run`."""
        return _value(await self.run(FunctionCall(args=list(args), kwargs=kwargs)))

    async def run(
        self, asked: FunctionCall | None = None, *, stdin: bytes = b"", files: Mapping[str, bytes] | None = None
    ) -> FunctionResult:
        """One call, or for a program one run with `stdin` and `files`; whatever becomes of it is in the result.

        Safe to repeat: a connection that breaks is made again, and the call made again. Raises `InvalidRequest`,
        `EnvironmentNotFound`, `Unsupported` (an import fails, a toolchain is missing)."""
        if asked is None:
            asked = FunctionCall(stdin=stdin, files=dict(files or {}))
        results = _results(self._transport, self.spec, [asked], ordered=False, stop=False)
        found = None
        async with aclosing(results):
            async for result in results:
                found = result  # and on to the answer's end, so that the connection can be used again
        if found is None:
            raise PlatformError("the answer ended without a result")
        return found

    async def map(self, *iterables: Iterable[Any]) -> AsyncIterator[Any]:
        """Call it with an item of each, as the built-in `map` does; yields the values in order, while later calls run.
        Leaving the loop ends them. Raises `FunctionFailed` for the first call that fails, when it is its turn."""
        calls = (FunctionCall(args=list(items)) for items in zip(*iterables, strict=False))
        results = _all(self._transport, self.spec, calls, ordered=True, stop=False)
        async with aclosing(results):
            async for result in results:
                yield _value(result)

    async def run_many(
        self, calls: Iterable[FunctionCall], *, ordered: bool = False, stop: bool = False
    ) -> AsyncIterator[FunctionResult]:
        """Many calls: a result each, as they come or `ordered`. `stop`: begin no more after the first that failed.
        Leaving the loop ends what runs. Raises as `run`."""
        results = _all(self._transport, self.spec, calls, ordered=ordered, stop=stop)
        async with aclosing(results):
            async for result in results:
                yield result


def function_spec(target: Callable[..., Any] | str | FunctionSpec, name: str, fields: dict[str, Any]) -> FunctionSpec:
    """Raises `InvalidRequest`."""
    if isinstance(target, FunctionSpec):
        if name or fields:
            raise InvalidRequest("a FunctionSpec has its name and fields itself")
        return target
    asked = {"environment": "debian", **fields, "name": name}
    if isinstance(target, str):
        if not name and _BY_NAME.fullmatch(target):
            asked["name"] = target
        else:
            asked["source"] = target
    else:
        asked["source"], asked["name"] = _source_of(target)
    try:
        return msgspec.convert(msgspec.to_builtins(asked, builtin_types=(bytes,)), FunctionSpec)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(str(error)) from None


def _source_of(function: Callable[..., Any]) -> tuple[str, str]:
    """The text of a function that is there as text, without its decorators."""
    import ast  # noqa: PLC0415 (`import dsec` is light)
    import inspect  # noqa: PLC0415
    import textwrap  # noqa: PLC0415

    try:
        text = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise InvalidRequest(
            f"the source of {function!r} isn't to be had: {error}", remedy="Pass the source as text."
        ) from None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise InvalidRequest("a function by its source begins with `def`", remedy="Pass the source as text.")
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 :]), node.name


def _value(result: FunctionResult) -> Any:
    if not result.ok:
        raise FunctionFailed(result)
    return result.value


def _plain(value: Any) -> Any:
    """Arrays and their numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an argument of type {type(value).__name__} can't be passed")


async def _all(
    transport: Transport, spec: FunctionSpec, calls: Iterable[FunctionCall], *, ordered: bool, stop: bool
) -> AsyncGenerator[FunctionResult]:
    items = iter(calls)
    first = 0
    failed = False
    while (part := list(islice(items, _MOST_AT_ONCE))) and not (stop and failed):
        results = _results(transport, spec, part, ordered=ordered, stop=stop)
        async with aclosing(results):
            async for result in results:
                failed |= not result.ok
                yield replace(result, index=first + result.index)
        first += len(part)


async def _results(
    transport: Transport, spec: FunctionSpec, calls: Sequence[FunctionCall], *, ordered: bool, stop: bool
) -> AsyncGenerator[FunctionResult]:
    """The results of one request; what a cut answer left out is asked for again."""
    left = list(range(len(calls)))
    retry = Retry(transport)
    while left:
        batch = FunctionBatch(function=spec, calls=[calls[index] for index in left], ordered=ordered, stop=stop)
        try:
            body = msgspec.msgpack.encode(batch, enc_hook=_plain)
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the arguments: {error}", field="args") from None
        answer = await transport.send("POST", transport.url(_PATH), body=body, headers=_PACKED, retry=retry)
        told: set[int] = set()
        try:
            async for data in _frames(answer):
                result = _decoded(data)
                told.add(left[result.index])
                retry = Retry(transport)
                yield replace(result, index=left[result.index])
        except cut_errors() as error:
            left = [index for index in left if index not in told]
            await retry.wait(error)
        else:
            return
        finally:
            answer.close()


async def _frames(answer: Answer) -> AsyncIterator[bytes]:
    """What each frame holds. Raises ConnectionError where the answer ends within one."""
    data = bytearray()
    while part := await answer.read_some():
        data += part
        at = 0
        while len(data) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            yield bytes(data[at + _LENGTH.size : end])
            at = end
        del data[:at]
    if data:
        raise ConnectionResetError("the answer was cut")


class _Unread(FunctionResult, frozen=True, kw_only=True, omit_defaults=True):
    value: msgspec.Raw = msgspec.Raw(b"\xc0")


def _decoded(data: bytes) -> FunctionResult:
    """The value is the function's word: where it is no value, that is the function's fault, not the server's."""
    try:
        packed.check(data)
        return msgspec.msgpack.decode(data, type=FunctionResult)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        unread = msgspec.msgpack.decode(data, type=_Unread)
        error = FunctionError(type="ResultRefused", message="what came as the value is none")
        return FunctionResult(index=unread.index, error=error, cause=Cause.EXITED)

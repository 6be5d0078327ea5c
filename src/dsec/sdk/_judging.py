"""Judging: one submission against its cases, its verdicts as they come, and many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Struct

from dsec.errors import DsecError, InvalidRequest
from dsec.sdk._answers import cut_errors, decoded
from dsec.sdk._transport import Retry, Transport, timed_out
from dsec.spec.judging import Case, CaseVerdict, Judged, JudgeLine, JudgeSpec, JudgeVerdict

_JSON = {"Content-Type": "application/json"}
_ENCODER = msgspec.json.Encoder()

OnCase = Callable[[CaseVerdict], None]
"""Told each case's verdict, once, as it comes."""
Cases = Iterable[Case | tuple[str, str]]
"""Pairs are stdin and what is expected."""


class JudgeResult(Struct, frozen=True):
    """One submission of many."""

    index: int
    judged: Judged | None = None
    error: DsecError | None = None

    def unwrap(self) -> Judged:
        """The verdicts. Raises the error."""
        if self.judged is None:
            raise self.error or DsecError("there is no verdict")
        return self.judged


def judge_spec(source: str | JudgeSpec, cases: Cases, fields: dict[str, Any]) -> JudgeSpec:
    """The request. Raises `InvalidRequest`."""
    if isinstance(source, JudgeSpec):
        if cases or fields:
            raise InvalidRequest("a JudgeSpec has its cases and fields itself")
        return source
    given = [each if isinstance(each, Case) else Case(stdin=each[0], expected=each[1]) for each in cases]
    asked = {"environment": "debian", "language": "python", **fields, "source": source, "cases": given}
    try:
        return msgspec.convert(msgspec.to_builtins(asked), JudgeSpec)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(str(error)) from None


async def judge(transport: Transport, spec: JudgeSpec, on_case: OnCase | None, timeout_s: float | None) -> Judged:
    """See `AsyncClient.judge`."""
    try:
        async with asyncio.timeout(timeout_s):
            found: dict[int, CaseVerdict] = {}
            lines = judge_lines(transport, spec)
            async with aclosing(lines):
                async for line in lines:
                    if isinstance(line, JudgeVerdict):
                        return _judged(line, found)
                    if line.index not in found and on_case is not None:
                        on_case(line)
                    found[line.index] = line
    except TimeoutError:
        raise timed_out(timeout_s or 0.0) from None
    raise AssertionError("the verdicts ended without a result")


async def judge_lines(transport: Transport, spec: JudgeSpec) -> AsyncGenerator[CaseVerdict | JudgeVerdict]:
    """Verdicts as they come, the submission's last. A cut answer is asked for again, each case told once."""
    try:
        body = _ENCODER.encode(spec)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"source and cases are Unicode text: {error}") from None
    told: set[int] = set()
    retry = Retry(transport)
    while True:
        response = await transport.open("POST", transport.url("/v1/judge"), body=body, headers=_JSON, retry=retry)
        cut: BaseException = ConnectionResetError("the answer was cut")
        try:
            while True:
                data = await response.content.readline()
                if not data.endswith(b"\n"):
                    break
                line = decoded(data, JudgeLine)
                if line.result is not None:
                    await response.content.read()  # to the end, so that the connection serves again
                    yield line.result
                    return
                if line.case is not None and line.case.index not in told:
                    told.add(line.case.index)
                    yield line.case
        except cut_errors() as error:
            cut = error
        finally:
            response.close()
        await retry.wait(cut)


async def judge_many(transport: Transport, specs: Iterable[JudgeSpec], at_once: int) -> AsyncGenerator[JudgeResult]:
    """See `AsyncClient.judge_many`."""
    waiting = enumerate(specs)
    running: set[asyncio.Task[JudgeResult]] = set()

    async def one(index: int, spec: JudgeSpec) -> JudgeResult:
        try:
            return JudgeResult(index, await judge(transport, spec, None, None))
        except DsecError as error:
            return JudgeResult(index, error=error)

    try:
        more = True
        while more or running:
            while more and len(running) < at_once:
                item = next(waiting, None)
                if item is None:
                    more = False
                else:
                    running.add(asyncio.ensure_future(one(*item)))
            if running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _judged(result: JudgeVerdict, found: dict[int, CaseVerdict]) -> Judged:
    return Judged(
        verdict=result.verdict,
        infra=result.infra,
        passed=result.passed,
        total=result.cases,
        compiled=result.compiled,
        cases=[found[index] for index in sorted(found)],
    )

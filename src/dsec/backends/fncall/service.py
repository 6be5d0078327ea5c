"""Function calls: batches of them, spread over lanes, fair between projects and between the batches of one.

Invariants: closing a stream of results ends what still runs of it at once; a result is the worker's word about itself,
and is taken for nothing more: its form and size are checked here, its value is passed on without being built.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import marshal
import struct
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec
from msgspec import Struct

from dsec.backends.fncall.at_once import CallAtOnce
from dsec.backends.fncall.calling import calling
from dsec.backends.fncall.pool import Jails, Key
from dsec.backends.fncall.programs import CellRunner
from dsec.backends.fncall.run import Ended, Run
from dsec.errors import CallerError, CreateFailed, DsecError, InvalidRequest, PlatformError, Unsupported
from dsec.grading.programs import Programs, compile_job
from dsec.grading.running import Job, check_files
from dsec.grading.slots import Slots
from dsec.grading.tools import TOOLS
from dsec.plan.turns import Path
from dsec.spec.causes import Cause
from dsec.spec.functions import (
    FunctionBatch,
    FunctionCall,
    FunctionError,
    FunctionLimits,
    FunctionResult,
    FunctionSpec,
)
from dsec.spec.judging import JudgeLimits, Language
from dsec.spec.sandbox import MIB

_SAID = {
    Cause.COMMAND_TIMEOUT: "it ran into its limit of time",
    Cause.MEMORY_LIMIT: "it ran into its limit of memory",
    Cause.OUTPUT_LIMIT: "it wrote more than output_bytes",
    Cause.KILLED: "it closed its result channel and went on",
}
"""What a cause means for a call."""
_WORTH_COMPILING = 8
"""Calls in a batch; or the second batch of the same source."""
_CODES = 256
_ATTEMPTS = 2
"""Of a call that never began, because its jail was gone."""


class _Answer(Struct, frozen=True):
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: FunctionError | None = None
    files: dict[str, bytes] = {}


_DECODER = msgspec.msgpack.Decoder(_Answer)
_MOST_UNTOLD = 32 * MIB
"""Of the results of one request that were not taken yet."""
_LEAST_WEIGHT = 1024


class FunctionService:
    """Function calls of one node: `ports.FunctionHost`."""

    def __init__(self, jails: Jails, *, slots: Slots | None = None) -> None:
        """`slots`: places for calls, where others share them."""
        self._jails = jails
        self._slots = slots or Slots()
        self._runner = CellRunner(jails)
        self._programs = Programs()
        self._codes: OrderedDict[tuple[Key, str, str], bytes] = OrderedDict()

    async def stream(self, project: str, batch: FunctionBatch, at_once: int = 0) -> AsyncIterator[FunctionResult]:
        """See `ports.FunctionHost`."""
        check(batch)
        caller = self._slots.caller(project)
        one = await self._prepared(caller, project, batch.function, len(batch.calls))
        results: asyncio.Queue[FunctionResult | DsecError] = asyncio.Queue()
        untold = _Untold()
        indices = iter(range(len(batch.calls)))
        stopped = False

        async def work() -> None:
            nonlocal stopped
            for index in indices:
                await untold.few()
                if stopped:
                    return
                try:
                    async with self._slots.turn(caller):
                        result = await one(index, batch.calls[index])
                except CallerError as error:
                    results.put_nowait(error)
                    return
                stopped |= batch.stop and not result.ok
                untold.add(result)
                results.put_nowait(result)

        def ended(worker: asyncio.Task[None]) -> None:
            if worker.cancelled() or worker.exception() or all(each.done() for each in workers):
                results.put_nowait(_END)

        width = min(self._slots.places, len(batch.calls), at_once or len(batch.calls))
        workers = [asyncio.create_task(work()) for _ in range(width)]
        for worker in workers:
            worker.add_done_callback(ended)
        try:
            ordered = cast("AsyncGenerator[FunctionResult]", _told(results, ordered=batch.ordered))
            async with aclosing(ordered):
                async for result in ordered:
                    yield result
                    untold.remove(result)
            for worker in workers:
                if worker.done():
                    worker.result()  # raises what nobody foresaw
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def begin(self, project: str, batch: FunctionBatch, told: Callable[[FunctionResult], None]) -> CallAtOnce | None:
        """See `ports.FunctionHost`."""
        spec = batch.function
        if spec.language is not Language.PYTHON or len(batch.calls) != 1:
            return None
        check(batch)
        key = self._jails.key(project, spec.environment, spec.imports)
        code = self._codes.get((key, spec.name, spec.source), b"")
        if spec.source and not code:
            return None
        payload = _payload(_base(spec, code), spec, batch.calls[0])
        caller = self._slots.caller(project)

        def done(future: asyncio.Future[Ended]) -> None:
            error = future.exception()
            told(_failed(0, error) if isinstance(error, DsecError) else _result(0, spec, future.result()))

        with contextlib.ExitStack() as held:
            jail = self._jails.use_ready(key)
            if jail is None:
                return None
            held.callback(self._jails.left, jail)
            if not self._slots.take_free(caller):
                return None
            held.callback(self._slots.free, caller)
            lane = jail.take_ready()
            if lane is None:
                return None
            held.callback(jail.give, lane)
            run = Run(lane, payload, spec.limits, answers=bool(spec.name))
            held.callback(run.stop)
            return CallAtOnce(run, done, held.pop_all())

    async def call(self, project: str, spec: FunctionSpec, call: FunctionCall) -> FunctionResult:
        """One call, as `stream`."""
        results = cast(
            "AsyncGenerator[FunctionResult]", self.stream(project, FunctionBatch(function=spec, calls=[call]))
        )
        async with aclosing(results):
            return await anext(results)

    # --- kinds of functions ---

    async def _prepared(self, caller: Path, project: str, spec: FunctionSpec, count: int) -> Callable[..., Any]:
        """What runs one call of it."""
        if spec.language is Language.PYTHON:
            key = self._jails.key(project, spec.environment, spec.imports)
            self._jails.left(await self._jails.use(key))  # so that what is wrong with it is told at once
            base = _base(spec, await self._code(caller, key, spec, count))

            async def warm(index: int, call: FunctionCall) -> FunctionResult:
                return await self._warm(index, key, spec, _payload(base, spec, call))

            return warm
        program = await self._program(caller, project, spec)
        if isinstance(program, FunctionResult):
            failed = program

            async def refused(index: int, call: FunctionCall) -> FunctionResult:
                return msgspec.structs.replace(failed, index=index)

            return refused
        source = {TOOLS[spec.language].made: spec.source.encode() if program is None else program}

        async def cold(index: int, call: FunctionCall) -> FunctionResult:
            return await self._cold(index, project, spec, source, call)

        return cold

    async def _warm(self, index: int, key: Key, spec: FunctionSpec, payload: bytes) -> FunctionResult:
        for attempt in itertools.count(1):
            try:
                return _result(index, spec, await self._ended(key, spec.limits, payload, answers=bool(spec.name)))
            except CallerError:
                raise
            except DsecError as error:
                if attempt == _ATTEMPTS or not isinstance(error, CreateFailed):
                    return _failed(index, error)
        raise AssertionError

    async def _ended(self, key: Key, limits: FunctionLimits, payload: bytes, *, answers: bool) -> Ended:
        async with calling(self._jails, key, payload, limits, answers=answers) as call:
            return await call.run.done

    async def _code(self, caller: Path, key: Key, spec: FunctionSpec, count: int) -> bytes:
        """The source compiled, for workers to begin with; b"" where that isn't worth a call, or fails. Made by a worker
        that runs none of it, so that no call has a hand in another's code."""
        name = (key, spec.name, spec.source)
        known = self._codes.get(name)
        if not spec.source or known:
            return known or b""
        code = b""
        if known is not None or count >= _WORTH_COMPILING:
            base = {"source": spec.source, "name": spec.name, "limit": 16 * MIB, "compile": True, "code": b""}
            with contextlib.suppress(msgspec.MsgspecError, PlatformError):
                async with self._slots.turn(caller):
                    ended = await self._ended(key, FunctionLimits(), _framed(base), answers=True)
                if ended.answer is not None:
                    code = msgspec.msgpack.decode(_DECODER.decode(ended.answer).value, type=bytes | None) or b""
        self._codes[name] = code
        if len(self._codes) > _CODES:
            self._codes.popitem(last=False)
        return code

    async def _cold(
        self, index: int, project: str, spec: FunctionSpec, source: dict[bytes, bytes], call: FunctionCall
    ) -> FunctionResult:
        given = {name.encode(): content for name, content in (spec.files | call.files).items()}
        job = Job(
            project=project,
            environment=spec.environment,
            argv=TOOLS[spec.language].run,
            files=given | source,
            stdin=call.stdin,
            limits=_judge_limits(spec),
            fetch=tuple(name.encode() for name in spec.take),
            fetch_bytes=spec.limits.result_bytes,
        )
        try:
            ran = await self._runner.run(job, spec.env)
        except CallerError:
            raise
        except DsecError as error:
            return _failed(index, error)
        if ran.missing and not TOOLS[spec.language].compile:
            raise _no_toolchain(spec)
        status = ran.status
        return FunctionResult(
            index=index,
            ok=status.cause is Cause.EXITED and status.exit_code == 0,
            cause=status.cause,
            message=status.message,
            exit_code=status.exit_code,
            stdout=ran.stdout,
            stderr=ran.stderr,
            truncated=status.truncated,
            files={name.decode(): content for name, content in ran.fetched.items()},
            cpu_s=status.cpu_s,
            wall_s=status.wall_s,
            memory_bytes=status.max_rss_bytes,
        )

    async def _program(self, caller: Path, project: str, spec: FunctionSpec) -> bytes | FunctionResult | None:
        """What the compiler made, None for a language without one, or what is wrong with the source."""
        tool = TOOLS[spec.language]
        if not tool.compile:
            return None
        source, files = spec.source.encode(), {tool.source: spec.source.encode()}
        job = compile_job(project, spec.environment, spec.language, files, spec.limits.compile_s)

        async def make() -> Any:
            async with self._slots.turn(caller):
                return await self._runner.run(job)

        jail = self._jails.key(project, spec.environment, None)
        key = self._programs.key((jail.layers, dict(jail.env)), spec.language, source, {})
        built = await self._programs.get(key, make)
        if tool.lacking(built.ran.status):
            raise _no_toolchain(spec)
        if built.program is not None:
            return built.program
        said = built.ran.stderr[-65536:].decode(errors="replace")
        return FunctionResult(
            index=-1,
            error=FunctionError(type="CompileError", message=said),
            cause=built.ran.status.cause,
            exit_code=built.ran.status.exit_code or 1,
            message="compiling it failed",
        )


class _Untold:
    """How much of results is here that their caller hasn't taken. No call begins while it is too much; those that run
    get to their end, so that the one whose turn it is to be told always comes."""

    def __init__(self) -> None:
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    async def few(self) -> None:
        """Wait until it isn't too much."""
        await self._room.wait()

    def add(self, result: FunctionResult) -> None:
        """It has come."""
        self._change(_weight(result))

    def remove(self, result: FunctionResult) -> None:
        """It was taken."""
        self._change(-_weight(result))

    def _change(self, by: int) -> None:
        self._bytes += by
        (self._room.set if self._bytes < _MOST_UNTOLD else self._room.clear)()


def _weight(result: FunctionResult) -> int:
    value = len(bytes(result.value)) if isinstance(result.value, msgspec.Raw) else 0
    return _LEAST_WEIGHT + value + len(result.stdout) + len(result.stderr) + sum(map(len, result.files.values()))


_END = DsecError("")


async def _told(results: asyncio.Queue[FunctionResult | DsecError], *, ordered: bool) -> AsyncIterator[FunctionResult]:
    waiting: dict[int, FunctionResult] = {}
    following = 0
    while (result := await results.get()) is not _END:
        if isinstance(result, DsecError):
            raise result
        if not ordered:
            yield result
            continue
        waiting[result.index] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1
    for index in sorted(waiting):
        yield waiting[index]


def check(batch: FunctionBatch) -> None:
    """Raise `InvalidRequest` for what can't be meant."""
    spec = batch.function
    if spec.language is not Language.PYTHON:
        for field in ("name", "imports"):
            if getattr(spec, field):
                raise InvalidRequest(f"`{field}` goes with Python only", field=field)
    if not spec.name and not spec.source:
        raise InvalidRequest("a function is a `source`, a `name` in it, or a `module:name`", field="source")
    if spec.name and bool(spec.source) == (":" in spec.name):
        raise InvalidRequest("a name in `source` is plain, without a source it is `module:name`", field="name")
    if "\0" in spec.source:
        raise InvalidRequest("the source holds a NUL", field="source")
    for name in itertools.chain(spec.files, spec.take, *(call.files for call in batch.calls)):
        parts = name.split("/")
        if not name or name.startswith("/") or ".." in parts or "" in parts or "\0" in name or len(name) > 1000:
            raise InvalidRequest(f"{name!r} is not a relative path below the working directory", field="files")
    tool = TOOLS[spec.language]
    own = [] if spec.language is Language.PYTHON else [f"/tmp/{tool.name}".encode(), tool.made]
    for files in (spec.files, *(call.files for call in batch.calls)):
        if files:
            check_files([*own, *(f"/tmp/{name}".encode() for name in {**spec.files, **files})])
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequest(f"{name!r} can't be a variable", field="env")
    if not spec.name:
        for call in batch.calls:
            if call.args or call.kwargs:
                raise InvalidRequest("a program takes stdin and files, not arguments", field="args")


def _base(spec: FunctionSpec, code: bytes) -> dict[str, Any]:
    return {
        "source": spec.source,
        "name": spec.name,
        "take": spec.take,
        "env": spec.env,
        "limit": spec.limits.result_bytes,
        "compile": False,
        "code": code,
    }


def _payload(base: dict[str, Any], spec: FunctionSpec, call: FunctionCall) -> bytes:
    own = {"args": call.args, "kwargs": call.kwargs, "stdin": call.stdin, "files": {**spec.files, **call.files}}
    try:
        return _framed(base | own)
    except ValueError:
        raise InvalidRequest("an argument is of no type that can be passed", field="args") from None


def _framed(call: dict[str, Any]) -> bytes:
    body = marshal.dumps(call, 2)
    return struct.pack("<I", len(body)) + body


def _judge_limits(spec: FunctionSpec) -> JudgeLimits:
    limits = spec.limits
    return JudgeLimits(
        cpu_s=limits.cpu_s,
        wall_s=limits.wall_s,
        memory_bytes=limits.memory_bytes,
        output_bytes=limits.output_bytes,
        pids=max(4, limits.pids),
    )


def _no_toolchain(spec: FunctionSpec) -> Unsupported:
    return Unsupported(
        f"the environment {spec.environment} has no {TOOLS[spec.language].toolchain}",
        remedy="Use one with the toolchain.",
        field="language",
    )


def _failed(index: int, error: DsecError) -> FunctionResult:
    cause = Cause.CREATE_FAILED if isinstance(error, CreateFailed) else Cause.OUTCOME_UNKNOWN
    return FunctionResult(index=index, cause=cause, infra=True, message=str(error)[:4096])


def _result(index: int, spec: FunctionSpec, ended: Ended) -> FunctionResult:
    value: Any = None
    error: FunctionError | None = None
    files: dict[str, bytes] = {}
    message = _SAID.get(ended.cause, "")
    ok = ended.cause is Cause.EXITED and not ended.exit_code
    if ended.too_large:
        error = FunctionError(type="ResultRefused", message=f"an answer of more than {spec.limits.result_bytes} bytes")
    elif ended.answer is not None:
        try:
            answer = _DECODER.decode(ended.answer)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError):
            error = FunctionError(type="ResultRefused", message="what came over the result channel is no answer")
        else:
            value, error = answer.value, answer.error
            files = {name: answer.files[name] for name in spec.take if name in answer.files}
    elif spec.name and ended.cause in (Cause.EXITED, Cause.SIGNALED):
        how = f"signal {ended.signal}" if ended.signal else f"exit code {ended.exit_code}"
        error = FunctionError(type="NoResult", message=f"it ended without a result, with {how}")
    if error is not None or (spec.name and ended.answer is None):
        ok = False
    return FunctionResult(
        index=index,
        ok=ok,
        value=value if ok else None,
        error=error,
        cause=ended.cause,
        message=message,
        exit_code=ended.exit_code,
        stdout=ended.stdout,
        stderr=ended.stderr,
        truncated=ended.truncated,
        files=files,
        cpu_s=ended.cpu_s,
        wall_s=ended.wall_s,
        memory_bytes=ended.memory_bytes,
    )

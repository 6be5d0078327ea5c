"""Many sandboxes by one request: commands in them, pausing and resuming them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.errors import DsecError, ErrorBody, InvalidRequest, Unavailable, from_body
from dsec.sdk._commands import argv_of
from dsec.sdk._lines import Line, lines
from dsec.sdk._results import RunResult, make_result
from dsec.sdk._transport import Transport
from dsec.spec.sandbox import ExecSpec, SandboxInfo

if TYPE_CHECKING:
    from dsec.sdk._sandbox import AsyncSandbox

_MAX_ITEMS = 4096
_ENCODER = msgspec.json.Encoder()


class _Item(Struct, frozen=True, omit_defaults=True):
    sandbox: str
    spec: ExecSpec
    index: int
    release: list[str] = []


class _Asked(Struct, frozen=True):
    """One command, and whose it is."""

    sandbox: AsyncSandbox
    spec: ExecSpec
    own_key: bool


async def run_many(
    transport: Transport,
    commands: Iterable[tuple[AsyncSandbox, str | Sequence[str] | ExecSpec]],
    request_timeout_s: float | None,
) -> AsyncIterator[RunResult]:
    """See `AsyncClient.run_many`."""
    asked = [_asked(transport, sandbox, command) for sandbox, command in commands]
    for first in range(0, len(asked), _MAX_ITEMS):
        part = asked[first : first + _MAX_ITEMS]
        done = [each.sandbox.commands.take_done() for each in part]

        def body(missing: set[int], part: list[_Asked] = part, done: list[list[str]] = done) -> bytes:
            return _encoded([_Item(part[n].sandbox.id, part[n].spec, n, done[n]) for n in sorted(missing)])

        async for line in lines(transport, transport.url("/v1/exec:batch"), body, len(part), request_timeout_s):
            yield await _result(part[line.index], line, first + line.index)


class _Moved(Struct, frozen=True):
    id: str
    error: ErrorBody | None = None


class _Results(Struct, frozen=True):
    results: list[_Moved]


def chosen(
    sandboxes: Iterable[str | AsyncSandbox | SandboxInfo], run: str | None, labels: Mapping[str, str] | None
) -> dict[str, object]:
    """Which sandboxes: those given, unless `run` or `labels` are."""
    if run is None and labels is None:
        return {"ids": [each if isinstance(each, str) else each.id for each in sandboxes]}
    asked: dict[str, object] = {} if run is None else {"run": run}
    return asked if labels is None else {**asked, "labels": dict(labels)}


async def move_many(
    transport: Transport, verb: str, asked: dict[str, object], request_timeout_s: float | None
) -> dict[str, DsecError | None]:
    """See `AsyncClient.pause_many`; `verb`: `pause` or `resume`."""
    answer = await transport.call(
        "POST",
        transport.url(f"/v1/sandboxes:{verb}"),
        _Results,
        body=_ENCODER.encode(asked),
        headers={"Content-Type": "application/json"},
        request_timeout_s=request_timeout_s,
    )
    return {each.id: None if each.error is None else from_body(each.error) for each in answer.results}


async def _result(asked: _Asked, line: Line, index: int) -> RunResult:
    commands, key = asked.sandbox.commands, asked.spec.key or ""
    try:
        if line.error is not None:
            raise from_body(line.error)
        if line.attach:
            result = await (await commands.attach(key)).wait()
        elif line.status is not None:
            result = make_result(line.status, line.stdout, line.stderr, key)
        else:
            raise Unavailable("the answer is not that of a dsec server of this version", remedy="check `dsec version`")
        if not asked.own_key:
            await commands.finished(key)
    except DsecError as error:
        return RunResult(index, error=error)
    return RunResult(index, result)


def _asked(transport: Transport, sandbox: AsyncSandbox, command: str | Sequence[str] | ExecSpec) -> _Asked:
    spec = command if isinstance(command, ExecSpec) else ExecSpec(argv=argv_of(command))
    own_key = spec.key is not None
    return _Asked(sandbox, spec if own_key else replace(spec, key=transport.new_key()), own_key)


def _encoded(items: list[_Item]) -> bytes:
    try:
        return _ENCODER.encode({"items": items})
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequest(
            f"argv, env and cwd are Unicode text here: {error}", remedy="write other bytes to a file and name that"
        ) from None

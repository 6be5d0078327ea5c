"""SandboxFusion's HTTP calls, for its clients (verl's reward function, the package `sandbox-fusion`) as they are:
docs/SANDBOXFUSION.md.

Served at the root and, for an environment of the caller's choice, below `/sandboxfusion/{environment}`. Invariants:
what failed by the platform's doing is 504, which verl's client repeats, and never a result; nothing of a request goes
on when its client has gone.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import unquote

import msgspec

from dsec.api.exchange import MAX_BATCH_BYTES, Exchange, headers_of
from dsec.api.sandboxfusion import judging
from dsec.api.sandboxfusion.config import FusionConfig
from dsec.api.sandboxfusion.running import Program, Runs
from dsec.api.sandboxfusion.wire import Detail, PromptRequest, PromptsRequest, RunCodeRequest, SubmitRequest
from dsec.api.waiting import while_awaited
from dsec.edge.client import EdgeClient, Principal
from dsec.edge.context import CHARGED_TO
from dsec.errors import DsecError, InvalidRequest, NotFound, Unauthenticated, Unsupported
from dsec.grading.judge import Judge

__all__ = ["Fusion", "FusionConfig"]

PREFIX = "/sandboxfusion/"
PING = "/v1/ping"
GATEWAY_TIMEOUT = 504
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
"""What a proxy adds: who asks is not who the connection comes from."""
T = TypeVar("T")


class _Refused(Unsupported):
    http_status = 501


class Fusion:
    """The calls."""

    def __init__(self, edge: EdgeClient, judge: Judge, config: FusionConfig | None = None) -> None:
        self._edge = edge
        self._judge = judge
        self._config = config or FusionConfig()
        self._runs = Runs(judge, self._config)
        self._calls: dict[str, tuple[str, Callable[[Exchange, str], Awaitable[object]]]] = {
            "run_code": ("POST", self._run_code),
            "run_jupyter": ("POST", self._run_jupyter),
            "submit": ("POST", self._submit),
            "list_datasets": ("GET", self._list_datasets),
            "list_ids": ("POST", self._list_ids),
            "get_prompts": ("POST", self._get_prompts),
            "get_prompt_by_id": ("POST", self._get_prompt_by_id),
            "get_metrics": ("POST", self._get_metrics),
            "get_metrics_function": ("POST", self._get_metrics_function),
        }

    def claims(self, raw: str) -> bool:
        """Whether a path is one of these."""
        return raw.startswith(PREFIX) or raw[1:] in self._calls or raw == PING

    async def __call__(self, x: Exchange, raw: str) -> None:
        """Answer one request."""
        try:
            environment, name = "", raw[1:]
            if raw.startswith(PREFIX):
                quoted, _, name = raw[len(PREFIX) :].partition("/")
                environment = unquote(quoted)
            if raw == PING or name == "v1/ping":
                x.only("GET")
                await x.answer(200, "pong")
                return
            if name not in self._calls:
                raise NotFound(f"no such path: {raw}", remedy="docs/SANDBOXFUSION.md lists them")
            method, handler = self._calls[name]
            x.principal = self._caller(x)
            x.project()
            CHARGED_TO.set("")  # as in `api/grading.py`
            x.only(method)
            x.check_query()
            await x.answer(200, await handler(x, environment))
        except DsecError as error:
            await self.fail(x, raw, error)

    @staticmethod
    async def fail(x: Exchange, raw: str, error: DsecError) -> None:
        """An error in the form that FastAPI has."""
        if x.began:
            await x.cut()
            return
        await x.drain()
        status = GATEWAY_TIMEOUT if error.infra else error.http_status
        body = Detail(detail=str(error), code=error.code, infra=error.infra, retryable=error.infra or error.retryable)
        await x.answer(status, body, *headers_of(error))

    def _caller(self, x: Exchange) -> Principal:
        """By key: as bearer token, as password of a URL (`http://dsec:KEY@host`), as X-API-Key; without one, where the
        operator allows it."""
        key = x.bearer() or _password(x.authorization)
        key = key or next((value for name, value in x.scope["headers"] if name == b"x-api-key"), b"").decode("latin-1")
        if key or x.authorization:
            return self._edge.authenticate(key)
        client = x.scope.get("client")
        # A page in a browser on this machine can send other types here without asking, as it can't JSON.
        foreign = x.scope["method"] == "POST" and x.content_type != b"application/json"
        forwarded = any(name in _FORWARDED for name, _ in x.scope["headers"])
        host = x.host.decode("latin-1")
        project = self._config.keyless(client[0], host, forwarded=forwarded) if client and not foreign else None
        if project is None:
            raise Unauthenticated(
                "the request carries no API key",
                remedy="Put it into the URL: http://dsec:KEY@HOST:PORT/run_code; or see docs/SANDBOXFUSION.md.",
            )
        return Principal(project=project)

    # --- running ---

    async def _run_code(self, x: Exchange, environment: str) -> object:
        program = Program(await _decoded(x, RunCodeRequest))
        project = x.project()
        environment = environment or self._config.environment_for(program.request.language)
        caller = self._judge.caller(project)
        return await while_awaited(x, self._runs.run(caller, project, environment, program))

    async def _run_jupyter(self, x: Exchange, environment: str) -> object:
        await x.body(MAX_BATCH_BYTES)
        raise _Refused("notebooks are not served here", remedy="Send the cells as one program to /run_code.")

    # --- problems ---

    async def _submit(self, x: Exchange, environment: str) -> object:
        request = await _decoded(x, SubmitRequest)
        project = x.project()
        environment = environment or self._config.environment_for(request.config.language or "")
        caller = self._judge.caller(project)
        at_once = x.owner().at_once
        return await while_awaited(x, judging.submit(self._runs, caller, project, environment, request, at_once))

    async def _list_datasets(self, x: Exchange, environment: str) -> object:
        return judging.DATASETS

    async def _list_ids(self, x: Exchange, environment: str) -> object:
        return [each.id for each in judging.prompts(await _decoded(x, PromptsRequest))]

    async def _get_prompts(self, x: Exchange, environment: str) -> object:
        return judging.prompts(await _decoded(x, PromptsRequest))

    async def _get_prompt_by_id(self, x: Exchange, environment: str) -> object:
        return judging.prompt(await _decoded(x, PromptRequest))

    async def _get_metrics(self, x: Exchange, environment: str) -> object:
        await self._checked(x)
        return {}

    async def _get_metrics_function(self, x: Exchange, environment: str) -> object:
        await self._checked(x)
        return {"function": None}

    @staticmethod
    async def _checked(x: Exchange) -> None:
        request = await _decoded(x, PromptsRequest)
        judging.check(request.dataset, request.config)


async def _decoded(x: Exchange, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await x.body(MAX_BATCH_BYTES), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Unprocessable(str(error)) from None


class _Unprocessable(InvalidRequest):
    """What FastAPI says to a body that isn't of the type."""

    http_status = 422


def _password(authorization: bytes) -> str:
    kind, _, value = authorization.partition(b" ")
    if kind.lower() != b"basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode("latin-1").partition(":")[2]
    except binascii.Error:
        return ""

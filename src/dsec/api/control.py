"""The control routes: what is seldom asked of a sandbox, environments, node, keys. Litestar over the msgspec types,
which also give the OpenAPI document.

Callers are authenticated by `dsec.api.app` before a request gets here; the `Exchange` is in the scope.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import msgspec
from litestar import Litestar, Request, Response, delete, get, patch, post, put
from litestar.exceptions import HTTPException, NotFoundException, ValidationException
from litestar.openapi import OpenAPIConfig
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.routes import HTTPRoute
from litestar.types import Scope
from msgspec import Struct

from dsec.api import machines
from dsec.api.exchange import MAX_JSON_BYTES, RETRY_AFTER_S, Exchange, passes
from dsec.api.ports.hosts import domain_here
from dsec.edge.client import ApiKey, EdgeClient, NodeInfo, Page
from dsec.edge.kept import BatchItem
from dsec.errors import DsecError, ErrorBody, InvalidRequest, NotFound
from dsec.ports import Usage
from dsec.spec.network import KeyPolicy, Network, NetworkInfo
from dsec.spec.runs import RunInfo, RunRequest
from dsec.spec.sandbox import PortAccess, SandboxInfo, Seconds, State
from dsec.spec.tripwires import TripwireState

EXCHANGE = "dsec.exchange"
DeadlineS = Annotated[
    float | None, QueryParameter(gt=0, le=86400, description="wait so long for capacity and creation")
]


class EnvironmentInfo(Struct, frozen=True):
    """An environment that sandboxes can be made of."""

    name: str
    layers: list[str]
    """Top first."""


class Environments(Struct, frozen=True):
    """Answer to `GET /v1/environments`."""

    environments: list[EnvironmentInfo]


class RenewRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a renewal."""

    ttl_s: Seconds | None
    """From now; null: never."""


class RunRenewal(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a renewal of a run's lease."""

    name: str
    epoch: int


class RunList(Struct, frozen=True):
    """Answer to `GET /v1/runs`."""

    runs: list[RunInfo]


class ForkRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of a fork."""

    count: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1


class ForkResults(Struct, frozen=True):
    """Answer to it: a sandbox or an error each."""

    results: list[BatchItem]


class NetworkRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a change of network."""

    network: Network


class KeyRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/keys`: a further key of the caller's project."""

    label: str = ""
    policy: KeyPolicy | None = None
    """What it may grant; at most what the caller's own may. Null: the same."""


class NewKey(Struct, frozen=True):
    """The only time that the key is seen."""

    project: str
    key: str


class Keys(Struct, frozen=True):
    """The project's keys."""

    keys: list[ApiKey]


class Health(Struct, frozen=True):
    """Answer to `GET /healthz`."""

    ok: bool = True


class _Control(Litestar):
    """Without the plugins for types of pydantic and attrs: no type here is theirs, and where these are installed
    importing them takes longer than all the rest of the application."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def build(
    edge: EdgeClient, environments: Callable[[str], Sequence[EnvironmentInfo]], version: str, domain: str | None = None
) -> Litestar:
    """The Litestar application for one edge. `domain`: where ports are served by host name (None: this machine's)."""

    @get("/v1/sandboxes", summary="List the project's sandboxes")
    async def list_sandboxes(  # noqa: PLR0917 (Litestar passes by name)
        scope: Scope,
        sandbox_state: Annotated[list[State] | None, QueryParameter(name="state")] = None,
        run: FromQuery[str | None] = None,
        label: Annotated[list[str] | None, QueryParameter(description="k=v; all must match")] = None,
        limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 100,
        after: FromQuery[str | None] = None,
    ) -> Page:
        labels = dict(pair(text) for text in label or [])
        return await edge.list_sandboxes(
            exchange(scope).project(), states=sandbox_state or (), run=run, labels=labels, limit=limit, after=after
        )

    @post("/v1/sandboxes/{sandbox_id:str}/renew", status_code=200, summary="Let a sandbox live so long from now")
    async def renew(scope: Scope, sandbox_id: FromPath[str], data: JSONBody[RenewRequest]) -> SandboxInfo:
        exchange(scope).project()
        return await edge.renew(sandbox_id, data.ttl_s)

    @post("/v1/sandboxes/{sandbox_id:str}/pause", status_code=200, summary="Freeze a sandbox and give its memory back")
    async def pause(scope: Scope, sandbox_id: FromPath[str]) -> SandboxInfo:
        exchange(scope).project()
        return await edge.pause(sandbox_id)

    @post("/v1/sandboxes/{sandbox_id:str}/resume", status_code=200, summary="Let a paused sandbox go on")
    async def resume(scope: Scope, sandbox_id: FromPath[str]) -> SandboxInfo:
        exchange(scope).project()
        return await edge.resume(sandbox_id)

    @post("/v1/sandboxes/{sandbox_id:str}/fork", status_code=200, summary="Children that begin with a sandbox's files")
    async def fork(
        scope: Scope, sandbox_id: FromPath[str], data: JSONBody[ForkRequest], deadline_s: DeadlineS = None
    ) -> ForkResults:
        exchange(scope).project()
        return ForkResults(await edge.fork(sandbox_id, data.count, deadline_s=deadline_s))

    @get("/v1/sandboxes/{sandbox_id:str}/usage", summary="A running sandbox's counters")
    async def usage(sandbox_id: FromPath[str]) -> Usage:
        return edge.usage(sandbox_id)

    @get("/v1/sandboxes/{sandbox_id:str}/network", summary="What a sandbox may reach now, and what it did")
    async def network(sandbox_id: FromPath[str]) -> NetworkInfo:
        return edge.network(sandbox_id)

    @put("/v1/sandboxes/{sandbox_id:str}/network", summary="Replace what a sandbox may reach, at once")
    async def set_network(scope: Scope, sandbox_id: FromPath[str], data: JSONBody[NetworkRequest]) -> NetworkInfo:
        edge.check_grants(exchange(scope).owner(), data.network)
        return await edge.set_network(sandbox_id, data.network)

    @patch("/v1/sandboxes/{sandbox_id:str}/network", summary="Change some permissions of a sandbox, at once")
    async def change_network(scope: Scope, sandbox_id: FromPath[str], data: JSONBody[NetworkRequest]) -> NetworkInfo:
        edge.check_grants(exchange(scope).owner(), data.network)
        return await edge.set_network(sandbox_id, data.network, merge=True)

    @get("/v1/sandboxes/{sandbox_id:str}/ports", summary="How its ports are reached by host name")
    async def ports(scope: Scope, sandbox_id: FromPath[str]) -> PortAccess:
        _, port = scope["server"] or ("", 0)
        return PortAccess(
            domain=domain_here(domain, port or 0),
            token=edge.traffic_token(sandbox_id),
            public=edge.get(sandbox_id).spec.public_ports,
        )

    @get("/v1/sandboxes/{sandbox_id:str}/tripwires", summary="A running sandbox's tripwires and their hits")
    async def tripwires(scope: Scope, sandbox_id: FromPath[str]) -> TripwireState:
        exchange(scope).project()
        return edge.tripwires(sandbox_id)

    @post(
        "/v1/sandboxes/{sandbox_id:str}/tripwires/resume",
        status_code=200,
        summary="Let a sandbox go on that a tripwire paused",
    )
    async def resume_tripwires(scope: Scope, sandbox_id: FromPath[str]) -> TripwireState:
        exchange(scope).project()
        return edge.resume_tripwires(sandbox_id)

    @get("/v1/environments", summary="Environments that sandboxes can be made of")
    async def list_environments(scope: Scope) -> Environments:
        return Environments(list(environments(exchange(scope).project())))

    @get("/v1/runs", summary="The project's runs: their epochs and leases")
    async def list_runs(scope: Scope, name: FromQuery[str | None] = None) -> RunList:
        project = exchange(scope).project()
        return RunList(edge.runs(project) if name is None else [edge.run(project, name)])

    @post("/v1/runs", status_code=200, summary="Begin a new epoch of a run; clients of earlier ones are fenced off")
    async def open_run(scope: Scope, data: JSONBody[RunRequest]) -> RunInfo:
        return edge.open_run(exchange(scope).owner().project, data)

    @post("/v1/runs:renew", status_code=200, summary="Renew a run's lease, as a client of an epoch")
    async def renew_run(scope: Scope, data: JSONBody[RunRenewal]) -> RunInfo:
        return edge.renew_run(exchange(scope).owner().project, data.name, data.epoch)

    @get("/v1/node", summary="Node facts and counts")
    async def node() -> NodeInfo:
        return edge.node()

    @get("/v1/keys", summary="The project's API keys, without the keys themselves")
    async def list_keys(scope: Scope) -> Keys:
        return Keys(edge.list_keys(exchange(scope).project()))

    @post("/v1/keys", status_code=201, summary="A further API key of the project")
    async def create_key(scope: Scope, data: JSONBody[KeyRequest]) -> NewKey:
        principal = exchange(scope).owner()
        key = await edge.create_key(principal.project, data.label, data.policy, by=principal)
        return NewKey(principal.project, key)

    @delete("/v1/keys/{key_id:str}", status_code=204, summary="Revoke an API key")
    async def revoke_key(scope: Scope, key_id: FromPath[str]) -> None:
        if all(key.id != key_id for key in edge.list_keys(exchange(scope).project())):
            raise NotFound(f"the project has no key {key_id!r}", remedy="GET /v1/keys lists them")
        await edge.revoke_key(key_id)

    @get("/healthz", summary="The server answers", security=[])
    async def healthz() -> Health:
        return Health()

    return _Control(
        [
            list_sandboxes,
            renew,
            pause,
            resume,
            fork,
            usage,
            network,
            set_network,
            change_network,
            ports,
            tripwires,
            resume_tripwires,
            list_environments,
            list_runs,
            open_run,
            renew_run,
            node,
            list_keys,
            create_key,
            revoke_key,
            healthz,
            *machines.handlers(edge, exchange),
        ],
        exception_handlers={DsecError: on_error, HTTPException: on_http_error, Exception: on_bug},
        before_request=strictly,
        openapi_config=OpenAPIConfig(title="dsec", version=version, path="/v1/-/openapi", render_plugins=[]),
        request_max_body_size=MAX_JSON_BYTES,
        logging_config=None,
    )


def only(app: Litestar, x: Exchange) -> None:
    """Raise `MethodNotAllowed` where a path of `app`'s doesn't take the request's method: what Litestar would answer
    itself names no methods, or not all."""
    path = x.scope["path"]
    allowed: set[str] = set()
    for route in app.routes:
        if isinstance(route, HTTPRoute) and _matcher(route.path_format).fullmatch(path):
            allowed |= route.methods - {"OPTIONS"}
    if allowed:
        x.only(*sorted(allowed))


@cache
def _matcher(path: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(re.escape(part) for part in re.split(r"\{[^}]*\}", path)))


async def strictly(request: Request[Any, Any, Any]) -> None:
    """Refuse a body that only a lax reading could take, as Litestar's is: numbers as text, 0 for false."""
    data = request.route_handler.parsed_fn_signature.parameters.get("data")
    if data is not None:
        exchange(request.scope).decode(_decoder(data.annotation), await request.body())


@cache
def _decoder(kind: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def exchange(scope: Scope) -> Exchange:
    """What `dsec.api.app` made of the request."""
    found: Exchange = scope[EXCHANGE]  # type: ignore[literal-required]
    return found


def pair(text: str) -> tuple[str, str]:
    """A label argument."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InvalidRequest(f"label {text!r} is not of the form k=v")
    return name, value


def on_error(request: Request[Any, Any, Any], error: DsecError) -> Response[ErrorBody]:
    """An error of ours as its body."""
    exchange(request.scope).failed = error
    headers = {"retry-after": str(RETRY_AFTER_S)} if passes(error) else None
    return Response(error.body(), status_code=error.http_status, headers=headers)


def on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorBody]:
    """Litestar's own errors in our form."""
    if isinstance(error, NotFoundException):
        return _plain(404, "not_found", f"no such path: {request.scope['path']}", "GET /openapi.json lists them")
    if isinstance(error, ValidationException):
        return _plain(400, "invalid_request", _validation(error), "")
    if error.status_code == 413:
        return _plain(413, "too_large", f"the body is larger than {MAX_JSON_BYTES} bytes", "")
    code = "invalid_request" if error.status_code < 500 else "internal"
    return _plain(error.status_code, code, error.detail, "")


def on_bug(_: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    """Anything else is a bug of ours: the trace goes to the log, not to the caller."""
    raise error


def _plain(status: int, code: str, message: str, remedy: str) -> Response[ErrorBody]:
    return Response(ErrorBody(code=code, message=message, remedy=remedy), status_code=status)


def _validation(error: ValidationException) -> str:
    extra = error.extra if isinstance(error.extra, list) else []
    parts = [
        f"{item.get('key')}: {item.get('message')}" if item.get("key") else str(item.get("message"))
        for item in extra
        if isinstance(item, dict)
    ]
    return "; ".join(parts) or error.detail

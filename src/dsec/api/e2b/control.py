"""E2B's control plane: sandboxes and templates by REST.

Owns the last reading of each sandbox's CPU time, from which its use in percent is worked out. Handlers take their call
after it was authenticated and, where it names a sandbox, authorised.
"""

from __future__ import annotations

import base64
import binascii
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.api.control import EnvironmentInfo
from dsec.api.e2b import models
from dsec.api.e2b.call import Call
from dsec.api.e2b.config import E2bConfig
from dsec.api.e2b.errors import not_yet
from dsec.api.e2b.network import NetworkUpdate, network_of
from dsec.api.e2b.signatures import Signatures
from dsec.api.e2b.starting import Starter
from dsec.api.ports.hosts import domain_here
from dsec.edge.client import EdgeClient, Principal
from dsec.errors import Conflict, InvalidRequest, NotFound, PermissionDenied, SandboxNotFound
from dsec.spec.network import Network
from dsec.spec.sandbox import SandboxInfo, State
from dsec.store.format import ImageConfig

_MAX_LIMIT = 100
_PAGE = 1000
_READINGS = 16_384
_SOON_S = 0.001

_fork = msgspec.json.Decoder(models.Fork)
_connect = msgspec.json.Decoder(models.Connect)
_timeout = msgspec.json.Decoder(models.SetTimeout)
_network = msgspec.json.Decoder(NetworkUpdate)


class Cursor(Struct, array_like=True):
    """Where a page ended: start and id of its last sandbox."""

    created_at: float
    id: str


class Control:
    """The handlers."""

    def __init__(
        self,
        edge: EdgeClient,
        environments: Callable[[str], Sequence[EnvironmentInfo]],
        config: E2bConfig,
        signatures: Signatures,
        starter: Starter | None = None,
    ) -> None:
        self._starter = starter
        self._signatures = signatures
        self._edge = edge
        self._environments = environments
        self._config = config
        self._readings: OrderedDict[str, tuple[float, int]] = OrderedDict()

    async def create(self, call: Call, principal: Principal) -> None:
        """POST /v2/sandboxes"""
        x = call.x
        new = models.new_sandbox(await x.body())
        network = self._network(new.allow_internet_access, new.network, principal)
        spec = models.spec_of(new, self._config, network)
        key = call.header(b"idempotency-key") or None
        template = ImageConfig()
        if self._starter is not None:
            template = await self._starter.config(spec.environment, principal.project)
            spec = self._starter.sized(spec, template)
        created = await self._edge.create(spec, project=principal.project, key=key)
        info = created.sandbox
        if self._starter is not None and not created.existed:
            await self._starter.start(info.id, template)
        if not models.alive(info):
            raise SandboxNotFound(f"the sandbox of this Idempotency-Key, {info.id}, has ended")
        await x.answer(201, self._opened(call, info))

    async def connect(self, call: Call, sandbox_id: str) -> None:
        """POST /v2/sandboxes/{id}/connect: its token again; its end is put off where the timeout is later."""
        x = call.x
        request = x.decode(_connect, await x.body() or b"{}")
        info = self._running(sandbox_id)
        if info.state is State.PAUSED:
            info = await self._edge.resume(sandbox_id)
        if info.expires_at is not None and request.timeout and time.time() + request.timeout > info.expires_at:
            info = await self._edge.renew(sandbox_id, float(request.timeout))
        await x.answer(200, self._opened(call, info))

    async def pause(self, call: Call, sandbox_id: str) -> None:
        """POST /sandboxes/{id}/pause: 409 where it is paused. Memory is kept, whatever `memory` says."""
        x = call.x
        await x.drain()
        if self._running(sandbox_id).state is State.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is already paused")
        await self._edge.pause(sandbox_id)
        await x.empty()

    async def fork(self, call: Call, sandbox_id: str) -> None:
        """POST /sandboxes/{id}/fork: children with its files; memory isn't kept."""
        x = call.x
        request = x.decode(_fork, await x.body() or b"{}")
        self._running(sandbox_id)
        found = []
        for item in await self._edge.fork(sandbox_id, request.count):
            if item.sandbox is not None:
                info = item.sandbox
                if request.timeout is not None:
                    info = await self._edge.renew(info.id, float(request.timeout))
                found.append(models.Forked(sandbox=self._opened(call, info)))
            elif item.error is not None:
                found.append(models.Forked(error=models.RestError(500, item.error.message, item.error.code)))
        await x.answer(201, found)

    def _opened(self, call: Call, info: SandboxInfo) -> models.Opened:
        """What creator and connecting client are told."""
        traffic = None if info.spec.public_ports is True else self._edge.traffic_token(info.id)
        return models.created(info, self._signatures.token(info.id), self._told(call), traffic)

    def _told(self, call: Call) -> E2bConfig:
        """The settings with the domain as clients reach it."""
        _, port = call.x.scope["server"] or ("", None)
        return replace(self._config, domain=domain_here(self._config.domain, port or 0))

    async def inspect(self, call: Call, sandbox_id: str) -> None:
        """GET /sandboxes/{id}"""
        info = self._running(sandbox_id)
        network = self._edge.network(sandbox_id).policy
        await call.x.answer(200, models.detailed(info, self._signatures.token(sandbox_id), self._told(call), network))

    async def set_network(self, call: Call, sandbox_id: str, principal: Principal) -> None:
        """PUT /sandboxes/{id}/network: replaces all rules."""
        x = call.x
        update = x.decode(_network, await x.body() or b"{}")
        self._running(sandbox_id)
        options = {"allowOut": update.allow_out, "denyOut": update.deny_out, "rules": update.rules}
        network = self._network(update.allow_internet_access, options, principal)
        await self._edge.set_network(sandbox_id, network)
        await x.empty()

    async def kill(self, call: Call, sandbox_id: str) -> None:
        """DELETE /sandboxes/{id}: 404 where it had ended before."""
        if self._edge.get(sandbox_id).state in (State.ENDING, State.ENDED):
            raise SandboxNotFound(f"sandbox {sandbox_id} has ended")
        await self._edge.delete(sandbox_id)
        await call.x.empty()

    async def set_timeout(self, call: Call, sandbox_id: str) -> None:
        """POST /sandboxes/{id}/timeout"""
        x = call.x
        request = x.decode(_timeout, await x.body())
        self._running(sandbox_id)
        await self._edge.renew(sandbox_id, float(request.timeout) or _SOON_S)
        await x.empty()

    async def metrics(self, call: Call, sandbox_id: str) -> None:
        """GET /sandboxes/{id}/metrics: one sample, of now."""
        x = call.x
        x.check_query("start", "end")
        start, end = x.value("start", int, 0), x.value("end", int, 1 << 62)
        info = self._running(sandbox_id)
        now = time.time()
        usage = self._edge.usage(sandbox_id)
        before_at, before_us = self._readings.get(sandbox_id, (info.created_at, 0))
        self._readings[sandbox_id] = (now, usage.cpu_us)
        self._readings.move_to_end(sandbox_id)
        if len(self._readings) > _READINGS:
            self._readings.popitem(last=False)
        used_s = max(0, usage.cpu_us - before_us) / 1e6
        sample = models.Sample(
            timestamp=models.timestamp(now),
            timestamp_unix=int(now),
            cpu_count=math.ceil(info.spec.cpus),
            cpu_used_pct=round(100 * used_s / max(1e-3, now - before_at) / info.spec.cpus, 2),
            mem_used=usage.memory_bytes,
            mem_total=info.spec.memory_bytes,
            mem_cache=0,
            disk_used=usage.disk_bytes,
            disk_total=usage.disk_limit_bytes or info.spec.disk_bytes,
        )
        await x.answer(200, [sample] if start <= now and int(now) <= end else [])

    async def list_sandboxes(self, call: Call, principal: Principal) -> None:
        """GET /v2/sandboxes"""
        x = call.x
        x.check_query("metadata", "state", "order", "startedAfter", "template", "nextToken", "limit")
        limit = x.value("limit", int, _MAX_LIMIT)
        if not 1 <= limit <= _MAX_LIMIT:
            raise InvalidRequest(f"limit is 1 to {_MAX_LIMIT}")
        order = x.value("order", str, "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order is asc or desc")
        states = x.value("state", str, "running").split(",")
        if not set(states) <= {"running", "paused"}:
            raise InvalidRequest("state is running, paused, or both with a comma")
        ours = [State.RUNNING] * ("running" in states) + [State.PAUSED] * ("paused" in states)
        found = await self._matching(call, principal, ours)
        found.sort(key=_by_start, reverse=order == "desc")
        token = x.text("nextToken")
        if token:
            last = _by_cursor(_decode(token))
            found = [i for i in found if (_by_start(i) < last if order == "desc" else _by_start(i) > last)]
        page = found[:limit]
        headers = []
        if len(found) > limit:
            cursor = Cursor(page[-1].created_at, page[-1].id)
            headers.append((b"x-next-token", base64.urlsafe_b64encode(msgspec.json.encode(cursor))))
        await x.answer(200, [models.listed(info) for info in page], *headers)

    async def template_alias(self, call: Call, name: str) -> None:
        """GET /templates/aliases/{name}"""
        environment = self._config.environment(name)
        if all(known.name != environment for known in self._environments(call.x.project())):
            raise NotFound(f"there is no template {name[:200]!r}")
        await call.x.answer(200, models.TemplateAlias(environment))

    async def later(self, call: Call, verb: str) -> None:
        """Calls of later versions."""
        await call.x.drain()
        raise not_yet(_LATER[verb])

    # --- inside ---

    def _network(self, internet: bool | None, options: dict[str, Any] | None, principal: Principal) -> Network:
        """What the caller asks for, as far as its key may grant it."""
        default = principal.policy.default if principal.policy is not None else {}
        network = network_of(internet, options, default)
        try:
            self._edge.check_grants(principal, network)
        except PermissionDenied:
            if self._config.internet_for(principal.label) == "ignore":
                return {}
            raise
        return network

    def _running(self, sandbox_id: str) -> SandboxInfo:
        """Raises `SandboxNotFound` for one that is not running: E2B has no other states."""
        info = self._edge.get(sandbox_id)
        if not models.alive(info):
            raise SandboxNotFound(f"sandbox {sandbox_id} is not running: it is {info.state.value}")
        return info

    async def _matching(self, call: Call, principal: Principal, states: Sequence[State]) -> list[SandboxInfo]:
        x = call.x
        labels = {unquote(k): unquote(v) for k, v in parse_qsl(x.text("metadata") or "", keep_blank_values=True)}
        template = x.text("template")
        environment = None if template is None else self._config.environment(template)
        after = _instant(x.text("startedAfter"))
        found: list[SandboxInfo] = []
        cursor: str | None = None
        while True:
            page = await self._edge.list_sandboxes(
                principal.project, states=states, labels=labels, limit=_PAGE, after=cursor
            )
            found += [
                info
                for info in page.sandboxes
                if (environment is None or info.spec.environment == environment) and info.created_at >= after
            ]
            cursor = page.next
            if cursor is None:
                return found


_LATER = {
    "snapshots": "snapshots",
    "templates": "building templates",
    "volumes": "volumes",
    "secrets": "secrets",
    "logs": "logs of a sandbox",
    "metrics": "metrics of several sandboxes at once",
}


def _by_start(info: SandboxInfo) -> tuple[float, str]:
    return info.created_at, info.id


def _by_cursor(cursor: Cursor) -> tuple[float, str]:
    return cursor.created_at, cursor.id


def _decode(token: str) -> Cursor:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(token.encode()), type=Cursor)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise InvalidRequest("nextToken is none of ours") from None


def _instant(text: str | None) -> float:
    """RFC 3339 as seconds since the epoch; a plus that wasn't percent-encoded arrives as a space."""
    if text is None:
        return 0.0
    try:
        instant = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise InvalidRequest("startedAfter is a time as in RFC 3339") from None
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()

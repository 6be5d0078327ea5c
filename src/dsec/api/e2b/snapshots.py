"""E2B's snapshots: a sandbox's files as a template of their own, listed, started from and forgotten.

A snapshot is an environment whose topmost layer is of the kind `snapshot`; without a name it has one of its own. Files
are kept as they are, temporary ones too, but for the machine id; memory isn't. Sandboxes of it are of the size that the
first one had, and start what its template starts.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dsec.api.e2b.call import Call
from dsec.api.e2b.config import E2bConfig
from dsec.api.layers import take_snapshot
from dsec.builder.templates import CPUS, DISK_MB, MEMORY_MB
from dsec.edge.client import EdgeClient, Principal
from dsec.errors import Conflict, InvalidRequest, NotFound
from dsec.spec.sandbox import MIB, NAME_PATTERN, SandboxSpec
from dsec.spec.snapshots import SnapshotRequest
from dsec.store.environments import Environment
from dsec.store.service import LayerService

_MAX_LIMIT = 100
_UNNAMED = "snapshot@1"
"""What the layer would be called; it has no name."""
_KEPT_OUT = ["etc/machine-id"]


class TakeSnapshot(Struct, kw_only=True):
    """Body of `POST /sandboxes/{id}/snapshots`."""

    name: Annotated[str, Meta(max_length=200)] | None = None
    memory: bool | None = None


class Snapshot(Struct, frozen=True, kw_only=True, rename={"snapshot_id": "snapshotID"}):
    """One snapshot."""

    snapshot_id: str
    names: list[str]


class _Cursor(Struct, array_like=True):
    """Where a page ended."""

    created_at: float
    name: str


_take = msgspec.json.Decoder(TakeSnapshot)


class Snapshots:
    """The handlers."""

    def __init__(self, edge: EdgeClient, layers: LayerService, config: E2bConfig) -> None:
        self._edge = edge
        self._layers = layers
        self._config = config

    async def take(self, call: Call, sandbox_id: str, principal: Principal) -> None:
        """POST /sandboxes/{id}/snapshots. A name that was given before means the new one from then on."""
        x = call.x
        asked = x.decode(_take, await x.body() or b"{}")
        name = self._name(asked.name) if asked.name else f"snapshot-{secrets.token_hex(8)}"
        spec = self._edge.get(sandbox_id).spec
        request = SnapshotRequest(
            name=_UNNAMED, scrub=False, remove=_KEPT_OUT, description=f"E2B snapshot of {sandbox_id}"
        )
        labels = await asyncio.to_thread(self._labels, spec)
        made = await take_snapshot(
            self._edge, self._layers, sandbox_id, principal, request, environment=name, labels=labels
        )
        await x.answer(201, Snapshot(snapshot_id=made.name, names=[made.name] if asked.name else []))

    async def listing(self, call: Call, principal: Principal) -> None:
        """GET /snapshots: the project's, the newest first."""
        x = call.x
        x.check_query("sandboxID", "name", "limit", "nextToken")
        limit = x.value("limit", int, _MAX_LIMIT)
        if not 1 <= limit <= _MAX_LIMIT:
            raise InvalidRequest(f"limit is 1 to {_MAX_LIMIT}")
        after = _decode(x.text("nextToken"))
        found = await asyncio.to_thread(self._find, principal.project, x.text("sandboxID"), x.text("name"))
        if after is not None:
            found = [each for each in found if _place(each) < (after.created_at, after.name)]
        headers = []
        if len(found) > limit:
            cursor = _Cursor(*_place(found[limit - 1]))
            headers.append((b"x-next-token", base64.urlsafe_b64encode(msgspec.json.encode(cursor))))
        page = [Snapshot(snapshot_id=each.name, names=[each.name]) for each in found[:limit]]
        await x.answer(200, page, *headers)

    def _find(self, project: str, sandbox_id: str | None, name: str | None) -> list[Environment]:
        environments = self._layers.environments
        environments.refresh()
        found = []
        for each in environments.list(project):
            if each.project != project or (name and each.name not in (name, name.removesuffix(":default"))):
                continue
            with suppress(NotFound):  # an environment whose layer is gone, or of the first version
                manifest = self._layers.layers.manifest(each.layers[0])
                if manifest.kind == "snapshot" and sandbox_id in (None, manifest.source.get("sandbox")):
                    found.append(each)
        return sorted(found, key=_place, reverse=True)

    def _name(self, name: str) -> str:
        template, _, tag = name.partition(":")
        if not re.fullmatch(NAME_PATTERN, name) or not template:
            raise InvalidRequest(f"not a name for a snapshot: {name!r}", remedy="Like my-snapshot or my-snapshot:v2.")
        if template in self._config.templates:
            raise Conflict(f"the template {template!r} stands for another environment here", remedy="Use another name.")
        return template if tag == "default" else name

    def _labels(self, spec: SandboxSpec) -> dict[str, str]:
        """What the template below says, and the sandbox's own size."""
        labels: dict[str, str] = {}
        for top in spec.layers[:1]:
            with suppress(NotFound):
                labels |= self._layers.layers.manifest(top).config.labels
        labels |= {MEMORY_MB: str(spec.memory_bytes // MIB), DISK_MB: str(spec.disk_bytes // MIB)}
        return labels | ({CPUS: str(int(spec.cpus))} if spec.cpus == int(spec.cpus) else {})


def _place(environment: Environment) -> tuple[float, str]:
    return environment.created_at, environment.name


def _decode(token: str | None) -> _Cursor | None:
    if not token:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(token.encode()), type=_Cursor)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise InvalidRequest("nextToken is none of ours") from None

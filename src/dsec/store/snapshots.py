"""Snapshots: captured files, scrubbed, become a layer and an environment of the sandbox's project."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping

from dsec.errors import EnvironmentNotFound, Unavailable
from dsec.ports import Captured
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.snapshots import SnapshotInfo, SnapshotRequest
from dsec.store.format import ImageConfig
from dsec.store.layers import LayerMeta
from dsec.store.scrub import RULES, Report, scrub
from dsec.store.service import LayerService
from dsec.store.shared import quiet

_FULL = (errno.ENOSPC, errno.EDQUOT)


async def pack(  # noqa: PLR0917
    service: LayerService,
    captured: Captured,
    sandbox_id: str,
    spec: SandboxSpec,
    project: str,
    asked: SnapshotRequest,
    built_by: str,
    *,
    environment: str = "",
    labels: Mapping[str, str] | None = None,
) -> SnapshotInfo:
    """Layer and environment `asked.name` of what a sandbox of this `spec` had written. Who built it is on record in
    the layer's manifest. `environment`: its name, and the layer has none; an older one is replaced. `labels`: what the
    layer says of itself, as images do. Raises `Conflict` where the name is another layer's, `InvalidRequest` for what a
    layer can't hold, `Unavailable` where the disk is full; then nothing is left."""
    environments = service.environments

    def work() -> tuple[LayerMeta, Report]:
        report = scrub(captured.upper, [*(RULES if asked.scrub else ()), *asked.remove], asked.keep)
        source = {"sandbox": sandbox_id, "project": project, "built_by": built_by}
        meta = service.layers.add(
            captured.upper,
            "snapshot",
            asked.description or f"snapshot of {sandbox_id}",
            id_base=captured.id_base,
            source=source,
            config=ImageConfig(labels=dict(labels or {})),
        )
        if not environment:
            environments.name_layer(asked.name, meta.digest, project=project, readers=asked.readers)
        try:  # the sandbox's own variables may be secrets: they stay out
            below = environments.get(spec.environment, project)
            env, user, workdir = below.env, below.user, below.workdir
        except EnvironmentNotFound:
            env, user, workdir = {}, spec.user, spec.workdir
        environments.put(
            environment or asked.name,
            (meta.digest, *spec.layers),
            env=env,
            user=user,
            workdir=workdir,
            description=asked.description,
            project=project,
            readers=asked.readers,
        )
        return meta, report

    try:
        async with service.making():
            meta, report = await asyncio.shield(asyncio.to_thread(work))
            await service.share([meta.digest, *spec.layers], quiet)
            await service.publish()
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable("the disk is full", remedy="Free some space on the server; nothing was kept.") from error
        raise
    return SnapshotInfo(
        name=environment or asked.name,
        layer=meta.digest,
        sandbox=sandbox_id,
        built_by=built_by,
        removed=report.removed,
        removed_bytes=report.removed_bytes,
        removed_paths=report.removed_paths,
        kept=report.kept,
        kept_bytes=report.kept_bytes,
        kept_paths=report.kept_paths,
    )

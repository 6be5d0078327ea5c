"""Layers and environments over HTTP: raw ASGI. What takes long answers NDJSON: `{"step", "done", "total"}` lines while
it works, then `{"result": ...}` or `{"error": ErrorBody}`, always last. A client that goes away stops the work; nothing
is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from dsec.api.exchange import ClientGone, Exchange
from dsec.edge.client import EdgeClient, Principal
from dsec.errors import DsecError, EnvironmentNotFound, ErrorBody, Internal, InvalidRequest, NotFound, PermissionDenied
from dsec.spec.sandbox import NAME_PATTERN, Name
from dsec.spec.snapshots import SnapshotInfo, SnapshotRequest
from dsec.store.environments import Environment
from dsec.store.format import Kind
from dsec.store.image import host_platform, parse_platform
from dsec.store.importer import Imported
from dsec.store.layers import LayerMeta
from dsec.store.service import GRACE_S, LayerInfo, LayerService
from dsec.store.shared import Progress
from dsec.store.snapshots import pack

_NDJSON, _TAR = b"application/x-ndjson", b"application/x-tar"
_EVERY_S = 0.1
OPERATOR = "default"
"""The node's own project, whose key its server writes for this machine."""
LAYER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/+-]{0,150}@[A-Za-z0-9][A-Za-z0-9._+-]{0,47}$(?!\n)"
LayerNameText = Annotated[str, Meta(pattern=LAYER_NAME, description="NAME@VERSION")]
Reference = Annotated[str, Meta(min_length=1, max_length=250, description="NAME@VERSION, or a digest")]
Reader = Annotated[str, Meta(min_length=1, max_length=200)]
Readers = Annotated[list[Reader], Meta(max_length=100)]
LayerKind = Kind


class ImportRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/layers:import`."""

    image: Annotated[str, Meta(min_length=1, max_length=1000)]
    """`[http[s]://]HOST[:PORT]/NAME[:TAG][@DIGEST]`"""
    environment: Name
    """What the image becomes."""
    platform: str | None = None
    """Like `linux/arm64`; None: the server's own."""
    credentials: Annotated[str, Meta(max_length=4096)] | None = None
    """`user:password` for the registry."""
    readers: Readers = []


class UploadArguments(Struct, frozen=True):
    """Of the query of `POST /v1/layers:upload`."""

    name: Annotated[str, Meta(min_length=1, max_length=250, examples=["tools@1.0"])]
    """Of the layer, or of the environment that an image becomes."""
    form: Literal["tree", "image"] = "tree"
    kind: LayerKind = "workspace"
    at: Annotated[str, Meta(pattern="^/", examples=["/opt/tools"])] = "/"
    """Where a tree is placed."""
    tag: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """Of an image, where the archive has several."""
    platform: Annotated[str, Meta(min_length=1, max_length=100, examples=["linux/arm64"])] | None = None
    reader: Readers = []
    """Projects that may use it too; `*`: all."""


class MergeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/layers:merge`."""

    layers: Annotated[list[Reference], Meta(min_length=2, max_length=400)]
    """Top first."""
    name: LayerNameText
    kind: LayerKind = "workspace"
    readers: Readers = []


class CollectRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/layers:gc`; it may be empty."""

    least_age_s: Annotated[float, Meta(ge=0, le=1e9)] = GRACE_S
    """What is younger stays. 0 also takes what a caller has just made and not named yet."""


class EnvironmentRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/environments`."""

    name: Name
    layers: Annotated[list[Reference], Meta(max_length=400)]
    """Top first; `env:NAME` stands for all layers of an environment."""
    env: dict[str, str] = {}
    user: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    workdir: Annotated[str, Meta(pattern="^/")] | None = None
    description: Annotated[str, Meta(max_length=1000)] = ""
    readers: Readers = []


class EnvironmentDetails(Struct, frozen=True):
    """One environment, with its layers."""

    environment: Environment
    layers: list[LayerInfo]
    """Top first."""


class LayerList(Struct, frozen=True):
    """Answer to `GET /v1/layers`."""

    layers: list[LayerInfo]


class Step(Struct, frozen=True, omit_defaults=True):
    """One line of a long call."""

    step: str = ""
    done: int = 0
    total: int = 0
    result: dict[str, Any] | None = None
    error: ErrorBody | None = None


_SNAPSHOT = msgspec.json.Decoder(SnapshotRequest)


async def take_snapshot(
    edge: EdgeClient,
    service: LayerService,
    sandbox_id: str,
    principal: Principal,
    asked: SnapshotRequest,
    *,
    environment: str = "",
    labels: Mapping[str, str] | None = None,
) -> SnapshotInfo:
    """As `store.snapshots.pack`, of a sandbox as it is now; on record in its logs."""
    spec = edge.get(sandbox_id).spec
    built_by = f"{principal.project}/{principal.label}" if principal.label else principal.project
    async with edge.captured(sandbox_id, at_rest=asked.at_rest) as captured:
        made = await pack(
            service, captured, sandbox_id, spec, principal.project, asked, built_by,
            environment=environment, labels=labels,
        )  # fmt: skip
    edge.note_snapshot(sandbox_id, captured, made)
    return made


class Layers:
    """The handlers, over one node's service."""

    def __init__(self, service: LayerService) -> None:
        self._service = service

    async def layers(self, x: Exchange) -> None:
        """GET /v1/layers"""
        x.only("GET")
        x.check_query()
        await x.answer(200, LayerList(list(await self._service.list(x.project()))))

    async def snapshot(self, edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
        """POST /v1/sandboxes/{id}/snapshot"""
        x.check_query()
        principal = x.owner()
        asked = x.decode(_SNAPSHOT, await x.body())
        await x.answer(201, await take_snapshot(edge, self._service, sandbox_id, principal, asked))

    async def one(self, x: Exchange, reference: str, verb: str) -> None:
        """.../v1/layers/{reference}[/verify, /export]"""
        project = x.project()
        x.check_query()
        if verb == "verify":
            x.only("POST")

            async def verify(progress: Progress) -> dict[str, Any]:
                return {"digest": await self._service.verify(project, reference, progress)}

            await stream(x, verify)
        elif verb == "export":
            x.only("GET")
            await _send(x, await self._service.export(project, reference))
        elif verb:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")
        elif x.scope["method"] == "DELETE":
            if not await asyncio.to_thread(self._service.environments.remove_layer_name, reference, project):
                raise NotFound(f"the project has no layer {reference[:200]!r}")
            await self._service.publish()
            await x.empty()
        else:
            x.only("GET", "DELETE")
            await x.answer(200, await self._service.inspect(project, reference))

    async def load(self, x: Exchange) -> None:
        """POST /v1/layers:import"""
        x.only("POST")
        x.check_query()
        project = x.project()
        request = x.decode(_IMPORT, await x.body())
        platform = parse_platform(request.platform) if request.platform else host_platform()

        async def work(progress: Progress) -> dict[str, Any]:
            found = await self._service.import_registry(
                project,
                request.image,
                platform,
                self._named(project, request.environment, request.image, request.readers),
                progress,
                credentials=request.credentials,
            )
            return _imported(found, request.environment)

        await stream(x, work)

    async def upload(self, x: Exchange) -> None:
        """POST /v1/layers:upload"""
        x.only("POST")
        x.check_query(*UploadArguments.__struct_fields__, often=["reader"])
        project = x.project()
        asked = {each: x.texts(each) if each == "reader" else x.text(each) for each in x.query}
        try:
            given = msgspec.convert(asked, UploadArguments)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from None
        name, readers = given.name, given.reader
        platform = parse_platform(given.platform) if given.platform else host_platform()
        pattern = NAME_PATTERN if given.form == "image" else LAYER_NAME
        if re.search(pattern, name) is None:
            raise InvalidRequest(f"not a name: {name[:200]!r}", remedy=f"It has to match {pattern}.", field="name")
        with self._service.layers.scratch() as scratch:
            path = Path(scratch) / "upload"
            await self._service.spool(x.chunks(), path)

            async def work(progress: Progress) -> dict[str, Any]:
                if given.form == "image":
                    then = self._named(project, name, "", readers)
                    found = await self._service.import_archive(project, path, platform, then, progress, tag=given.tag)
                    return _imported(found, name)
                meta = await self._service.build_archive(
                    path, given.kind, self.layer_named(project, name, readers), progress, at=given.at
                )
                return {"layer": meta.digest, "name": name, "size_bytes": meta.size_bytes}

            await stream(x, work)

    async def merge(self, x: Exchange) -> None:
        """POST /v1/layers:merge"""
        x.only("POST")
        x.check_query()
        project = x.project()
        request = x.decode(_MERGE, await x.body())

        async def work(progress: Progress) -> dict[str, Any]:
            then = self.layer_named(project, request.name, request.readers)
            meta = await self._service.merge(project, request.layers, request.kind, then, progress)
            return {"layer": meta.digest, "name": request.name, "size_bytes": meta.size_bytes}

        await stream(x, work)

    async def collect(self, x: Exchange) -> None:
        """POST /v1/layers:gc"""
        x.only("POST")
        x.check_query()
        if x.project() != OPERATOR:  # what is deleted was made, and may be named again soon, by any project
            raise PermissionDenied(
                "what no name stands for is the node's, not one project's",
                remedy=f"Use a key of the project {OPERATOR!r}.",
            )

        body = await x.body()
        request = x.decode(_COLLECT, body) if body else CollectRequest()

        async def work(progress: Progress) -> dict[str, Any]:
            return {"freed_bytes": await self._service.collect(progress, least_age_s=request.least_age_s)}

        await stream(x, work)

    async def create_environment(self, x: Exchange) -> None:
        """POST /v1/environments; `dsec.api.control` has GET"""
        x.only("GET", "POST")
        x.check_query()
        project = x.project()
        request = x.decode(_ENVIRONMENT, await x.body())
        made = await self._service.create_environment(
            project,
            request.name,
            request.layers,
            env=request.env,
            user=request.user,
            workdir=request.workdir,
            description=request.description,
            readers=request.readers,
        )
        await x.answer(201, made)

    async def environment(self, x: Exchange, name: str) -> None:
        """/v1/environments/{name}"""
        x.only("GET", "DELETE")
        x.check_query()
        project = x.project()
        if x.scope["method"] == "DELETE":
            if not await asyncio.to_thread(self._service.environments.remove, name, project):
                raise EnvironmentNotFound(f"the project has no environment {name[:200]!r}")
            await self._service.publish()
            await x.empty()
            return
        found = await self._service.find_environment(project, name)
        await x.answer(200, EnvironmentDetails(found, [await self._service.inspect(project, d) for d in found.layers]))

    def _named(self, project: str, name: str, description: str, readers: list[str]) -> Callable[[Imported], None]:
        def put(found: Imported) -> None:
            self._service.environments.put(
                name, found.layers, description=description, project=project, readers=readers
            )

        return put

    def layer_named(self, project: str, name: str, readers: list[str]) -> Callable[[LayerMeta], None]:
        """Gives a layer a name."""

        def put(meta: LayerMeta) -> None:
            self._service.environments.name_layer(name, meta.digest, project=project, readers=readers)

        return put


_IMPORT = msgspec.json.Decoder(ImportRequest)
_MERGE = msgspec.json.Decoder(MergeRequest)
_COLLECT = msgspec.json.Decoder(CollectRequest)
_ENVIRONMENT = msgspec.json.Decoder(EnvironmentRequest)
_ENCODER = msgspec.json.Encoder()


def _imported(found: Imported, name: str) -> dict[str, Any]:
    return {"environment": name, "layers": found.layers, "image": found.digest}


async def stream(x: Exchange, work: Callable[[Progress], Awaitable[dict[str, Any]]]) -> None:
    """Run it, telling how far it is. What fails before there was anything to tell is the answer's status. A client that
    goes away ends it, also while there is nothing to tell."""
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[Step | None] = asyncio.Queue()
    told: dict[str, float] = {}

    def progress(step: str, done: int = 0, total: int = 0) -> None:
        now = time.monotonic()
        if now - told.get(step, 0.0) >= _EVERY_S or (total and done == total):
            told[step] = now
            loop.call_soon_threadsafe(steps.put_nowait, Step(step, done, total))

    task = asyncio.ensure_future(work(progress))
    task.add_done_callback(lambda _: steps.put_nowait(None))
    gone = asyncio.ensure_future(_gone(x))
    gone.add_done_callback(lambda _: task.cancel())
    begun = False
    try:
        while (step := await steps.get()) is not None:
            if not begun:
                begun = True
                await x.begin(200, _NDJSON)
            await x.more(_ENCODER.encode(step) + b"\n")
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DsecError):
                await task
    if task.cancelled():
        raise ClientGone
    error = task.exception()
    if error is not None and not begun:
        raise as_ours(error)
    last = Step(error=as_ours(error).body()) if error is not None else Step(result=task.result())
    if not begun:
        await x.begin(200, _NDJSON)
    await x.finish(_ENCODER.encode(last) + b"\n")


async def _gone(x: Exchange) -> None:
    while (await x.next_message())["type"] != "http.disconnect":
        pass


def as_ours(error: BaseException) -> DsecError:
    """What failed in long work, as one of our errors; what is a bug is raised."""
    if isinstance(error, DsecError):
        return error
    if isinstance(error, OSError):
        return Internal(f"the server's disk failed: {error.strerror or error}", remedy="Is it full? See `dsec doctor`.")
    if isinstance(error, ValueError):
        return InvalidRequest(str(error))
    raise error


async def _send(x: Exchange, pieces: Iterator[bytes]) -> None:
    await x.begin(200, _TAR)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        if piece:
            await x.more(piece)
    await x.finish()

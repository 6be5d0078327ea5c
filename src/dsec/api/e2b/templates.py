"""E2B's template builds: POST a name, PUT archives, POST the steps, ask how it goes.

Owns the builds (in memory: a build ends with its server) and the tickets of uploads. A template is an environment; a
tag other than `default` is one of its own, `NAME:TAG`. Archives are kept for a day, each project's apart.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from dsec.api.e2b.call import Call
from dsec.api.e2b.config import E2bConfig
from dsec.api.e2b.models import timestamp
from dsec.api.layers import as_ours
from dsec.builder import templates
from dsec.builder.service import BuildService
from dsec.builder.templates import Step, StepFailed
from dsec.edge.client import Principal
from dsec.errors import Conflict, DsecError, InvalidRequest, NotFound, PermissionDenied, TooLarge, Unsupported
from dsec.spec.building import BuildLimits
from dsec.spec.sandbox import NAME_PATTERN

_MAX_BUILDS = 500
_MAX_TICKETS = 10_000
_MAX_LOGS = 2000
_MAX_LINE = 500
_PAGE = 100
_TICKET_S = 3600.0
_KEPT_S = 86_400.0
_IMAGES = {"e2bdev/base": "base", "e2bdev/code-interpreter": "code-interpreter-v1"}
"""E2B's own images, which are templates here."""
DEFAULT_TAG = "default"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}")
_log = logging.getLogger("dsec.api")

Natural = Annotated[int, Meta(ge=0, le=1 << 24)]
Text = Annotated[str, Meta(max_length=1 << 20)]


class NewTemplate(Struct, rename="camel", kw_only=True):
    """Body of `POST /v3/templates`."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    tags: Annotated[list[str], Meta(max_length=20)] | None = None
    cpu_count: Annotated[int, Meta(ge=1, le=4096)] | None = None
    memory_mb: Annotated[int, Meta(ge=16, le=1 << 24)] | None = msgspec.field(name="memoryMB", default=None)
    min_free_disk_mb: Natural | None = None


class TemplateStep(Struct, rename="camel", kw_only=True):
    """One step of a build."""

    type: Annotated[str, Meta(max_length=100)]
    args: Annotated[list[Text], Meta(max_length=2000)] = []
    files_hash: Annotated[str, Meta(max_length=200)] | None = None
    force: bool | None = None


class StartBuild(Struct, rename="camel", kw_only=True):
    """Body of `POST /v2/templates/{id}/builds/{build}`."""

    from_image: Annotated[str, Meta(max_length=1000)] | None = None
    from_template: Annotated[str, Meta(max_length=300)] | None = None
    from_image_registry: dict[str, Any] | None = None
    force: bool | None = None
    steps: Annotated[list[TemplateStep], Meta(max_length=templates.MAX_STEPS)] = []
    start_cmd: Text | None = None
    ready_cmd: Text | None = None


class Requested(Struct, frozen=True, rename={"template_id": "templateID", "build_id": "buildID"}):
    """Answer to `POST /v3/templates`."""

    template_id: str
    build_id: str
    public: bool
    names: list[str]
    tags: list[str]
    aliases: list[str]


class FileLink(Struct, frozen=True, omit_defaults=True):
    """Where an archive is to be put."""

    present: bool
    url: str


class LogEntry(Struct, frozen=True, omit_defaults=True):
    """One line of a build."""

    timestamp: str
    message: str
    level: str
    step: str | None = None


class Reason(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Why a build failed."""

    message: str
    step: str | None = None
    log_entries: list[LogEntry] = []


class BuildStatus(
    Struct,
    frozen=True,
    omit_defaults=True,
    rename={"template_id": "templateID", "build_id": "buildID", "log_entries": "logEntries"},
):
    """Answer to `GET /templates/{id}/builds/{build}/status`."""

    template_id: str
    build_id: str
    status: str
    logs: list[str]
    log_entries: list[LogEntry]
    reason: Reason | None = None


class Build:
    """One build, waiting for its steps, under way or over."""

    def __init__(self, project: str, template: str, names: list[str], new: NewTemplate) -> None:
        self.id = str(uuid.uuid4())
        self.project = project
        self.template = template
        self.names = names
        """Of the environments that it becomes."""
        self.new = new
        self.status = "waiting"
        self.logs: list[LogEntry] = []
        self.reason: Reason | None = None
        self.step: str | None = None
        self.task: asyncio.Task[None] | None = None

    def say(self, line: str, level: str = "info") -> None:
        if len(self.logs) < _MAX_LOGS or level == "error":
            self.logs.append(LogEntry(timestamp(time.time()), line[:_MAX_LINE], level, self.step))


_new = msgspec.json.Decoder(NewTemplate)
_start = msgspec.json.Decoder(StartBuild)


class Templates:
    """The handlers."""

    def __init__(self, builder: BuildService, config: E2bConfig) -> None:
        self._builder = builder
        self._config = config
        self._builds: OrderedDict[str, Build] = OrderedDict()
        self._tickets: OrderedDict[str, tuple[str, str, float]] = OrderedDict()
        """Ticket -> project, hash, until when."""
        self._archives = builder.layers.layers.root.parent / "contexts"
        self._archives.mkdir(exist_ok=True)

    async def request(self, call: Call, principal: Principal) -> None:
        """POST /v3/templates"""
        x = call.x
        new = x.decode(_new, await x.body())
        template, tags = self._tags(new)
        names = [template if tag == DEFAULT_TAG else f"{template}:{tag}" for tag in tags]
        build = Build(principal.project, template, names, new)
        self._builds[build.id] = build
        while len(self._builds) > _MAX_BUILDS:
            oldest = next((each for each in self._builds.values() if each.task is None or each.task.done()), None)
            if oldest is None:
                del self._builds[build.id]
                raise TooLarge("too many builds at once", remedy="Wait for others to end.")
            del self._builds[oldest.id]
        await x.answer(202, Requested(template, build.id, False, names, tags, [template]))

    def _tags(self, new: NewTemplate) -> tuple[str, list[str]]:
        template, _, tag = new.name.partition(":")
        tags = list(dict.fromkeys([*([tag] if tag else []), *(new.tags or [])])) or [DEFAULT_TAG]
        if not re.fullmatch(NAME_PATTERN, template) or not all(_TAG.fullmatch(each) for each in tags):
            raise InvalidRequest(
                f"not a name for a template: {new.name!r}", remedy=f"Like {NAME_PATTERN}, or NAME:TAG."
            )
        if template in self._config.templates:
            raise Conflict(f"the template {template!r} stands for another environment here", remedy="Use another name.")
        return template, tags

    async def link(self, call: Call, template: str, digest: str, principal: Principal) -> None:
        """GET /templates/{id}/files/{hash}"""
        x = call.x
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", digest):
            raise InvalidRequest("not a hash")
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = (principal.project, digest, time.time() + _TICKET_S)
        while len(self._tickets) > _MAX_TICKETS:
            self._tickets.popitem(last=False)
        scheme = call.header(b"x-forwarded-proto") or str(x.scope.get("scheme", "http"))
        path = x.scope["raw_path"].decode("ascii")
        url = f"{scheme}://{x.host.decode('latin-1')}{path}?ticket={ticket}"
        present = await asyncio.to_thread(self._archive(principal.project, digest).exists)
        await x.answer(201, FileLink(present, url))

    async def receive(self, call: Call, digest: str) -> None:
        """PUT /templates/{id}/files/{hash}?ticket="""
        x = call.x
        project, expected, until = self._tickets.get(x.text("ticket") or "", ("", "", 0.0))
        if not project or expected != digest or time.time() > until:
            raise PermissionDenied("the link is none of ours, or too old", remedy="Ask for a new one.")
        with self._builder.layers.layers.scratch() as scratch:
            path = Path(scratch) / "archive"
            await self._builder.layers.spool(x.chunks(), path)
            await asyncio.to_thread(path.rename, self._archive(project, digest))
        await asyncio.to_thread(self._tidy)
        await x.answer(200, {})

    def _archive(self, project: str, digest: str) -> Path:
        return self._archives / hashlib.sha256(f"{project}\0{digest}".encode()).hexdigest()

    def _tidy(self) -> None:
        for path in self._archives.iterdir():
            if path.stat().st_mtime < time.time() - _KEPT_S:
                path.unlink(missing_ok=True)

    async def start(self, call: Call, build_id: str, principal: Principal) -> None:
        """POST /v2/templates/{id}/builds/{build}"""
        x = call.x
        plan = x.decode(_start, await x.body(16 << 20))
        build = self._find(build_id, principal)
        if build.task is not None:
            raise Conflict("this build was started already", remedy="Ask for a new one.")
        base = self._base(plan)
        steps = [self._step(step, build, force=bool(plan.force)) for step in plan.steps]
        self._builder.layers.environments.refresh()
        build.status = "building"
        build.task = self._builder.background(self._run(build, plan, base, steps, principal))
        await x.answer(202, {})

    def _base(self, plan: StartBuild) -> tuple[str, str | None]:
        if bool(plan.from_image) == bool(plan.from_template):
            raise InvalidRequest("a build begins from an image or from a template")
        registry = plan.from_image_registry
        credentials = None
        if registry:
            if registry.get("type") != "registry":
                raise Unsupported(f"registries of the kind {str(registry.get('type'))[:50]!r} are not supported")
            credentials = f"{registry.get('username', '')}:{registry.get('password', '')}"
        if plan.from_template:
            return self._config.environment(plan.from_template.removesuffix(f":{DEFAULT_TAG}")), None
        image = plan.from_image or ""
        name = _IMAGES.get(image.partition(":")[0])
        return (self._config.environment(name) if name and not registry else image), credentials

    def _step(self, step: TemplateStep, build: Build, *, force: bool) -> Step:
        archive = None
        if step.files_hash:
            archive = self._archive(build.project, step.files_hash)
            if not archive.exists():
                raise InvalidRequest("the files of a COPY were never sent", remedy="PUT them to their link first.")
        return Step(type=step.type, args=step.args, archive=archive, fresh=force or bool(step.force))

    async def _run(
        self, build: Build, plan: StartBuild, base: tuple[str, str | None], steps: list[Step], principal: Principal
    ) -> None:
        new = build.new

        def began(step: str) -> None:
            build.step = step

        labels = templates.labels_of(
            start=plan.start_cmd,
            ready=plan.ready_cmd,
            cpus=new.cpu_count,
            memory_mb=new.memory_mb,
            disk_mb=new.min_free_disk_mb,
        )
        network = self._config.build_network
        try:
            async with self._builder.workshop(principal, build.say, network=network, limits=BuildLimits()) as (
                shop,
                scratch,
            ):
                stage = await templates.build(
                    shop, base[0], steps, scratch, labels=labels, credentials=base[1], began=began
                )
                layers = await shop.finish(stage)
                for name in build.names:
                    await self._builder.named(build.project, name, layers, stage, description="an E2B template")
            build.say("the template is ready")
            build.status = "ready"
        except StepFailed as failed:
            _fail(build, failed.cause.message, failed.step)
        except (DsecError, OSError, ValueError) as error:
            _fail(build, as_ours(error).message, build.step)
        except BaseException as error:
            _fail(build, "the server was stopped, or has a bug", build.step)
            if isinstance(error, Exception):
                _log.exception("template build %s failed", build.id)
            raise

    async def status(self, call: Call, build_id: str, principal: Principal) -> None:
        """GET /templates/{id}/builds/{build}/status"""
        x = call.x
        x.check_query("logsOffset", "limit", "level")
        build = self._find(build_id, principal)
        offset = x.natural("logsOffset") or 0
        entries = build.logs[offset : offset + _PAGE]
        await x.answer(200, BuildStatus(build.template, build.id, build.status, [], entries, build.reason))

    async def remove(self, call: Call, template: str, principal: Principal) -> None:
        """DELETE /templates/{id}: all its tags."""
        environments = self._builder.layers.environments
        name = template.removesuffix(f":{DEFAULT_TAG}")
        mine = [each.name for each in environments.list(principal.project) if each.project == principal.project]
        found = [each for each in mine if each == name or each.startswith(f"{name}:")]
        if not found:
            raise NotFound(f"there is no template {template[:200]!r}")
        for each in found:
            await asyncio.to_thread(environments.remove, each, principal.project)
        await self._builder.layers.publish()
        await call.x.empty()

    def _find(self, build_id: str, principal: Principal) -> Build:
        build = self._builds.get(build_id)
        if build is None or build.project != principal.project:
            raise NotFound(f"there is no build {build_id[:100]!r}", remedy="Builds end with the server.")
        return build


def _fail(build: Build, message: str, step: str | None) -> None:
    build.say(message, "error")
    build.reason = Reason(message, step, build.logs[-20:])
    build.status = "error"

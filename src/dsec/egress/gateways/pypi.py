"""`pypi`: a package index, read-only, perhaps as it was at an earlier date and without some projects.

Inside: `/simple/PROJECT/` and `/files/PROJECT/FILE`. A file is looked up on its project's page each time, so that what
a page hides can't be fetched by its address either, and its bytes must have the digest that the page names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from aiohttp import web
from msgspec import Struct
from packaging.utils import canonicalize_name
from packaging.version import Version
from yarl import URL

from dsec.egress.gateway import Grant
from dsec.egress.gateways import simple
from dsec.egress.gateways.answers import Refusal, UpstreamError, broken, forbidden, missing
from dsec.egress.gateways.base import BaseGateway, Call, Shared, moment
from dsec.egress.gateways.config import Upstream, default_pypi
from dsec.egress.gateways.parsed import Parsed
from dsec.egress.gateways.rules import Either, ReleaseOptions, Rules

HOST = "pypi.dsec"
_PROJECT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,198}[A-Za-z0-9])?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+!-]{0,254}")


class PypiOptions(ReleaseOptions, frozen=True):
    """What a `pypi` permission may say: entries like `requests`, `requests<2.32`."""

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> Rules[Version | None]:
        """Raises `ValueError`."""
        return self.read(simple.Rule.read)


class PypiGateway(BaseGateway):
    """Serves `pypi`."""

    kinds = ("pypi",)
    hosts = (HOST,)
    options = PypiOptions

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._found = shared.config.pypi
        self._parsed: Parsed[simple.Page] = Parsed()

    async def serve(self, call: Call) -> web.StreamResponse:
        call.reading()
        rules = Either([self.read_options(each, PypiOptions).rules() for each in call.visit.grants])
        match call.path():
            case ["simple", project] | ["simple", project, ""] if project:
                return await self._page(call, rules, project)
            case ["simple"] | ["simple", ""]:
                return await self._projects(call, rules)
            case ["files", project, filename]:
                return await self._file(call, rules, project, filename)
        raise missing("this gateway has /simple/PROJECT/ and the files that its pages name")

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        index = f"http://{HOST}/simple/"
        return {
            "PIP_INDEX_URL": index,
            "PIP_TRUSTED_HOST": HOST,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "UV_DEFAULT_INDEX": index,
            "UV_INDEX_URL": index,
            "UV_INSECURE_HOST": HOST,
            "PDM_PYPI_URL": index,
            "PIPENV_PYPI_MIRROR": index,
        }

    async def _projects(self, call: Call, rules: Either[Version | None]) -> web.StreamResponse:
        listed = [each.within if each.allow is None else each.allow for each in rules.rules]
        if None in listed:
            raise missing("the list of all projects isn't served: ask for a project's page")
        names = sorted({rule.name for allow in listed for rule in allow or () if rules.package(rule.name)})
        if simple.JSON_TYPE in call.request.headers.get("Accept", ""):
            body = {"meta": {"api-version": "1.0"}, "projects": [{"name": name} for name in names]}
            return await call.page(msgspec.json.encode(body), {"Content-Type": simple.JSON_TYPE, "Vary": "Accept"})
        links = "\n".join(f'<a href="{name}/">{name}</a>' for name in names)
        page = f"<!DOCTYPE html>\n<html><body>\n{links}\n</body></html>\n"
        return await call.page(page.encode(), {"Content-Type": "text/html; charset=utf-8", "Vary": "Accept"})

    async def _page(self, call: Call, rules: Either[Version | None], project: str) -> web.StreamResponse:
        page, hidden = await self._shown(call, rules, _name(project))
        if hidden and not page.files:
            reasons = "; ".join(dict.fromkeys(list(hidden.values())[-3:]))
            raise missing(f"all releases of {page.name} are hidden by the permission {call.permission}: {reasons}")
        call.noted |= {"project": page.name, "hidden": len(hidden)}
        headers = {"Vary": "Accept", "Cache-Control": "max-age=0"}

        def link(file: simple.File) -> str:
            return f"../../files/{page.name}/{file.filename}"

        if _wants_json(call.request.headers.get("Accept", "")):
            return await call.page(simple.render_json(page, link), {**headers, "Content-Type": simple.JSON_TYPE})
        return await call.page(simple.render_html(page, link), {**headers, "Content-Type": "text/html; charset=utf-8"})

    async def _file(self, call: Call, rules: Either[Version | None], project: str, filename: str) -> web.StreamResponse:
        if not _FILE.fullmatch(filename):
            raise missing(f"{project} has no such file")
        page, hidden = await self._shown(call, rules, _name(project))
        wanted = filename.removesuffix(".metadata")
        if wanted in hidden:
            raise forbidden(call.permission, f"{wanted} is hidden: {hidden[wanted]}")
        file = next((each for each in page.files if each.filename == wanted), None)
        if file is None:
            raise missing(f"{page.name} has no file {wanted}")
        url, sha256 = URL(file.url, encoded=True), file.hashes.get("sha256")
        if filename != wanted:
            if not file.metadata:
                raise missing(f"{wanted} has no metadata file")
            url = url.with_path(url.raw_path + ".metadata", encoded=True)
            sha256 = file.metadata.get("sha256") if isinstance(file.metadata, dict) else None
        call.noted |= {"project": page.name, "file": filename}
        item = await self.fetch_file(
            call, await self._upstream(call), url, sha256=sha256, missing_text=f"the index has no file {filename}"
        )
        try:
            return await call.item(item, {"Content-Type": "application/octet-stream"})
        finally:
            item.close()

    async def _upstream(self, call: Call) -> Upstream:
        if self._found is None:
            self._found = await default_pypi()
            if self._found is not None:
                self.trust(self._found)
        if self._found is None:
            raise broken(call.permission, "no package index is configured on this node")
        return self._found

    async def _shown(
        self, call: Call, rules: Either[Version | None], project: str
    ) -> tuple[simple.Page, dict[str, str]]:
        """A project's page as the rules show it, and why which of its files is hidden."""
        if not rules.package(project):
            raise forbidden(call.permission, f"it doesn't include the project {project}")
        upstream = await self._upstream(call)
        base = URL(upstream.url.rstrip("/") + f"/{project}/")
        body, item = await self.read_page(
            call, upstream, base, {"Accept": simple.ACCEPT}, missing_text=f"the index has no project {project}"
        )
        try:
            kind = item.headers.get("Content-Type", "")
            page = self._parsed.get(
                f"{project} {kind} {item.sha256}", len(body), lambda: simple.parse(body, kind, base, project)
            )
        except simple.BadPage as error:
            raise UpstreamError(str(error)) from error
        times = {file.filename: moment(file.upload_time) for file in page.files}
        if rules.dated and None in times.values():
            times |= {name: at for name, at in (await self._times(call, upstream, project)).items() if at}
        hidden, shown = {}, []
        for file in page.files:
            if not _FILE.fullmatch(file.filename):
                continue
            why = rules.hidden(project, file.version(), times[file.filename])
            if why is None:
                shown.append(file)
            else:
                hidden[file.filename] = why
        # A name that is both shown and hidden would be a way around the rules.
        return simple.Page(project, [each for each in shown if each.filename not in hidden], page.meta), hidden

    async def _times(self, call: Call, upstream: Upstream, project: str) -> dict[str, datetime | None]:
        """When which file was uploaded, from the older JSON API of an index whose pages don't say so; nothing where it
        hasn't one, so that all its files stay hidden."""
        root = upstream.url.rstrip("/")
        if not root.endswith("/simple"):
            return {}
        url = URL(f"{root.removesuffix('simple')}pypi/{project}/json")
        try:
            body, _ = await self.read_page(
                call, upstream, url, {"Accept": "application/json"}, missing_text="no such API"
            )
            found = msgspec.json.decode(body, type=_Json)
        except msgspec.MsgspecError as error:
            raise UpstreamError(f"not a project of the JSON API: {error}") from error
        except Refusal:
            return {}
        return {each.filename: moment(each.upload_time_iso_8601) for files in found.releases.values() for each in files}


class _JsonFile(Struct):
    filename: str
    upload_time_iso_8601: str | None = None


class _Json(Struct):
    releases: dict[str, list[_JsonFile]]


def _name(project: str) -> str:
    if not _PROJECT.fullmatch(project):
        raise missing("not the name of a project")
    return canonicalize_name(project)


def _wants_json(accept: str) -> bool:
    """Whether the JSON form is preferred, by the weights of an Accept header."""
    weights = {}
    for each in accept.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        weights[kind.lower()] = float(weight) if re.fullmatch(r"[01](\.\d{0,3})?", weight) else 0.0
    json = max(weights.get(simple.JSON_TYPE, 0.0), weights.get("application/vnd.pypi.simple.latest+json", 0.0))
    return json > 0 and json >= max(weights.get(simple.HTML_TYPE, 0.0), weights.get("text/html", 0.0))

"""`npm`: a registry of JavaScript packages, read-only, perhaps as it was at an earlier date and without some packages.

Inside: `/NAME` (packuments, full or abbreviated), `/NAME/VERSION`, `/NAME/-/FILE.tgz`. A tarball is looked up in its
packument each time, so that what that hides can't be fetched by its address either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from yarl import URL

from dsec.egress.gateway import Grant
from dsec.egress.gateways.answers import Refusal, UpstreamError, broken, forbidden, missing
from dsec.egress.gateways.base import BaseGateway, Call, Shared
from dsec.egress.gateways.config import Upstream, default_npm
from dsec.egress.gateways.packument import ABBREVIATED, abbreviated, filtered, linked
from dsec.egress.gateways.parsed import Parsed
from dsec.egress.gateways.paths import BadPath, segments, spell
from dsec.egress.gateways.rules import Either, ReleaseOptions, Rules
from dsec.egress.gateways.semver import Rule

HOST = "npm.dsec"
_PART = re.compile(r"[A-Za-z0-9_~!*'()-][A-Za-z0-9._~!*'()-]{0,213}")
_SCOPED = re.compile(r"(/@[^/%]+)%2f", re.IGNORECASE)


class NpmOptions(ReleaseOptions, frozen=True):
    """What an `npm` permission may say: entries like `lodash`, `@scope/name`, `lodash@<4.17.21`."""

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> Rules[str]:
        """Raises `ValueError`."""
        return self.read(Rule.read)


class NpmGateway(BaseGateway):
    """Serves `npm`."""

    kinds = ("npm",)
    hosts = (HOST,)
    options = NpmOptions

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._found = shared.config.npm
        self._parsed: Parsed[dict[str, Any]] = Parsed()

    async def serve(self, call: Call) -> web.StreamResponse:
        call.reading()
        rules = Either([self.read_options(each, NpmOptions).rules() for each in call.visit.grants])
        try:
            # Clients write a scope's slash encoded: the one encoded slash that means something.
            path = segments(_SCOPED.sub(r"\1/", call.request.rel_url.raw_path, count=1))
        except BadPath as error:
            raise Refusal(400, f"not a path that this gateway takes: {error}") from error
        if path == ["-", "ping"]:
            return await call.page(b"{}", {"Content-Type": "application/json"})
        name, rest = _split(path)
        if name is None:
            raise forbidden(call.permission, "packages can be read, nothing else of a registry")
        match rest:
            case []:
                return await self._packument(call, rules, name)
            case ["-", filename]:
                return await self._tarball(call, rules, name, filename)
            case [version]:
                return await self._manifest(call, rules, name, version)
        raise missing("a package has versions and tarballs, nothing below them")

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        registry = f"http://{HOST}/"
        return {
            "npm_config_registry": registry,
            "npm_config_audit": "false",
            "npm_config_fund": "false",
            "npm_config_update_notifier": "false",
            "npm_config_replace_registry_host": "always",  # of addresses in lock files
            "YARN_REGISTRY": registry,
            "YARN_NPM_REGISTRY_SERVER": registry,
            "YARN_UNSAFE_HTTP_WHITELIST": HOST,
        }

    async def _packument(self, call: Call, rules: Either[str], name: str) -> web.StreamResponse:
        document, hidden = await self._shown(call, rules, name)
        call.noted |= {"package": name, "hidden": len(hidden)}
        if hidden and not document["versions"]:
            reasons = "; ".join(dict.fromkeys(list(hidden.values())[-3:]))
            raise missing(f"all versions of {name} are hidden by the permission {call.permission}: {reasons}")
        short = ABBREVIATED in call.request.headers.get("Accept", "")
        document = _local(name, abbreviated(document) if short else document)
        kind = ABBREVIATED if short else "application/json"
        return await call.page(msgspec.json.encode(document), {"Content-Type": kind, "Vary": "Accept"})

    async def _manifest(self, call: Call, rules: Either[str], name: str, version: str) -> web.StreamResponse:
        document, hidden = await self._shown(call, rules, name)
        version = document["dist-tags"].get(version, version)
        if version in hidden:
            raise forbidden(call.permission, f"{name}@{version} is hidden: {hidden[version]}")
        if version not in document["versions"]:
            raise missing(f"{name} has no version {version}")
        call.noted |= {"package": name, "version": version}
        manifest = _local(name, document)["versions"][version]
        return await call.page(msgspec.json.encode(manifest), {"Content-Type": "application/json"})

    async def _tarball(self, call: Call, rules: Either[str], name: str, filename: str) -> web.StreamResponse:
        document, hidden = await self._shown(call, rules, name, everything=True)
        for version, manifest in document["versions"].items():
            url = URL(str(manifest["dist"].get("tarball", "")), encoded=True)
            if url.name != filename:
                continue
            if version in hidden:
                raise forbidden(call.permission, f"{name}@{version} is hidden: {hidden[version]}")
            call.noted |= {"package": name, "version": version}
            # npm checks the digest that the packument names: it is kept as it is.
            item = await self.fetch_file(
                call, await self._upstream(call), url, sha256=None, missing_text=f"the registry has no {filename}"
            )
            try:
                return await call.item(item, {"Content-Type": "application/octet-stream"})
            finally:
                item.close()
        raise missing(f"{name} has no tarball {filename}")

    async def _upstream(self, call: Call) -> Upstream:
        if self._found is None:
            self._found = await default_npm()
            if self._found is not None:
                self.trust(self._found)
        if self._found is None:
            raise broken(call.permission, "no npm registry is configured on this node")
        return self._found

    async def _shown(
        self, call: Call, rules: Either[str], name: str, *, everything: bool = False
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """A package as the rules show it (or all of it), and why which version is hidden."""
        if not rules.package(name):
            raise forbidden(call.permission, f"it doesn't include the package {name}")
        upstream = await self._upstream(call)
        parts = [name.replace("/", "%2f")] if name.startswith("@") else [name]
        base = URL(upstream.url)
        url = base.with_path(base.raw_path.rstrip("/") + "/" + parts[0], encoded=True)
        # Without a date the short form does, which for old packages is a tenth of the full one.
        short = not rules.dated and ABBREVIATED in call.request.headers.get("Accept", "")
        accept = ABBREVIATED if short else "application/json"
        body, item = await self.read_page(
            call, upstream, url, {"Accept": accept}, missing_text=f"the registry has no package {name}"
        )
        try:
            document = self._parsed.get(item.sha256, len(body), lambda: msgspec.json.decode(body, type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise UpstreamError(f"not a description of a package: {error}") from error
        shown, hidden = filtered(document, name, rules)
        return (filtered(document, name, None)[0] if everything else shown), hidden


def _split(path: list[str]) -> tuple[str | None, list[str]]:
    """A package's name and what follows; None where the path isn't a package's."""
    scoped = path[0].startswith("@")
    name = path[: 2 if scoped else 1]
    plain = [name[0].removeprefix("@"), *name[1:]]
    if len(name) != (2 if scoped else 1) or not all(_PART.fullmatch(part) for part in plain) or name[0] == "-":
        return None, []
    rest = path[len(name) :]
    return "/".join(name), rest[:-1] if rest and not rest[-1] else rest


def _local(name: str, document: dict[str, Any]) -> dict[str, Any]:
    return linked(document, lambda url: f"http://{HOST}{spell([*name.split('/'), '-', URL(url, encoded=True).name])}")

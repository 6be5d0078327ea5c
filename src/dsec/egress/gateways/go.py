"""`go`: a Go module proxy, perhaps as it was at an earlier date and without some modules; the checksum database by way
of it, so that the client's own verification goes on.

A version's date is the `Time` of its `.info`; what has a later one, or none, is in no list and can't be fetched.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from yarl import URL

from dsec.egress.gateway import Grant
from dsec.egress.gateways.answers import Refusal, UpstreamError, broken, forbidden, missing
from dsec.egress.gateways.base import BaseGateway, Call, Shared, moment
from dsec.egress.gateways.cache import Item
from dsec.egress.gateways.config import Upstream, default_go
from dsec.egress.gateways.paths import spell
from dsec.egress.gateways.rules import Either, ReleaseOptions, Rules
from dsec.egress.gateways.semver import Rule, order

HOST = "go.dsec"
AT_ONCE = 16
"""How many descriptions of versions are asked for at the same time."""
_PART = re.compile(r"[A-Za-z0-9!._~+-]{1,255}")
_FILE = re.compile(r"(.+)\.(info|mod|zip)")
_TYPES = {"info": "application/json", "mod": "text/plain; charset=utf-8", "zip": "application/zip"}
_LOOKUP = re.compile(r"(.+)@([^@/]+)")


class GoOptions(ReleaseOptions, frozen=True):
    """What a `go` permission may say: entries like `example.com/module`, `example.com/*`,
    `example.com/module@<v1.2.0`."""

    def __post_init__(self) -> None:
        self.rules()

    def rules(self, below: str = "") -> Rules[str]:
        """`below`: only this module and those below its path. Raises `ValueError`."""
        return self.read(Rule.read, below)


class GoGateway(BaseGateway):
    """Serves `go`."""

    kinds = ("go",)
    hosts = (HOST,)
    options = GoOptions

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._found = shared.config.go

    async def serve(self, call: Call) -> web.StreamResponse:
        call.reading()
        rules = Either([self.read_options(each, GoOptions).rules(each.argument) for each in call.visit.grants])
        path = call.path()
        if not all(_PART.fullmatch(part.replace("@", "")) for part in path):
            raise missing("not a path of the module proxy protocol")
        if path[0] == "sumdb" and len(path) > 2:
            return await self._checksums(call, rules, path)
        if path[-1] == "@latest":
            return await self._latest(call, rules, path[:-1])
        if len(path) > 2 and path[-2] == "@v":
            module, last = path[:-2], path[-1]
            self._module(call, rules, module)
            if last == "list":
                return await self._plain(call, "\n".join(await self._versions(call, rules, module)), "text/plain")
            if found := _FILE.fullmatch(last):
                await self._check(call, rules, module, found[1])
                return await self._file(call, [*module, "@v", last], _TYPES[found[2]])
        raise missing("not a path of the module proxy protocol")

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        return {
            "GOPROXY": f"http://{HOST}",
            "GOTOOLCHAIN": "local",
            **({} if self._shared.config.go_checksums else {"GOSUMDB": "off"}),
        }

    def _module(self, call: Call, rules: Either[str], module: list[str]) -> str:
        """A module's real name, if it may be had. Raises `Refusal`."""
        name = re.sub("!([a-z])", lambda found: found[1].upper(), "/".join(module))
        if not rules.package(name):
            raise forbidden(call.permission, f"it doesn't include the module {name}")
        call.noted["module"] = name
        return name

    async def _versions(self, call: Call, rules: Either[str], module: list[str]) -> list[str]:
        """The versions that are shown."""
        name = self._module(call, rules, module)
        text = await self._read(call, [*module, "@v", "list"])
        versions = [each.split()[0] for each in text.decode("utf-8", "replace").splitlines() if each.strip()]
        versions = [each for each in versions if _PART.fullmatch(each)]
        gate = asyncio.Semaphore(AT_ONCE)

        async def shown(version: str) -> bool:
            if not rules.dated:
                return rules.hidden(name, version, None) is None
            async with gate:
                try:
                    info = await self._info(call, module, version)
                except Refusal:
                    return False
            return rules.hidden(name, version, moment(info.get("Time"))) is None

        keep = await asyncio.gather(*(shown(version) for version in versions))
        return [version for version, kept in zip(versions, keep, strict=True) if kept]

    async def _latest(self, call: Call, rules: Either[str], module: list[str]) -> web.StreamResponse:
        name = self._module(call, rules, module)
        info: dict[str, Any] = msgspec.json.decode(await self._read(call, [*module, "@latest"]))
        if rules.hidden(name, str(info.get("Version")), moment(info.get("Time"))) is not None:
            versions = [
                (key[3], key, each) for each in await self._versions(call, rules, module) if (key := order(each))
            ]
            if not versions:
                raise forbidden(call.permission, f"all versions of {name} are hidden")
            info = await self._info(call, module, max(versions)[2])
        return await self._plain(call, msgspec.json.encode(info).decode(), "application/json")

    async def _check(self, call: Call, rules: Either[str], module: list[str], version: str) -> None:
        """Raises `Refusal` where a version is hidden."""
        name = self._module(call, rules, module)
        published = None
        if rules.dated:
            published = moment((await self._info(call, module, version)).get("Time"))
        if why := rules.hidden(name, version, published):
            raise forbidden(call.permission, f"{name}@{version} is hidden: {why}")

    async def _checksums(self, call: Call, rules: Either[str], path: list[str]) -> web.StreamResponse:
        if path[2] == "lookup":
            found = _LOOKUP.fullmatch("/".join(path[3:]))
            if found is None:
                raise missing("not a lookup of the checksum database")
            await self._check(call, rules, found[1].split("/"), found[2])
        elif path[2] not in {"supported", "latest", "tile"}:
            raise missing("not a path of the checksum database")
        body = await self._read(call, path)
        return await call.page(body, {"Content-Type": "application/octet-stream"})

    async def _file(self, call: Call, path: list[str], content_type: str) -> web.StreamResponse:
        upstream, url = await self._upstream(call, path)
        item: Item = await self.fetch_file(
            call, upstream, url, sha256=None, missing_text=f"the module proxy has no {path[-1]}"
        )
        try:
            return await call.item(item, {"Content-Type": content_type})
        finally:
            item.close()

    async def _info(self, call: Call, module: list[str], version: str) -> dict[str, Any]:
        upstream, url = await self._upstream(call, [*module, "@v", f"{version}.info"])
        missing_text = f"the module proxy has no version {version}"
        if order(version) is None:  # a branch: what it means changes
            body, _ = await self.read_page(call, upstream, url, {}, missing_text=missing_text)
        else:
            item = await self.fetch_file(call, upstream, url, sha256=None, missing_text=missing_text)
            try:
                body = await item.whole()
            finally:
                item.close()
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise UpstreamError("the description of a version isn't one") from error

    async def _read(self, call: Call, path: list[str]) -> bytes:
        upstream, url = await self._upstream(call, path)
        body, _ = await self.read_page(call, upstream, url, {}, missing_text=f"the module proxy has no {path[-1]}")
        return body

    async def _plain(self, call: Call, text: str, content_type: str) -> web.StreamResponse:
        return await call.page(f"{text}\n".encode(), {"Content-Type": content_type})

    async def _upstream(self, call: Call, path: list[str]) -> tuple[Upstream, URL]:
        if self._found is None:
            self._found = await default_go()
            if self._found is not None:
                self.trust(self._found)
        if self._found is None:
            raise broken(call.permission, "no module proxy is configured on this node")
        return self._found, URL(self._found.url.rstrip("/") + spell(path), encoded=True)

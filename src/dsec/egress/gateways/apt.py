"""`apt`: Debian repositories, read-only, by the very addresses that are in a `sources.list`: it answers for the hosts
of the configured repositories, and passes on what is below their paths. What is signed stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from aiohttp import web
from msgspec import Struct
from yarl import URL

from dsec.egress.gateway import Grant
from dsec.egress.gateways.answers import Refusal, forbidden
from dsec.egress.gateways.base import BaseGateway, Call, Shared
from dsec.egress.gateways.config import Upstream, default_apt
from dsec.egress.gateways.paths import spell

HOST = "apt.dsec"
_FOREVER = re.compile(r".*/by-hash/[^/]+/[0-9a-f]+|.*\.(deb|udeb|dsc)|.*/pool/.*\.(tar\.[a-z0-9]+|diff\.gz|asc)")


class AptOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What an `apt` permission may say."""

    suites: list[str] | None = None
    """Only these (`stable`, `stable-updates`); absent: all of the configured repositories."""
    hosts: list[str] | None = None
    """Only the repositories of these hosts."""


class AptGateway(BaseGateway):
    """Serves `apt`."""

    kinds = ("apt",)
    options = AptOptions

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        configured = shared.config.apt
        self._repositories = default_apt() if configured is None else configured
        for each in self._repositories:
            self.trust(each)
        self.hosts = (HOST, *dict.fromkeys(str(URL(each.url).host) for each in self._repositories))

    async def serve(self, call: Call) -> web.StreamResponse:
        call.reading()
        options = self.read_options(call.grant, AptOptions)
        path = call.path()
        host = call.request.host.lower().removesuffix(":80").rstrip(".")
        if host == HOST:
            host, path = path[0].lower(), path[1:]
        upstream = self._repository(call, host, path)
        url = URL(upstream.url)
        if options.hosts is not None and url.host not in options.hosts:
            raise forbidden(call.permission, f"it doesn't include the repositories of {url.host}")
        if "dists" in path and options.suites is not None:
            suite = "/".join(path[path.index("dists") + 1 :]) + "/"
            if not any(suite.startswith(f"{each}/") for each in options.suites):
                raise forbidden(call.permission, f"it doesn't include the suite of {spell(path)[:200]}")
        target = URL(f"{url.origin()}{spell(path)}", encoded=True)
        call.noted["host"] = url.authority
        if _FOREVER.fullmatch(spell(path)):
            item = await self.fetch_file(
                call, upstream, target, sha256=None, missing_text="the repository has no such file"
            )
        else:
            item = await self.fetch_page(
                call, upstream, target, {"Accept-Encoding": "identity"}, missing_text="the repository has no such file"
            )  # fmt: skip
        try:
            return await call.item(item, {"Content-Type": item.headers.get("Content-Type", "application/octet-stream")})
        finally:
            item.close()

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        return {}

    def _repository(self, call: Call, host: str, path: list[str]) -> Upstream:
        for each in self._repositories:
            url = URL(each.url)
            base = [part for part in url.path.split("/") if part]
            if host in {url.host, url.authority} and path[: len(base)] == base:
                return each
        raise Refusal(
            403,
            f"refused by the network policy of this sandbox (permission {call.permission}): {host}{spell(path)[:200]}"
            " is in no repository that this node serves",
        )

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
from dsec.egress.gateways.config import Repository, default_apt
from dsec.egress.gateways.paths import spell

HOST = "apt.dsec"
_MISSING = "the repository has no such file"
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
        self.hosts = (HOST, *dict.fromkeys(str(each.address.host) for each in self._repositories))

    async def serve(self, call: Call) -> web.StreamResponse:
        call.reading()
        options = self.read_options(call.grant, AptOptions)
        path = call.path()
        host = call.request.host.lower().removesuffix(":80").rstrip(".")
        if host == HOST:
            host, path = path[0].lower(), path[1:]
        repository, base = self._repository(call, host, path)
        if options.hosts is not None and repository.address.host not in options.hosts:
            raise forbidden(call.permission, f"it doesn't include the repositories of {host}")
        if "dists" in path and options.suites is not None:
            suite = "/".join(path[path.index("dists") + 1 :]) + "/"
            if not any(suite.startswith(f"{each}/") for each in options.suites):
                raise forbidden(call.permission, f"it doesn't include the suite of {spell(path)[:200]}")
        url = URL(repository.url)
        target = URL(f"{url.origin()}{url.raw_path.rstrip('/')}{spell(path[base:])}", encoded=True)
        call.noted["host"] = host
        if _FOREVER.fullmatch(spell(path)):
            item = await self.fetch_file(call, repository, target, sha256=None, missing_text=_MISSING)
        else:
            item = await self.fetch_page(
                call, repository, target, {"Accept-Encoding": "identity"}, missing_text=_MISSING
            )  # fmt: skip
        try:
            return await call.item(item, {"Content-Type": item.headers.get("Content-Type", "application/octet-stream")})
        finally:
            item.close()

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        return {}

    def _repository(self, call: Call, host: str, path: list[str]) -> tuple[Repository, int]:
        """The repository that a path is in, and how many of its segments lead there. Raises `Refusal`."""
        for each in self._repositories:
            base = [part for part in each.address.path.split("/") if part]
            if host in {each.address.host, each.address.authority} and path[: len(base)] == base:
                return each, len(base)
        raise Refusal(
            403,
            f"refused by the network policy of this sandbox (permission {call.permission}): {host}{spell(path)[:200]}"
            " is in no repository that this node serves",
        )

"""`http:HOST/path*`: a server outside, limited to paths and methods, with headers (credentials) added outside.

Inside: `/HOST/path` at `http.dsec`; or any path at a host's own name, where the egress sends plain HTTP for that name
here. A grant's argument names a host and a path (`/v1/models` that one, `/v1/*` all that begin so, none: all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web
from msgspec import Struct
from yarl import URL

from dsec.egress.gateway import Grant
from dsec.egress.gateways.answers import Refusal
from dsec.egress.gateways.base import BaseGateway, Call
from dsec.egress.gateways.config import Upstream
from dsec.egress.gateways.paths import allowed, spell, split_host
from dsec.egress.gateways.relay import BODY_BYTES, body, outgoing, relay
from dsec.errors import InvalidRequest
from dsec.plan.permissions import OWN_DOMAIN
from dsec.spec.network import host_name

HOST = "http.dsec"
_NEVER = frozenset({"CONNECT", "TRACE", "TRACK"})


class HttpOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What an `http:` permission may say."""

    methods: tuple[str, ...] = ("GET", "HEAD")
    paths: list[str] = []
    """Further limits: a path must be one of these too."""
    within: list[str] = []
    """The definition's `paths`, where the policy has some of its own."""
    headers: dict[str, str] = {}
    """Added outside; a value may name secrets (`Bearer secret:NAME`) that are for this host."""
    strip: list[str] = []
    """Headers of requests from inside that don't go out."""
    body_bytes: int = BODY_BYTES
    intercept: bool = False
    """The egress sends what is asked of the host itself by TLS, too."""


class HttpGateway(BaseGateway):
    """Serves `http:`."""

    kinds = ("http",)
    hosts = (HOST,)
    options = HttpOptions

    async def serve(self, call: Call) -> web.StreamResponse:
        path = call.path()
        asked = call.request.host.lower().removesuffix(":80").removesuffix(":443").rstrip(".")
        prefix = ""
        if asked == HOST or not any(self._host(grant) == asked for grant in call.visit.grants):
            asked, path = path[0].lower(), path[1:] or [""]
            prefix = f"/{asked}"
        call.grant, options = self._grant(call, asked, path)
        upstream = self._shared.config.http.get(asked) or Upstream(f"https://{asked}")
        private = self.credentials(call, upstream, options.headers)
        base = URL(upstream.url)
        url = URL(
            f"{base.origin()}{base.raw_path.rstrip('/')}{spell(path)}"
            + (f"?{query}" if (query := call.request.rel_url.raw_query_string) else ""),
            encoded=True,
        )

        def moved(target: URL) -> str | None:
            """A redirect within the same server stays one of the gateway's; another leads where it leads."""
            if target.origin() != base.origin():
                return None
            return f"{prefix}{target.raw_path}" + (f"?{target.raw_query_string}" if target.raw_query_string else "")

        return await relay(
            call,
            self._shared.outside,
            url,
            headers=outgoing(call.request.headers, list(private.values), options.strip),
            private=private,
            data=body(call, options.body_bytes) if call.request.body_exists else None,
            moved=moved,
        )

    def _grant(self, call: Call, host: str, path: list[str]) -> tuple[Grant, HttpOptions]:
        """The permission that allows this request. Raises `Refusal`."""
        method, denied = call.request.method, f"none allows {host}"
        for grant in call.visit.grants:
            try:
                own, pattern = split_host(self.target(grant))
            except ValueError:
                continue
            if own != host:
                continue
            options = self.read_options(grant, HttpOptions)
            call.grant = grant
            limits = [each for each in ([pattern], options.paths, options.within) if each]
            paths_ok = all(any(allowed(path, each) for each in limit) for limit in limits)
            if not paths_ok:
                denied = f"it doesn't include the path {spell(path)[:200]}"
            elif method not in {each.upper() for each in options.methods} or method in _NEVER:
                denied = f"it doesn't include the method {method}"
            else:
                return grant, options
        raise Refusal(403, f"refused by the network policy of this sandbox (permission http:{host}/...): {denied}")

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        return {}

    def check(self, grant: Grant) -> None:
        super().check(grant)
        try:
            host, _ = split_host(self.target(grant))
            if self.read_options(grant, HttpOptions).intercept and host_name(host).endswith(OWN_DOMAIN):
                raise ValueError(f"{host!r} is the platform's own")
        except ValueError as error:
            raise InvalidRequest(f"{grant.permission}: {error}", remedy="Write http:HOST/path*.") from error

    def _host(self, grant: Grant) -> str:
        try:
            return split_host(self.target(grant))[0]
        except ValueError:
            return ""

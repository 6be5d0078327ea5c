"""`git:HOST/ORG/REPO`: one repository by git's smart HTTP protocol, to fetch from; to push to where its option says so.

Inside: `/HOST/ORG/REPO/info/refs?service=...` and the two services; nothing of the older protocol of plain files. With
`refs` or `pins` a repository has only those refs, at those commits, and no other object can be asked for: that takes
version 2 of the protocol, which all clients since 2018 speak.
"""

from __future__ import annotations

import re
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from aiohttp import web
from msgspec import Struct
from yarl import URL

from dsec.egress.gateway import Grant
from dsec.egress.gateways.answers import Refusal, UpstreamError, forbidden
from dsec.egress.gateways.base import BaseGateway, Call, Shared
from dsec.egress.gateways.config import Upstream
from dsec.egress.gateways.outside import chunks
from dsec.egress.gateways.paths import spell, split_host
from dsec.egress.gateways.pktline import BadPacket, Command, RefRules, fetch_limited, read, write
from dsec.egress.gateways.relay import BODY_BYTES, body, outgoing, relay
from dsec.egress.gateways.secrets import Headers
from dsec.errors import InvalidRequest

HOST = "git.dsec"
REQUEST_BYTES = 16 << 20
"""The largest request that is read whole: one fetch's wants and haves."""
LISTING_BYTES = 256 << 20
REMEMBERED_S = 600.0
"""How long an object of a list of refs may be asked for, when the ref has moved meanwhile."""
_READ, _WRITE = "git-upload-pack", "git-receive-pack"
_REQUEST = f"application/x-{_READ}-request"
_PART = re.compile(r"[A-Za-z0-9_.~+-]{1,255}")
_OID = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_LIST = Command("ls-refs", [], [b"peel\n", b"symrefs\n"]).bytes()


class GitOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a `git:` permission may say."""

    write: bool = False
    """Pushing too."""
    refs: list[str] | None = None
    """Only these (`refs/heads/main`, `refs/tags/v1*`)."""
    pins: dict[str, str] = {}
    """Refs that are shown at a given commit, whatever they are outside: what came later doesn't exist."""
    within: list[str] | None = None
    """Only these too: the definition's, where the policy has refs or pins of its own."""
    headers: dict[str, str] = {}
    """Added outside; a value may name secrets (`Basic secret:NAME`) that are for this host."""

    def __post_init__(self) -> None:
        for ref, commit in self.pins.items():
            if not ref.startswith("refs/") or not _OID.fullmatch(commit):
                raise ValueError(f"a pin is a ref and a full commit, not {ref!r}: {commit!r}")
        if self.write and self.rules() is not None:
            raise ValueError("write doesn't go with refs or pins")

    def rules(self) -> RefRules | None:
        """None: no limit."""
        if self.refs is None and not self.pins:
            return None
        return RefRules(self.refs or (), self.pins, self.within)


class GitGateway(BaseGateway):
    """Serves `git:`."""

    kinds = ("git",)
    hosts = (HOST,)
    options = GitOptions

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._shown: OrderedDict[str, dict[str, float]] = OrderedDict()
        """Per repository, partition and rules: the objects that were listed, and when."""

    async def serve(self, call: Call) -> web.StreamResponse:
        host, repository, action = _split(call.path())
        call.grant = self._grant(call, host, repository)
        options = self.read_options(call.grant, GitOptions)
        query = call.request.rel_url.raw_query_string
        service = query.removeprefix("service=") if action == "info/refs" else action
        method = "GET" if action == "info/refs" else "POST"
        if service not in {_READ, _WRITE}:
            raise forbidden(call.permission, "only git's smart HTTP protocol is served")
        if call.request.method != method or (action != "info/refs" and query):
            raise Refusal(405, f"git asks for this by {method}", {"Allow": method})
        if service == _WRITE and not options.write:
            raise forbidden(call.permission, "it is for reading; pushing takes the option write")
        call.noted["service"] = service

        upstream = self._shared.config.git.get(host) or Upstream(f"https://{host}")
        private = self.credentials(call, upstream, options.headers)
        base = URL(upstream.url)
        tail = f"/info/refs?service={service}" if action == "info/refs" else f"/{action}"
        url = URL(f"{base.origin()}{base.raw_path.rstrip('/')}{spell(repository)}", encoded=True)
        limit = options.rules()
        if limit is not None:
            return await self._limited(call, limit, url, action, private)
        return await relay(
            call,
            self._shared.outside,
            URL(str(url) + tail, encoded=True),
            headers=outgoing(call.request.headers, list(private.values), ("Cookie", "Authorization")),
            private=private,
            data=body(call, BODY_BYTES) if method == "POST" else None,
            moved=lambda target: f"http://{HOST}/{host}{target.raw_path_qs}" if target.host == base.host else None,
        )

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        """git's configuration by environment; `GIT_CONFIG_COUNT` and its pairs belong together."""
        pairs = []
        for host in dict.fromkeys(split_host(self.target(grant))[0] for grant in grants):
            key = f"url.http://{HOST}/{host}/.insteadOf"
            pairs += [(key, f"https://{host}/"), (key, f"ssh://git@{host}/"), (key, f"git@{host}:")]
        variables = {"GIT_CONFIG_COUNT": str(len(pairs)), "GIT_TERMINAL_PROMPT": "0"}
        for index, (key, value) in enumerate(pairs):
            variables |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
        return variables

    def check(self, grant: Grant) -> None:
        super().check(grant)
        try:
            _, rest = split_host(self.target(grant))
        except ValueError as error:
            raise InvalidRequest(f"{grant.permission}: {error}", remedy="Write git:HOST/ORG/REPO.") from error
        parts = rest.split("/")
        if "*" in parts[:-1] or not all((_PART.fullmatch(part) and part.strip(".")) or part == "*" for part in parts):
            raise InvalidRequest(
                f"{grant.permission} doesn't name a repository", remedy="Write git:HOST/ORG/REPO, or git:HOST/ORG/*."
            )

    def _grant(self, call: Call, host: str, repository: list[str]) -> Grant:
        """The permission for a repository. Raises `Refusal`."""
        wanted = [*repository[:-1], repository[-1].removesuffix(".git")]
        for grant in call.visit.grants:
            try:
                own, rest = split_host(self.target(grant))
            except ValueError:
                continue
            parts = rest.removesuffix(".git").split("/")
            exact = parts == wanted or (parts[-1] == "*" and len(parts) == len(wanted) and parts[:-1] == wanted[:-1])
            if own == host and exact:
                return grant
        raise Refusal(
            403,
            f"refused by the network policy of this sandbox: it has no permission git:{host}/{'/'.join(wanted)[:200]}",
        )

    # --- repositories of which a part is shown ---

    async def _limited(
        self, call: Call, rules: RefRules, url: URL, action: str, private: Headers
    ) -> web.StreamResponse:
        if "version=2" not in call.request.headers.get("Git-Protocol", "").split(":"):
            raise forbidden(call.permission, "with refs or pins it takes version 2 of git's protocol")
        headers = {"Git-Protocol": "version=2", "Accept-Encoding": "identity"}
        if action == "info/refs":
            answer = await self._ask(URL(f"{url}/info/refs?service={_READ}", encoded=True), None, private, headers)
            if b"version 2\n" not in answer[:128]:
                raise UpstreamError("the server outside doesn't speak version 2 of git's protocol")
            return await self._answer(call, answer, "advertisement")
        try:
            command = Command.read(await _request(call))
        except BadPacket as error:
            raise Refusal(400, f"not a request of git's: {error}") from error
        key = f"{self.partition(call, private)} {url} {rules}"
        service = URL(f"{url}/{_READ}", encoded=True)
        if command.name == "ls-refs":
            listed, objects = await self._list(service, command.bytes(), private, rules)
            self._remember(key, objects)
            return await self._answer(call, write(listed), "result")
        if command.name != "fetch":
            raise forbidden(call.permission, f"with refs or pins it doesn't include the command {command.name[:40]}")
        limited, beyond = fetch_limited(command, self._known(key))
        if beyond:
            _, objects = await self._list(service, _LIST, private, rules)
            self._remember(key, objects)
            limited, beyond = fetch_limited(command, self._known(key))
        if beyond:
            raise forbidden(call.permission, f"it doesn't include {beyond[0]}")
        return await relay(
            call,
            self._shared.outside,
            service,
            headers={**headers, "Content-Type": _REQUEST},
            private=private,
            data=limited.bytes(),
        )

    async def _list(
        self, service: URL, request: bytes, private: Headers, rules: RefRules
    ) -> tuple[list[bytes], set[str]]:
        headers = {"Git-Protocol": "version=2", "Content-Type": _REQUEST}
        try:
            return rules.listing(read(await self._ask(service, request, private, headers)))
        except BadPacket as error:
            raise UpstreamError(f"the server outside sent {error}") from error

    async def _ask(self, url: URL, data: bytes | None, private: Headers, headers: Mapping[str, str]) -> bytes:
        method = "GET" if data is None else "POST"
        async with self._shared.outside.open(
            method, url, headers=headers, private=private.values, data=data
        ) as response:
            if response.status in {401, 403, 404} and not private.values:
                raise Refusal(404, "there is no such repository outside, or it isn't public")
            if response.status != 200:
                raise UpstreamError(f"the server outside answered {response.status}")
            return b"".join([chunk async for chunk in chunks(response, LISTING_BYTES)])

    async def _answer(self, call: Call, data: bytes, kind: str) -> web.StreamResponse:
        headers = {"Content-Type": f"application/x-{_READ}-{kind}", "Cache-Control": "no-cache"}
        response = await call.begin(200, {**headers, "Content-Length": str(len(data))})
        await call.write(data)
        return response

    def _remember(self, key: str, objects: set[str]) -> None:
        known = self._shown.setdefault(key, {})
        self._shown.move_to_end(key)
        known |= dict.fromkeys(objects, time.monotonic())
        while len(self._shown) > 256:
            self._shown.popitem(last=False)

    def _known(self, key: str) -> set[str]:
        oldest = time.monotonic() - REMEMBERED_S
        known = {oid: at for oid, at in self._shown.get(key, {}).items() if at >= oldest}
        if key in self._shown:
            self._shown[key] = known
        return set(known)


def _split(path: list[str]) -> tuple[str, list[str], str]:
    """A path as (host, repository, action). Raises `Refusal`."""
    action = "info/refs" if path[-2:] == ["info", "refs"] else path[-1]
    repository = path[1 : -2 if action == "info/refs" else -1]
    if not repository or not all(_PART.fullmatch(part) for part in repository):
        raise Refusal(403, "refused: /HOST/ORG/REPO and git's smart HTTP protocol below it are all that is served")
    return path[0].lower(), repository, action


async def _request(call: Call) -> bytes:
    """A request's body, decoded. Raises `Refusal`."""
    data = b"".join([chunk async for chunk in body(call, REQUEST_BYTES)])
    encoding = call.request.headers.get("Content-Encoding", "identity")
    if encoding == "identity":
        return data
    decoder = zlib.decompressobj(31)
    try:
        text = decoder.decompress(data, REQUEST_BYTES) if encoding in {"gzip", "x-gzip"} else b""
    except zlib.error:
        text = b""
    if not decoder.eof or decoder.unused_data:
        raise Refusal(400, "a request body that can't be decoded, or is too long")
    return text

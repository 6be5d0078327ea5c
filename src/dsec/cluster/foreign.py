"""Other people's clients through an apiserver: E2B's, SWE-ReX's and SandboxFusion's calls, unmodified.

What names a sandbox goes to its edge, which has these families' code; E2B's creations go through placement as they are,
its list is put together here; templates of one name are one node's business, for a build lives in its memory. An API
key is looked at here and becomes an apiserver's word on the way; tokens and signatures are for the edge to look at.
Errors that come about here have the family's form.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote

import msgspec

from dsec.api.e2b import E2b, errors, rpc
from dsec.api.e2b.call import Call
from dsec.api.e2b.config import E2bConfig
from dsec.api.e2b.control import Control
from dsec.api.e2b.signatures import Signatures
from dsec.api.exchange import ClientGone, Exchange, headers_of
from dsec.api.swerex import Swerex
from dsec.api.swerex_wire import Refusal
from dsec.cluster.admission import Admission
from dsec.cluster.creating import Creations, Form
from dsec.cluster.fanout import Fanout
from dsec.cluster.moves import Moves
from dsec.cluster.nodes import Nodes
from dsec.cluster.routes import header_of, is_data, sandbox_of
from dsec.cluster.spending import Spending, runs_programs
from dsec.cluster.upstream import Upstream
from dsec.cluster.wire import Member
from dsec.edge.client import EdgeClient, Page, Principal
from dsec.errors import DsecError, InvalidRequest, PermissionDenied, SandboxNotFound, Unauthenticated, Unavailable
from dsec.plan.watch import Health
from dsec.spec.sandbox import SandboxSpec, State

_STREAMS = frozenset(
    {"/process.Process/Start", "/process.Process/Connect", "/process.Process/StreamInput",
     "/filesystem.Filesystem/WatchDir"}
)  # fmt: skip
_FUSION = ("/sandboxfusion/", "/v1/ping")
_FUSION_CALLS = frozenset(
    {"/run_code", "/run_jupyter", "/submit", "/list_datasets", "/list_ids", "/get_prompts", "/get_prompt_by_id",
     "/get_metrics", "/get_metrics_function"}
)  # fmt: skip
_KEY = "x-api-key"


class Foreign:
    """For the event loop."""

    def __init__(
        self,
        *,
        nodes: Nodes,
        upstream: Upstream,
        creations: Creations,
        fanout: Fanout,
        admission: Admission,
        moves: Moves,
        spending: Spending,
    ) -> None:
        self._nodes = nodes
        self._upstream = upstream
        self._creations = creations
        self._admission = admission
        self._moves = moves
        self._spending = spending
        edge = cast("EdgeClient", _Lists(fanout))
        self._control = Control(edge, lambda project: (), E2bConfig(), Signatures(edge))

    @staticmethod
    def claims(raw: str) -> bool:
        """Whether a path is one of these."""
        return E2b.claims(raw) or Swerex.claims(raw) or _is_fusion(raw)

    async def __call__(self, x: Exchange, raw: str) -> None:
        """Answer a request that `claims` took."""
        try:
            await self._route(x, raw)
        except DsecError as error:
            await self._fail(x, raw, error)

    async def _route(self, x: Exchange, raw: str) -> None:
        shown = header_of(x.scope, b"x-api-key") or x.bearer()
        access = header_of(x.scope, b"x-access-token")
        if is_data(raw) and not shown.startswith("dsk_"):
            shown = access
        principal = await self._admission.admit(shown, x.scope) if shown.startswith("dsk_") else None
        x.principal = principal
        sandbox_id = sandbox_of(x.scope)
        if sandbox_id is not None:
            await self.pass_on(x, sandbox_id, principal)
        elif is_data(raw):
            await self._signed(x, raw)
        elif _is_fusion(raw):
            kind = runs_programs(raw)
            if kind and principal is not None and self._spending.bounds(principal):
                x.only("POST")
                await self._spending.run(x, kind, self.any(raw), principal, "authorization")
            else:
                await self._upstream.forward(x, self.any(raw), principal)
        else:
            await self._rest(x, raw, principal)

    async def pass_on(self, x: Exchange, sandbox_id: str, principal: Principal | None) -> None:
        """A call on one sandbox."""
        member = await self._moves.find(sandbox_id)
        edge = member.claim.edge

        async def elsewhere() -> bool:
            return await self._moves.elsewhere(sandbox_id, edge)

        forks = x.scope["method"] == "POST" and x.scope["path"].rpartition("/")[2] == "fork"
        if forks and principal is not None:
            await self._spending.fork(x, member, principal, sandbox_id, elsewhere, _KEY)
        else:
            await self._upstream.forward(x, member, principal, key_header=_KEY, elsewhere=elsewhere)

    async def _signed(self, x: Exchange, raw: str) -> None:
        """A file by a signature, in a URL that doesn't say of which sandbox: its edge knows the signature."""
        if x.scope["method"] != "GET" or x.raw("signature") is None:
            raise InvalidRequest(
                "the request doesn't say which sandbox it is for",
                remedy="Send E2b-Sandbox-Id, or use the host name 49983-ID.DOMAIN.",
            )
        target = raw + "?" + x.scope["query_string"].decode("latin-1")
        for member in self._nodes.alive():
            status = await self._upstream.status(member, target)
            if status != 401:
                await self._upstream.forward(x, member, None)
                return
        raise Unauthenticated("the signature is not valid")

    async def _rest(self, x: Exchange, raw: str, principal: Principal | None) -> None:
        parts = [unquote(part) for part in raw.strip("/").split("/")]
        if parts[0] in ("v2", "v3"):
            parts = parts[1:]
        if parts == ["sandboxes"] and principal is not None:
            x.only("GET", "POST")
            if x.scope["method"] == "POST":
                await self._create(x, raw, principal)
            else:
                await self._control.list_sandboxes(Call(x), principal)
            return
        if principal is None and not (x.scope["method"] == "PUT" and parts[:1] == ["templates"]):
            raise Unauthenticated("the API key is not valid", remedy="Check E2B_API_KEY.")
        body = None
        if parts[0] == "templates" and parts[2:3] == ["builds"] and len(parts) == 4 and x.scope["method"] == "POST":
            assert principal is not None
            await self._spending.template(x, self.any(parts[1].partition(":")[0]), principal, _KEY)
            return
        if parts == ["templates"] and x.scope["method"] == "POST":
            body = await x.body()
            template = _name_in(body)
        else:
            template = parts[1] if parts[0] == "templates" and len(parts) > 1 and parts[1] != "aliases" else ""
        await self._upstream.forward(
            x, self.any(template.partition(":")[0] or raw), principal, key_header=_KEY, body=body
        )

    async def _create(self, x: Exchange, raw: str, principal: Principal) -> None:
        """As it came, to the node that is chosen by what it asks for."""
        body = await x.body()
        spec = SandboxSpec(environment=E2bConfig().environment(_text_in(body, "templateID")))
        key = header_of(x.scope, b"idempotency-key") or None
        answer = await self._creations.one(principal, spec, key=key, deadline_s=None, form=Form(target=raw, body=body))
        await x.begin(answer.status, b"application/json", (b"content-length", b"%d" % len(answer.body)))
        await x.finish(answer.body)

    def any(self, what: str) -> Member:
        """The edge that calls of one kind go to: the same one for as long as it is well. Raises `Unavailable`."""
        well = [each for each in self._nodes.alive() if self._nodes.health(each.claim.edge) is not Health.SILENT]
        if not well:
            raise Unavailable("no edge of the cluster can be reached now", remedy="Try again in a moment.")
        return max(well, key=lambda member: zlib.crc32(f"{what}\0{member.claim.edge}".encode()))

    @staticmethod
    async def _fail(x: Exchange, raw: str, error: DsecError) -> None:
        try:
            if Swerex.claims(raw) and isinstance(error, (Unauthenticated, PermissionDenied, SandboxNotFound)):
                await x.drain()
                await x.answer(error.http_status, Refusal(str(error)), *headers_of(error))
            elif Swerex.claims(raw):
                await Swerex.fail(x, raw, error)
            elif raw in _STREAMS and not isinstance(error, errors.GONE):
                await rpc.fail_stream(x, error)
            elif is_data(raw):
                unary = raw.count("/") > 1 and not isinstance(error, errors.GONE)
                await (errors.fail_unary if unary else errors.fail_data)(x, error)
            elif _is_fusion(raw):
                await x.fail(error)
            else:
                await errors.fail_rest(x, error)
        except ClientGone:
            pass


class _Lists:
    """As much of an `EdgeClient` as E2B's list takes, over all edges."""

    def __init__(self, fanout: Fanout) -> None:
        self._fanout = fanout

    async def list_sandboxes(
        self,
        project: str,
        *,
        states: Sequence[State] = (),
        labels: Mapping[str, str] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        query = [("state", state.value) for state in states]
        query += [("label", f"{name}={value}") for name, value in (labels or {}).items()]
        return await self._fanout.page(Principal(project), query, limit, after)


def _is_fusion(raw: str) -> bool:
    return raw in _FUSION_CALLS or raw.startswith(_FUSION)


def _name_in(body: bytes) -> str:
    return _text_in(body, "name") or _text_in(body, "alias")


def _text_in(body: bytes, field: str) -> str:
    """A field that only chooses a node: whether the body is good is the edge's to say."""
    try:
        value = msgspec.json.decode(body, type=dict[str, Any]).get(field)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return value if isinstance(value, str) else ""

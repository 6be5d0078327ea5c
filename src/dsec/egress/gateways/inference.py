"""`inference:NAME`: a model endpoint that the operator configured, with its credentials added outside.

Inside: `/NAME/v1/...` at `inference.dsec`, which is `.../...` below the endpoint's URL. Only the endpoint's paths; only
its models and the permission's; what a call cost is in the audit, and bounded by the permission.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct
from yarl import URL

from dsec.egress.gateway import Grant
from dsec.egress.gateways.answers import Refusal, forbidden
from dsec.egress.gateways.base import BaseGateway, Call, Shared
from dsec.egress.gateways.config import Endpoint
from dsec.egress.gateways.paths import spell
from dsec.egress.gateways.relay import body, outgoing, relay
from dsec.egress.gateways.usage import Book, Reader, Used
from dsec.errors import InvalidRequest

HOST = "inference.dsec"
PLACEHOLDER = "dsec-placeholder"
"""What tools inside get for a key: they insist on one."""
_CREDENTIALS = (
    "Authorization",
    "X-Api-Key",
    "Api-Key",
    "Cookie",
    "X-Goog-Api-Key",
    "OpenAI-Organization",
    "OpenAI-Project",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class InferenceOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What an `inference:` permission may say."""

    models: list[str] | None = None
    """Only these of the endpoint's models."""
    requests: int | None = None
    """At most so many of one sandbox."""
    tokens: int | None = None
    """No request after so many tokens, in and out, by what the endpoint says."""
    body_bytes: int = 32 << 20
    """The largest request."""


class InferenceGateway(BaseGateway):
    """Serves `inference:`."""

    kinds = ("inference",)
    hosts = (HOST,)
    options = InferenceOptions

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._book = Book()

    async def serve(self, call: Call) -> web.StreamResponse:
        path = call.path()
        name, rest = path[0], path[2:]
        grant = next((each for each in call.visit.grants if self.target(each) == name), None)
        if grant is None or path[1:2] != ["v1"] or not rest:
            raise forbidden("inference", f"it has no endpoint {name[:64]}: ask for /NAME/v1/...")
        call.grant = grant
        options = self.read_options(grant, InferenceOptions)
        endpoint = self._shared.config.inference.get(name)
        if endpoint is None:
            raise Refusal(502, f"the platform has no model endpoint {name}. This is not the fault of your request.")
        if "/".join(rest) not in endpoint.paths and not (rest[0] == "models" and "models" in endpoint.paths):
            raise forbidden(call.permission, f"it doesn't include the path {spell(rest)[:200]}")
        if call.request.method not in {"GET", "HEAD", "POST"}:
            raise forbidden(call.permission, f"it doesn't include the method {call.request.method}")
        used = self._book.of(call.visit.sandbox_id, grant.permission)
        _within(call, options, used)
        data = None
        if call.request.method == "POST":
            data = await self._request(call, endpoint, options)
            used.requests += 1

        private = self.credentials(call, endpoint)
        reader = Reader()

        base = URL(endpoint.url)
        query = call.request.rel_url.raw_query_string
        url = URL(f"{str(base).rstrip('/')}{spell(rest)}" + (f"?{query}" if query else ""), encoded=True)
        headers = outgoing(call.request.headers, list(private.values), (*_CREDENTIALS, "Content-Encoding"))
        headers["Accept-Encoding"] = "identity"  # its usage is read
        try:
            return await relay(
                call, self._shared.outside, url, headers=headers, private=private, data=data, seen=reader.feed
            )
        finally:
            tokens = reader.end()
            used.tokens += tokens.input + tokens.output
            call.noted |= {"input_tokens": tokens.input, "output_tokens": tokens.output}

    async def _request(self, call: Call, endpoint: Endpoint, options: InferenceOptions) -> bytes:
        """The request's body as it goes out: written anew from what was read, so that there is one reading of it."""
        try:
            chunks: AsyncIterator[bytes] = body(call, options.body_bytes)
            document = msgspec.json.decode(b"".join([chunk async for chunk in chunks]), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise Refusal(400, f"a model endpoint takes a JSON object: {error}") from error
        model = document.get("model")
        for allowed in (endpoint.models or None, options.models):
            if allowed is not None and model not in allowed:
                raise forbidden(call.permission, f"it doesn't include the model {str(model)[:100]!r}")
        call.noted["model"] = str(model)[:100]
        chat = call.request.rel_url.raw_path.endswith("completions")
        if chat and options.tokens is not None and document.get("stream") is True:
            given = document.get("stream_options")
            document["stream_options"] = {**(given if isinstance(given, dict) else {}), "include_usage": True}
        return msgspec.json.encode(document)

    def target(self, grant: Grant) -> str:
        """The one endpoint that there is, where none is named."""
        endpoints = list(self._shared.config.inference)
        return super().target(grant) or (endpoints[0] if len(endpoints) == 1 else "")

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        """The first one's address is what the usual clients read; each has a variable of its own."""
        variables: dict[str, str] = {}
        for grant in reversed(grants):
            name = self.target(grant)
            root = f"http://{HOST}/{name}"
            own = re.sub(r"[^A-Z0-9]", "_", name.upper())
            variables |= {
                f"DSEC_INFERENCE_{own}_URL": f"{root}/v1",
                "OPENAI_BASE_URL": f"{root}/v1",
                "OPENAI_API_BASE": f"{root}/v1",
                "ANTHROPIC_BASE_URL": root,
            }
        return {**variables, "OPENAI_API_KEY": PLACEHOLDER, "ANTHROPIC_API_KEY": PLACEHOLDER}

    def check(self, grant: Grant) -> None:
        super().check(grant)
        if not _NAME.fullmatch(self.target(grant)):
            raise InvalidRequest(f"{grant.permission} doesn't name an endpoint", remedy="Write inference:NAME.")
        if self.target(grant) not in self._shared.config.inference:
            raise InvalidRequest(
                f"this node has no model endpoint {self.target(grant)}",
                remedy="Its operator names them in gateways.toml (docs/GATEWAYS.md).",
            )


def _within(call: Call, options: InferenceOptions, used: Used) -> None:
    """Raises `Refusal` where a limit is used up."""
    for name in ("requests", "tokens"):
        limit, so_far = getattr(options, name), getattr(used, name)
        if limit is not None and so_far >= limit:
            raise Refusal(429, f"the permission {call.permission} allows {limit} {name}, and {so_far} are used")

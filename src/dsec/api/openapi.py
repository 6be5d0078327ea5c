"""The OpenAPI document: Litestar's part for the control routes, and the same types for the calls that are served raw.

Owns how a `Call` is written down, and the forms that errors have in each family of calls. Nothing is computed before
the document is asked for: it costs as much as all the rest of a server's start. A test compares the document with the
routes that answer, another sends what it allows and what it forbids to a server.
"""

from __future__ import annotations

import asyncio
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Litestar
from msgspec import Struct

from dsec.api.calls import CALLS, JSON, Call
from dsec.api.e2b.calls import CALLS as E2B_CALLS
from dsec.api.e2b.models import RestError, RpcFailure
from dsec.api.exec import Started
from dsec.api.layer_calls import CALLS as LAYER_CALLS
from dsec.api.sandboxfusion.calls import CALLS as FUSION_CALLS
from dsec.api.sandboxfusion.wire import Detail
from dsec.api.swerex_calls import CALLS as SWEREX_CALLS
from dsec.api.swerex_wire import Failure, Refusal
from dsec.errors import BY_CODE, ErrorBody
from dsec.spec.sandbox import ExecStatus
from dsec.wire.connect import Code
from dsec.wire.exec_stream import MEDIA_TYPE

_REF = "#/components/schemas/{name}"
_ALL = (*CALLS, *LAYER_CALLS, *E2B_CALLS, *SWEREX_CALLS, *FUSION_CALLS)
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "an API key, or a sandbox's token"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "E2B's and SWE-ReX's clients"},
    "basic": {"type": "http", "scheme": "basic", "description": "SandboxFusion's clients: an API key as password"},
    "accessToken": {"type": "apiKey", "in": "header", "name": "X-Access-Token", "description": "E2B's data plane"},
}
_PUBLIC = frozenset({"/healthz"})
_METHODS = ("get", "put", "post", "patch", "delete")


def _native() -> dict[int, str]:
    """Statuses of our own errors, each with its codes."""
    found: dict[int, list[str]] = {}
    for code, kind in BY_CODE.items():
        found.setdefault(kind.http_status, []).append(code)
    return {status: ", ".join(sorted(codes)) for status, codes in sorted(found.items())}


_OURS = _native()
_ERRORS: dict[str, tuple[dict[int, str], tuple[type, ...]]] = {
    "dsec": (_OURS, (ErrorBody,)),
    "e2b": ({**_OURS, 501: "not in this version"}, (RestError,)),
    "envd": ({**_OURS, 501: "not in this version", 507: "the disk is full"}, (RestError,)),
    "rpc": (
        {**_OURS, 501: "not in this version", **{code.http_status: code.value for code in Code}},
        (RpcFailure, RestError),
    ),
    "swerex": (
        {**{status: _OURS[status] for status in (401, 403, 404, 405)}, 511: "an exception to be raised"},
        (Failure, Refusal),
    ),
    "sandboxfusion": (
        {
            **{status: text for status, text in _OURS.items() if status < 500},
            501: "not served here",
            504: "the platform failed: again",
        },
        (Detail,),
    ),
}


class Document:
    """A server's document, made in a thread when it is asked for first."""

    def __init__(self, control: Litestar) -> None:
        self._control = control
        self._making = asyncio.Lock()
        self._made: dict[str, Any] | None = None

    async def get(self) -> dict[str, Any]:
        """The same to all."""
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(_document, self._control)
        return self._made


def _document(control: Litestar) -> dict[str, Any]:
    """The whole document."""
    result: dict[str, Any] = control.openapi_schema.to_schema()
    schemas = result.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in _schemas()[1].items():
        schemas.setdefault(name, schema)
    schemas["ServerFrames"] = {
        "description": "u8 kind, u32 little-endian length, payload. From the server: 0 Started (JSON), 1 stdout, "
        "2 stderr, then one of 3 ExecStatus (JSON), 4 ErrorBody (JSON). From the client: 0 ExecSpec (JSON), 1 stdin, "
        "2 stdin end.",
        "type": "string",
        "format": "binary",
    }
    result["components"]["securitySchemes"] = _SCHEMES
    result["security"] = [{"bearer": []}]
    for path, operations in result["paths"].items():
        for method in _METHODS:
            if method in operations:
                _complete(path, operations[method])
    for call in _ALL:
        result["paths"].setdefault(call.path, {})[call.method] = _operation(call)
    return result


def _kinds() -> list[Any]:
    """All types that the calls name: of bodies, arguments and errors."""
    kinds: list[Any] = [Started, ExecStatus, *(kind for _, forms in _ERRORS.values() for kind in forms)]
    for call in _ALL:
        bodies = [kind for _, kind in (*call.takes, *([call.gives] if call.gives else []))]
        kinds += [kind for kind in bodies if kind is not None and not isinstance(kind, dict)]
        kinds += [*call.asked().values(), *call.headers.values()]
    return kinds


@cache
def _schemas() -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Of each of the types, by its id, and what they refer to."""
    kinds = _kinds()
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    return {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}, components


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Litestar's own: errors in the form that they really have."""
    answers = {status: answer for status, answer in operation["responses"].items() if status.startswith("2")}
    operation["responses"] = answers | _errors("dsec")
    if path in _PUBLIC:
        operation["security"] = []


def _errors(family: str) -> dict[str, Any]:
    statuses, kinds = _ERRORS[family]
    return {
        str(status): {"description": description, "content": {JSON: {"schema": _any(kinds)}}}
        for status, description in sorted(statuses.items())
    }


def _any(kinds: tuple[type, ...]) -> dict[str, Any]:
    """One of these forms."""
    forms = [_schema(kind) for kind in kinds]
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _schema(kind: Any) -> dict[str, Any]:
    schemas, _ = _schemas()
    return schemas[id(kind)]


def _body(media: str, kind: Any) -> dict[str, Any]:
    if isinstance(kind, dict):
        return {media: {"schema": kind}}
    if kind is not None:
        return {media: {"schema": _schema(kind)}}
    if media == MEDIA_TYPE:
        return {media: {"schema": {"$ref": _REF.format(name="ServerFrames")}}}
    return {media: {"schema": {"type": "string", "format": "binary"}}}


def _operation(call: Call) -> dict[str, Any]:
    inside = [part[1:-1] for part in call.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in inside
    ]
    parameters += [_parameter(name, "query", kind, name in call.required) for name, kind in call.asked().items()]
    parameters += [_parameter(name, "header", kind, False) for name, kind in call.headers.items()]
    operation: dict[str, Any] = {"summary": call.summary, "parameters": parameters, "responses": {}}
    if call.takes:
        content: dict[str, Any] = {}
        for media, kind in call.takes:
            content |= _body(media, kind)
        if call.example is not None:
            content[JSON]["example"] = call.example
        operation["requestBody"] = {"required": not call.optional, "content": content}
    statuses = call.statuses or ((204,) if call.gives is None else (200,))
    answers = operation["responses"] = _errors(call.family)
    for status in statuses:
        answers[str(status)] = {"description": HTTPStatus(status).phrase}
        if call.gives is not None:
            answers[str(status)]["content"] = _body(*call.gives)
    if call.security is not None:
        operation["security"] = [{scheme: []} for scheme in call.security]
    return operation


def _parameter(name: str, where: str, kind: Any, required: bool) -> dict[str, Any]:
    """Values that are no plain ones are JSON."""
    schema = _schema(kind)
    form = {"content": {JSON: {"schema": schema}}} if _is_struct(kind) else {"schema": schema}
    return {"name": name, "in": where, "required": required, **form}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)

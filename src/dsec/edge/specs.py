"""What the types of a sandbox's spec don't say: what this version can't do, and what Linux could never do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import cast

import msgspec
from msgspec.structs import replace

from dsec.errors import InvalidRequest, Unsupported
from dsec.plan import tripwires
from dsec.ports import Backend, EnvironmentHost
from dsec.spec.sandbox import SandboxSpec

MAX_ENV_BYTES = 256 << 10
MAX_LABELS = 64
MAX_LABEL_BYTES = 1024

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ENV_NAME = re.compile(r"[^=\0]+")
_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(SandboxSpec)


def resolve(spec: SandboxSpec, project: str, backends: Mapping[str, Backend]) -> tuple[Backend, SandboxSpec]:
    """The backend that makes this spec, and the spec with everything said. Raises `Unsupported`, `InvalidRequest`,
    `EnvironmentNotFound`, `NotFound`."""
    if spec.gpus is not None:
        raise Unsupported(
            "gpus is set, but access to GPUs is not available in this version", remedy="Leave gpus out.", field="gpus"
        )
    backend = backends.get(spec.backend)
    if backend is None:
        raise Unsupported(
            f"the backend {spec.backend!r} is not available in this version or on this node",
            remedy=f"Use one of: {', '.join(sorted(backends))}.",
            field="backend",
        )
    _check(spec)
    if (host := _environments_of(backend)) is not None:
        spec = host.resolve(spec, project)
    elif spec.layers:
        raise Unsupported("this backend has no layers", remedy="Leave layers out.", field="layers")
    if not spec.user or not spec.workdir:
        spec = replace(spec, user=spec.user or "root", workdir=spec.workdir or "/")
    backend.check(spec)
    return backend, spec


def check_features(spec: SandboxSpec, features: Collection[str]) -> None:
    """Raises `Unsupported` where a node with these `features` lacks what the spec requires."""
    missing = sorted({*spec.require_features}.difference(features))
    if missing:
        raise lacks_features(missing, "this node has no")


def lacks_features(missing: Sequence[str], who: str) -> Unsupported:
    """`who` doesn't have these."""
    return Unsupported(
        f"{who} {' and '.join(repr(each) for each in missing)}",
        remedy="`features` of GET /v1/node, or of a cluster's /v1/nodes, says what there is; `dsec doctor` says why.",
        field="require_features",
        missing=list(missing),
    )


async def learn(specs: Iterable[SandboxSpec], project: str, backends: Mapping[str, Backend]) -> None:
    """Have the backends find out what environments and layers these specs mean that they don't know yet. A spec that
    can't be learnt is `resolve`'s to refuse. Raises `Unavailable`, `LayerCorrupt`."""
    missing: dict[tuple[str, tuple[str, ...]], tuple[EnvironmentHost, SandboxSpec]] = {}
    for spec in specs:
        backend = backends.get(spec.backend)
        host = None if backend is None else _environments_of(backend)
        if host is not None and not host.knows(spec, project):
            missing[spec.environment, tuple(spec.layers)] = (host, spec)
    if missing:
        await asyncio.gather(*(backend.learn(spec, project) for backend, spec in missing.values()))


def differing_fields(one: SandboxSpec, other: SandboxSpec) -> list[str]:
    """Names of the fields in which two specs differ."""
    if one == other:
        return []
    return [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]


def _environments_of(backend: Backend) -> EnvironmentHost | None:
    return cast("EnvironmentHost", backend) if _is_environment_host(type(backend)) else None


@cache
def _is_environment_host(kind: type) -> bool:
    return issubclass(kind, EnvironmentHost)  # which costs 20 us, of a protocol


def _check(spec: SandboxSpec) -> None:
    try:
        encoded = _encode(spec)
    except UnicodeEncodeError:
        raise InvalidRequest("the spec holds text that isn't valid Unicode") from None
    # In process nobody has checked the types' constraints yet.
    try:
        _decoder.decode(encoded)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the spec is not valid: {error}") from None
    if spec.name is not None and _CONTROL.search(spec.name):
        raise InvalidRequest("name cannot hold control characters", field="name")
    if spec.workdir and (not spec.workdir.startswith("/") or "\0" in spec.workdir):
        raise InvalidRequest("workdir is not an absolute path", field="workdir")
    if _CONTROL.search(spec.user):
        raise InvalidRequest("user cannot hold control characters", field="user")
    if spec.env:
        if not all(_ENV_NAME.fullmatch(name) for name in spec.env) or any("\0" in value for value in spec.env.values()):
            raise InvalidRequest("env has an empty name, a name with '=', or a NUL byte", field="env")
        if sum(len(name) + len(value) for name, value in spec.env.items()) > MAX_ENV_BYTES:
            raise InvalidRequest(f"env is larger than {MAX_ENV_BYTES >> 10} KiB", field="env")
    if spec.tripwires:
        tripwires.resolve(spec.tripwires)
    if spec.labels and (
        len(spec.labels) > MAX_LABELS
        or any(len(name) + len(value) > MAX_LABEL_BYTES for name, value in spec.labels.items())
    ):
        raise InvalidRequest(f"at most {MAX_LABELS} labels of {MAX_LABEL_BYTES} characters each", field="labels")

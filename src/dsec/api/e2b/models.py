"""What E2B's REST calls say, as values, and how they map to dsec's own.

Metadata is dsec's labels, name by name; a template is an environment. What has no meaning here yet is refused with
`unsupported` when it is set, never ignored.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from dsec.api.e2b.config import E2bConfig
from dsec.errors import InvalidRequest, Unsupported
from dsec.spec.network import Network
from dsec.spec.sandbox import MIB, SandboxInfo, SandboxSpec, State
from dsec.wire.connect import Code

ENVD_VERSION = "0.6.4"
"""What the client takes us for: it switches its features by this."""
CLIENT_ID = "dsec"
DEFAULT_TIMEOUT_S = 300
NEVER = "9999-12-31T23:59:59Z"

Timeout = Annotated[int, Meta(ge=0, le=366 * 86400)]


def _initials(name: str) -> str:
    """As the client writes them: `sandboxID`, `memoryMB`, `endAt`."""
    head, *rest = name.split("_")
    return head + "".join(part.upper() if part in ("id", "mb") else part.capitalize() for part in rest)


class AutoResume(Struct):
    enabled: bool = False


class NewSandbox(Struct, rename="camel", kw_only=True):
    """Body of a creation, old and new path."""

    template_id: Annotated[str, Meta(min_length=1, max_length=300)] = msgspec.field(name="templateID")
    timeout: Timeout = DEFAULT_TIMEOUT_S
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: dict[str, Any] | None = None
    secure: bool | None = None
    mcp: Any = None
    iam: Any = None
    volume_mounts: Any = None


class Connect(Struct):
    """Body of a connect or resume."""

    timeout: Timeout = DEFAULT_TIMEOUT_S
    memory: bool | None = None


class SetTimeout(Struct):
    """Body of a timeout call."""

    timeout: Timeout


_new = msgspec.json.Decoder(dict[str, Any])
_KNOWN = {field.encode_name for field in msgspec.structs.fields(NewSandbox)}


def new_sandbox(data: bytes) -> NewSandbox:
    """The body of a creation. Raises `InvalidRequest`, `Unsupported` for an option of unknown meaning that is set."""
    try:
        fields = _new.decode(data)
        unknown = [name for name, value in fields.items() if name not in _KNOWN and value]
        if unknown:
            raise Unsupported(f"unknown options: {', '.join(sorted(unknown))[:200]}", remedy="Leave them out.")
        return msgspec.convert(fields, NewSandbox)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def spec_of(new: NewSandbox, config: E2bConfig, network: Network) -> SandboxSpec:
    """The sandbox that a creation asks for. Raises `Unsupported`, `InvalidRequest`."""
    for name, value in (("mcp", new.mcp), ("iam", new.iam), ("volumeMounts", new.volume_mounts)):
        if value:
            raise _later(name)
    if new.timeout == 0:
        raise InvalidRequest("timeout is at least 1 second")
    try:
        return msgspec.convert(
            {
                "environment": config.environment(new.template_id),
                "ttl_s": float(new.timeout),
                "on_ttl": "pause" if new.auto_pause else "end",
                "command_timeout_s": None,
                "labels": new.metadata or {},
                "env": new.env_vars or {},
                "network": network or None,
                "public_ports": _public(new, config),
            },
            SandboxSpec,
        )
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None


def _public(new: NewSandbox, config: E2bConfig) -> bool:
    said = (new.network or {}).get("allowPublicTraffic")
    if said is not None and not isinstance(said, bool):
        raise InvalidRequest("network.allowPublicTraffic is true or false")
    return config.public_traffic if said is None else said


def _later(what: str) -> Unsupported:
    return Unsupported(f"{what}: not available in this version of dsec", remedy="Leave it out.")


# --- answers --------------------------------------------------------------------------------------------------------


class RestError(Struct, frozen=True):
    """An error, but of an RPC that was understood."""

    code: int
    """The HTTP status."""
    message: str
    error_code: str
    """Ours: see docs/errors.md."""


class RpcFailure(Struct, frozen=True):
    """The error of a unary RPC."""

    code: Code
    message: str


class Opened(Struct, frozen=True, kw_only=True, rename=_initials, omit_defaults=True):
    """Answer to a creation or connect."""

    template_id: str
    alias: str
    sandbox_id: str
    client_id: str
    envd_version: str
    envd_access_token: str
    domain: str | None = None
    traffic_access_token: str | None = None


class Listed(Struct, frozen=True, kw_only=True, rename=_initials, omit_defaults=True):
    """An item of a list."""

    template_id: str
    alias: str
    sandbox_id: str
    client_id: str
    started_at: str
    end_at: str
    envd_version: str
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    state: str
    metadata: dict[str, str]


class Fork(Struct, rename="camel", kw_only=True):
    """Body of a fork."""

    count: Annotated[int, Meta(ge=1, le=256)] = 1
    timeout: Annotated[int, Meta(ge=1, le=366 * 86400)] | None = None


class Forked(Struct, frozen=True, omit_defaults=True):
    """One child, or why there is none."""

    sandbox: Opened | None = None
    error: RestError | None = None


class Lifecycle(Struct, frozen=True, rename="camel"):
    on_timeout: str = "kill"
    auto_resume: bool = False


class Detailed(Listed, frozen=True, kw_only=True, rename=_initials, omit_defaults=True):
    """Answer to an info call."""

    envd_access_token: str
    allow_internet_access: bool
    lifecycle: Lifecycle
    domain: str | None = None


class Sample(Struct, frozen=True, kw_only=True, rename="camel"):
    """What a sandbox used at a moment; bytes."""

    timestamp: str
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


class TemplateAlias(Struct, frozen=True):
    """Answer to the question for a template's name."""

    template_id: str = msgspec.field(name="templateID")
    public: bool = False


class WrittenFile(Struct, frozen=True):
    """One file of an upload."""

    name: str
    path: str
    type: str = "file"


def created(info: SandboxInfo, token: str, config: E2bConfig, traffic: str | None = None) -> Opened:
    """Answer to a creation or connect. `traffic`: the token of its ports, where they want one."""
    return Opened(
        template_id=info.spec.environment,
        alias=info.spec.environment,
        sandbox_id=info.id,
        client_id=CLIENT_ID,
        envd_version=ENVD_VERSION,
        envd_access_token=token,
        domain=config.domain,
        traffic_access_token=traffic,
    )


def listed(info: SandboxInfo) -> Listed:
    """An item of a list."""
    return Listed(**_listed(info))


def detailed(info: SandboxInfo, token: str, config: E2bConfig, network: Network) -> Detailed:
    """Answer to an info call."""
    return Detailed(
        **_listed(info),
        envd_access_token=token,
        allow_internet_access=network.get("internet", False) is not False,
        lifecycle=Lifecycle("pause" if info.spec.on_ttl == "pause" else "kill", auto_resume=True),
        domain=config.domain,
    )


def _listed(info: SandboxInfo) -> dict[str, Any]:
    return {
        "template_id": info.spec.environment,
        "alias": info.spec.environment,
        "sandbox_id": info.id,
        "client_id": CLIENT_ID,
        "started_at": timestamp(info.created_at),
        "end_at": NEVER if info.expires_at is None else timestamp(info.expires_at),
        "envd_version": ENVD_VERSION,
        "cpu_count": math.ceil(info.spec.cpus),
        "memory_mb": info.spec.memory_bytes // MIB,
        "disk_size_mb": info.spec.disk_bytes // MIB,
        "state": "paused" if info.state is State.PAUSED else "running",
        "metadata": info.spec.labels,
    }


def alive(info: SandboxInfo) -> bool:
    """Whether E2B would say that it is running, or paused."""
    return info.state in (State.RUNNING, State.PAUSED)


def timestamp(seconds: float) -> str:
    """RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

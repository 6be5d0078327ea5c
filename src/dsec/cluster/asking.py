"""What a creation asks of a node, under which key it is on record, and how an edge's answer is read. Without I/O."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from dsec.errors import ErrorBody
from dsec.plan.placement import Ask
from dsec.plan.quota import account_of
from dsec.spec.ids import edge_of
from dsec.spec.sandbox import SandboxSpec

KVM = "kvm"
"""The feature that `require_kvm` stands for."""


class Answered(Struct, frozen=True):
    """An edge's answer to a single creation, to be passed on."""

    status: int
    body: bytes


class _Made(Struct, frozen=True):
    """What an edge says of a new sandbox, as far as it is looked at."""

    id: str


def ask_of(spec: SandboxSpec, project: str) -> Ask:
    """What a sandbox needs of a node. Labels of the form `node/NAME` choose nodes by their labels; `node/burst=allow`
    admits those for overflow."""
    chosen = {name[5:]: value for name, value in spec.labels.items() if name.startswith("node/")}
    burst = chosen.pop("burst", "") == "allow"
    return Ask(
        memory_bytes=spec.memory_bytes,
        backend=spec.backend,
        environment=spec.environment,
        run=f"{project}\0{spec.run}" if spec.run is not None else "",
        features=frozenset((*spec.require_features, KVM) if spec.require_kvm else spec.require_features),
        labels=frozenset(chosen.items()),
        burst=burst,
    )


def account_for(spec: SandboxSpec, project: str) -> str:
    """To which account of a quota a sandbox is charged."""
    return account_of(project, spec.backend, spec.cpus, spec.memory_bytes)


def record_key(project: str, spec: SandboxSpec, key: str | None) -> str | None:
    """Under which a single creation is on record: by its name, else by its key, else not at all."""
    if spec.name is not None:
        return name_key(project, spec.run, spec.name)
    return None if key is None else "k" + hash_of(f"{project}\0{key}")


def name_key(project: str, run: str | None, name: str) -> str:
    """Under which the node of a name is on record."""
    return "n" + hash_of(f"{project}\0{run or ''}\0{name}")


def comes_again(answer: Answered) -> bool:
    """Nothing was made, and the same node may do better in a moment: it is joining, starting or stopping."""
    return answer.status == 401 or (answer.status == 503 and b'"admission_timeout"' not in answer.body)


def is_sound(answer: Answered, edge: int) -> bool:
    """Whether an edge can have said this of a new sandbox: it is one of its own, or an error that can be read."""
    try:
        if answer.status >= 400:
            return bool(msgspec.json.decode(answer.body, type=ErrorBody).code)
        return edge_of(msgspec.json.decode(answer.body, type=_Made).id) == edge
    except msgspec.MsgspecError:
        return False


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def short(key: str) -> str:
    """A key of ours for an edge, whatever the length of the caller's."""
    return "c" + hash_of(key)


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]

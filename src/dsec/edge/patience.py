"""How long the making of a sandbox may take: a machine that boots takes longer than a container."""

from __future__ import annotations

from functools import cache
from typing import cast

from dsec.ports import Backend, PatientBackend
from dsec.spec.sandbox import SandboxSpec


def create_timeout_s(backend: Backend, spec: SandboxSpec, least: float) -> float:
    """When it has failed: after `least` seconds, or what the backend says of itself."""
    return max(least, cast("PatientBackend", backend).create_timeout_s(spec)) if _is_patient(type(backend)) else least


@cache
def _is_patient(kind: type) -> bool:
    return issubclass(kind, PatientBackend)  # which costs 20 us, of a protocol

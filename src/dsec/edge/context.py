"""Which request is being worked on: set by who takes it in, read by whoever writes it down, in no signature between.

A task inherits the value from the one that spawned it, so that what a request began keeps its id.
"""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("dsec_request_id", default="")
SANDBOX_ID: ContextVar[str] = ContextVar("dsec_sandbox_id", default="")
CHARGED_TO: ContextVar[str] = ContextVar("dsec_charged_to", default="")
"""In a cluster: the apiserver on whose share of a quota what is made counts."""


def work_on(sandbox_id: str, request_id: str) -> None:
    """For a task that works for somebody else than who spawned it."""
    SANDBOX_ID.set(sandbox_id)
    REQUEST_ID.set(request_id)

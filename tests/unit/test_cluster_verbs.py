"""Which right a call takes, of ours and of other people's clients."""

from __future__ import annotations

import pytest

from dsec.cluster.verbs import verb_of
from dsec.spec.iam import Verb


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        ("POST /v1/sandboxes", Verb.CREATE),
        ("POST /v1/sandboxes:delete", Verb.DELETE),
        ("GET /v1/sandboxes/x", Verb.READ),
        ("GET /v1/sandboxes/x/files", Verb.USE),
        ("GET /v1/sandboxes/x/trajectory", Verb.LOGS),
        ("POST /v1/sandboxes/x/verify", Verb.GRADE),
        ("POST /v1/sandboxes/x//verify", Verb.GRADE),
        ("POST //v1//sandboxes", Verb.CREATE),
        ("POST /v1/environments", Verb.LAYERS_WRITE),
        ("POST /v1/nodes/1/drain", Verb.OPERATE),
        ("POST /sandboxes", Verb.CREATE),
        ("POST /v2/sandboxes", Verb.CREATE),
        ("GET /v2/sandboxes", Verb.READ),
        ("DELETE /sandboxes/x", Verb.DELETE),
        ("POST /sandboxes/x/pause", Verb.USE),
        ("POST /sandboxes/x/snapshots", Verb.LAYERS_WRITE),
        ("POST /sandboxes/x/fork", Verb.CREATE),
        ("GET /v2/sandboxes/x/logs", Verb.LOGS),
        ("GET /templates", Verb.LAYERS_READ),
        ("POST /v3/templates", Verb.LAYERS_WRITE),
        ("PUT /templates/x/files/y", Verb.LAYERS_WRITE),
        ("GET /files", Verb.USE),
        ("POST /process.Process/Start", Verb.USE),
        ("POST /run_code", Verb.CREATE),
        ("POST /sandboxfusion/run_code", Verb.CREATE),
        ("GET /v1/ping", Verb.READ),
        ("GET /is_alive", Verb.READ),
        ("POST /execute", Verb.USE),
        ("PATCH /v1/something-new", Verb.USE),
    ],
)
def test_what_a_call_takes(call: str, verb: Verb) -> None:
    assert verb_of(*call.split()) is verb  # type: ignore[call-arg]

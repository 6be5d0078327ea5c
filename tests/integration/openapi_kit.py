"""schemathesis against a server: what the OpenAPI document allows and what it forbids, sent from a seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from msgspec import Struct

SEED = 7


class Target(Struct, frozen=True):
    """A server and what requests may name there."""

    url: str
    key: str
    box: str
    """A sandbox to use."""
    doomed: str
    """One that requests may end."""
    spare_key: str
    """The id of a key that requests may revoke."""


_CONFIG = """
seed = {seed}

[auth.openapi]
bearer.bearer = "{key}"
apiKey.api_key = "{key}"
accessToken.api_key = "{key}"

[parameters]
"path.sandbox_id" = "{box}"
"header.E2b-Sandbox-Id" = "{box}"

# 501: E2B's calls of later versions; 502: E2B's data plane about a sandbox that is gone; 511: SWE-ReX's exceptions.
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501, 502, 511]

# What a type allows isn't always possible: users, paths and programs that aren't there, NUL bytes.
[checks.positive_data_acceptance]
enabled = false

# `test_openapi_routes.py` asks every path for its methods.
[phases.coverage]
unexpected-methods = []

[[operations]]
include-path-regex = '^(/v1|/v2)?/sandboxes/\\{sandbox_id\\}(/renew|/timeout|/connect)?$'
[operations.parameters]
"path.sandbox_id" = "{doomed}"

[[operations]]
include-path = "/v1/keys/{key_id}"
[operations.parameters]
"path.key_id" = "{spare_key}"

# These would go on for ever.
[[operations]]
include-path = "/v1/sandboxes/{sandbox_id}/events"
[operations.parameters]
"query.follow" = "false"

[[operations]]
include-path = "/v1/sandboxes/{sandbox_id}/trajectory"
[operations.parameters]
"query.follow" = "false"

[[operations]]
include-path = "/v1/sandboxes/{sandbox_id}/files/watch"
[operations.parameters]
"query.path" = "/etc/passwd"

# Headers that nobody knows are no error.
[[operations]]
include-path-regex = "^/(health|files|process|filesystem)"
[operations.generation]
allow-extra-parameters = false
"""


def attack(target: Target, directory: Path, *options: str, timeout_s: float = 560.0) -> str:
    """Run it; returns what it wrote. Raises `AssertionError` where it found something."""
    path = directory / "schemathesis.toml"
    text = _CONFIG.replace("{seed}", str(SEED))
    for name in ("key", "box", "doomed", "spare_key"):
        text = text.replace("{" + name + "}", getattr(target, name))
    path.write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(path)),
            *("run", f"{target.url}/openapi.json", "--continue-on-failure", "--no-shrink", "--no-color"),
            *("--request-timeout", "20", "--warnings", "off", *options),
        ],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout

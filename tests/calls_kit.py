"""Function calls of a server, by the SDK that blocks."""

from __future__ import annotations

from typing import Any

from dsec import Client
from dsec.spec.functions import FunctionCall, FunctionResult
from server_kit import Server


def client_of(server: Server) -> Client:
    """To be closed."""
    endpoint = server.endpoint()
    return Client(endpoint.url, endpoint.api_key)


def call(client: Client, source: str, *args: Any, **fields: Any) -> FunctionResult:
    """One call of `f` in a source."""
    return client.function(source, "f", **fields).run(FunctionCall(args=list(args)))

"""Nodes of a cluster: how they are, and taking one out of service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from dsec.sdk._answers import cut_errors, decoded
from dsec.sdk._transport import Retry, Transport

Row = dict[str, Any]
"""As the HTTP API answers; docs/CLUSTER.md says what is in it."""


class AsyncNodes:
    """A cluster's nodes, with a key of its operator's (of the project `default`). Only in a cluster (else
    `NotFound`)."""

    def __init__(self, transport: Transport) -> None:
        """Not for callers: `client.nodes`."""
        self._transport = transport

    async def list(self) -> list[Row]:
        """Each with its number (`edge`), health, labels and load."""
        found: list[Row] = (await self._transport.call("GET", self._transport.url("/v1/nodes"), dict[str, Any]))[
            "nodes"
        ]
        return found

    async def cordon(self, edge: int) -> Row:
        """It gets no new sandboxes; those that it has go on. Raises `NotFound`, `PermissionDenied`."""
        return await self._post(edge, "cordon")

    async def uncordon(self, edge: int) -> Row:
        """It gets new ones again."""
        return await self._post(edge, "uncordon")

    async def drain(self, edge: int, *, deadline_s: float | None = None) -> AsyncIterator[Row]:
        """Cordon it and move what it has to other nodes, under the same ids: a row each, as it is known, with `id` and
        either `edge` (where it is now) or `error` (it stays). One in which anything runs is waited for, 300 s unless
        `deadline_s` says otherwise. Asked again it goes on, which a broken connection does by itself. Raises as
        `cordon`, `SandboxLost` where the node is lost."""
        url = self._transport.url(f"/v1/nodes/{edge}/drain", deadline_s=deadline_s)
        retry = Retry(self._transport)
        while True:
            response = await self._transport.open("POST", url, retry=retry)
            try:
                while line := await response.content.readline():
                    yield decoded(line, dict[str, Any])
                return
            except cut_errors() as error:
                cut = error
            finally:
                response.close()
            await retry.wait(cut)

    async def _post(self, edge: int, verb: str) -> Row:
        return await self._transport.call("POST", self._transport.url(f"/v1/nodes/{edge}/{verb}"), dict[str, Any])

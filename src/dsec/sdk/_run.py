"""Runs: named sets of sandboxes, and the leases by which they outlive their trainers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from dsec.errors import DsecError, NotFound, RunFenced
from dsec.sdk._many import move_many
from dsec.sdk._sandbox import AsyncSandbox
from dsec.sdk._transport import Transport
from dsec.spec.runs import OnLapse, RunInfo, RunRequest
from dsec.spec.sandbox import SandboxInfo, SandboxSpec, State

if TYPE_CHECKING:
    from dsec.sdk._client import AsyncClient

_JSON = {"Content-Type": "application/json"}
_RENEWALS = 4
"""In each lease."""


class AsyncRun:
    """A training or evaluation job: sandboxes that are found again by name, by any process.

    With a lease (`lease_s`), opened by `async with`, `open` or the first call: the server applies `on_lapse` to all of
    the run's sandboxes when nobody has renewed the lease for so long. This object renews it in the background, and what
    is asked through it and its sandboxes is refused (`RunFenced`) once another process has opened the run. Leaving
    `async with` ends the renewals and nothing else.
    """

    def __init__(
        self, client: AsyncClient, name: str, lease_s: float | None, on_lapse: OnLapse, info: RunInfo | None = None
    ) -> None:
        """Not for callers: use `client.run` or `client.attach_run`."""
        self._client = client
        self._asked = None if lease_s is None else RunRequest(name=name, lease_s=lease_s, on_lapse=on_lapse)
        self._opening = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self.name: str = name
        self.info: RunInfo | None = info
        """As the server last said; None: without a lease, or not open yet."""
        if info is not None:
            self._speak(info)

    @property
    def epoch(self) -> int | None:
        """Of this client; None: without a lease, or not open yet."""
        return None if self.info is None else self.info.epoch

    async def open(self, *, request_timeout_s: float | None = None) -> RunInfo | None:
        """Begin a new epoch of the run (once) and renew its lease from now on; None for a run without a lease."""
        async with self._opening:
            if self.info is None and self._asked is not None:
                transport = self._transport
                info = await transport.call(
                    "POST",
                    transport.url("/v1/runs"),
                    RunInfo,
                    body=msgspec.json.encode(self._asked),
                    headers=_JSON,
                    request_timeout_s=request_timeout_s,
                )
                self.info = info
                self._speak(info)
            if self.info is not None and self._renewing is None:
                self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return self.info

    async def renew(self, *, request_timeout_s: float | None = None) -> RunInfo:
        """Renew the lease now. Raises `RunFenced`, and `NotFound` where the run has no lease."""
        if self.info is None:
            raise NotFound(f"the run {self.name!r} has no lease that is open")
        transport = self._transport
        self.info = await transport.call(
            "POST",
            transport.url("/v1/runs:renew"),
            RunInfo,
            body=msgspec.json.encode({"name": self.name, "epoch": self.info.epoch}),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )
        return self.info

    async def sandbox(
        self,
        name: str,
        environment: str | SandboxSpec,
        *,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncSandbox:
        """The live sandbox of this name in this run, or a new one. Raises `Conflict` where it exists with another
        spec, `RunFenced`; else as `AsyncSandbox.create`."""
        await self.open()
        return await AsyncSandbox.create(
            environment,
            client=self._client,
            deadline_s=deadline_s,
            request_timeout_s=request_timeout_s,
            **{**fields, "run": self.name, "name": name},
        )

    async def list(
        self,
        *,
        states: Sequence[State | str] = (),
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        request_timeout_s: float | None = None,
    ) -> list[SandboxInfo]:
        """The run's sandboxes; see `AsyncSandbox.list`."""
        return await AsyncSandbox.list(
            states=states,
            run=self.name,
            labels=labels,
            limit=limit,
            client=self._client,
            request_timeout_s=request_timeout_s,
        )

    async def pause(self, *, request_timeout_s: float | None = None) -> dict[str, DsecError | None]:
        """Pause all of the run's running sandboxes; see `client.pause_many`."""
        await self.open()
        return await move_many(self._transport, "pause", {"run": self.name}, request_timeout_s)

    async def kill(self, *, request_timeout_s: float | None = None) -> dict[str, DsecError]:
        """End all of the run's sandboxes; returns the errors by id."""
        infos = await self.list(request_timeout_s=request_timeout_s)
        return await AsyncSandbox.kill_many(infos, client=self._client, request_timeout_s=request_timeout_s)

    async def close(self) -> None:
        """Renew the lease no more: without another client of this epoch it lapses. Idempotent."""
        task, self._renewing = self._renewing, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self.info is not None:
            await self._client.close()

    @property
    def _transport(self) -> Transport:
        return self._client._transport

    def _speak(self, info: RunInfo) -> None:
        self._transport.speaks_for = f"{info.epoch} {quote(info.name, safe='')}"

    async def _renew(self) -> None:
        while self.info is not None:
            await asyncio.sleep(self.info.lease_s / _RENEWALS)
            try:
                await self.renew(request_timeout_s=self.info.lease_s)
            except (RunFenced, NotFound):
                return  # whatever is asked next says so
            except DsecError:
                continue  # a server that is away: its leases are whole when it is back

    async def __aenter__(self) -> AsyncRun:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

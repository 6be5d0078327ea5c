"""The client: one server, its connections, and what concerns more than one sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec

from dsec.errors import DsecError
from dsec.sdk._catalog import AsyncCatalog
from dsec.sdk._config import find_endpoint
from dsec.sdk._functions import AsyncFunction, function_spec
from dsec.sdk._judging import Cases, JudgeResult, OnCase, judge, judge_lines, judge_many, judge_spec
from dsec.sdk._many import chosen, move_many, run_many
from dsec.sdk._nodes import AsyncNodes
from dsec.sdk._results import CreateResult, RunResult
from dsec.sdk._rights import AsyncRights
from dsec.sdk._run import AsyncRun
from dsec.sdk._sandbox import AsyncSandbox
from dsec.sdk._transport import RETRY_S, Transport
from dsec.spec.causes import Cause
from dsec.spec.functions import FunctionSpec
from dsec.spec.judging import CaseVerdict, Judged, JudgeSpec, JudgeVerdict
from dsec.spec.network import KeyPolicy
from dsec.spec.runs import OnLapse, RunInfo
from dsec.spec.sandbox import ExecSpec, SandboxInfo, SandboxSpec, State
from dsec.spec.trajectory import RebuildRequest, Rebuilt

Layers = list[str]
Keys = list[dict[str, Any]]

_JSON = {"Content-Type": "application/json"}


class AsyncClient:
    """A dsec server. Cheap to keep, to be shared by all tasks of an event loop; connections are pooled without a limit.

    `url`, `api_key`: None: from DSEC_URL and DSEC_API_KEY, else the `client.json` that `dsec serve` wrote on this
    machine. `retry_s`: for how long broken connections, overload and a restarting server are retried, always with the
    same idempotency key; the first request to a server that isn't there fails at once.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, retry_s: float = RETRY_S) -> None:
        self._transport = Transport(find_endpoint(url, api_key), retry_s=retry_s)
        self.catalog: AsyncCatalog = AsyncCatalog(self._transport)
        """Layers and environments."""
        self.rights: AsyncRights = AsyncRights(self._transport)
        """Projects, roles and keys of a cluster."""
        self.nodes: AsyncNodes = AsyncNodes(self._transport)
        """A cluster's nodes."""

    @property
    def url(self) -> str:
        """The server's."""
        return self._transport.endpoint.url

    async def create(
        self,
        environment: str | SandboxSpec,
        *,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncSandbox:
        """Make a sandbox; see `AsyncSandbox.create`."""
        return await AsyncSandbox.create(
            environment, client=self, key=key, deadline_s=deadline_s, request_timeout_s=request_timeout_s, **fields
        )

    async def create_many(
        self,
        specs: SandboxSpec | str | Iterable[SandboxSpec | str],
        *,
        count: int | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[CreateResult[AsyncSandbox]]:
        """Make many sandboxes, yielding each as it is ready; see `AsyncSandbox.create_many`."""
        results = AsyncSandbox.create_many(
            specs,
            count=count,
            client=self,
            key=key,
            deadline_s=deadline_s,
            request_timeout_s=request_timeout_s,
            **fields,
        )
        async for result in results:
            yield result

    async def connect(self, sandbox_id: str, *, request_timeout_s: float | None = None) -> AsyncSandbox:
        """The sandbox of an id; see `AsyncSandbox.connect`."""
        return await AsyncSandbox.connect(sandbox_id, client=self, request_timeout_s=request_timeout_s)

    async def find(self, name: str, *, run: str | None = None, request_timeout_s: float | None = None) -> AsyncSandbox:
        """The live sandbox of a name. Raises `SandboxNotFound`."""
        url = self._transport.url(f"/v1/named/{quote(run or '-', safe='')}/{quote(name, safe='')}")
        info = await self._transport.call("GET", url, SandboxInfo, request_timeout_s=request_timeout_s)
        return AsyncSandbox(self._transport, info)

    def run(self, name: str, *, lease_s: float | None = None, on_lapse: OnLapse = "pause") -> AsyncRun:
        """A run by its name: its sandboxes are made and found by names of their own.

        `lease_s`: it has a lease, renewed in the background by this process; it is opened, which begins a new epoch and
        fences off the clients of earlier ones, by `async with` or the first call. `on_lapse`: what becomes of all its
        sandboxes when nobody renews it: `pause`, `stop` or `keep`."""
        client = self if lease_s is None else self._apart()
        return AsyncRun(client, name, lease_s, on_lapse)

    async def attach_run(self, name: str, *, request_timeout_s: float | None = None) -> AsyncRun:
        """A run that has a lease, as one more client of its current epoch: its sandboxes are found again, and its lease
        is renewed. Raises `NotFound`."""
        url = self._transport.url("/v1/runs", name=name)
        found = await self._transport.call("GET", url, dict[str, list[RunInfo]], request_timeout_s=request_timeout_s)
        run = AsyncRun(self._apart(), name, None, "pause", found["runs"][0])
        await run.open()
        await run.renew()
        return run

    def _apart(self) -> AsyncClient:
        """A client of the same server whose requests speak for a run."""
        client = AsyncClient.__new__(AsyncClient)
        client._transport = Transport(self._transport.endpoint, retry_s=self._transport.retry_s)
        client.catalog = AsyncCatalog(client._transport)
        client.rights = AsyncRights(client._transport)
        client.nodes = AsyncNodes(client._transport)
        return client

    async def list(
        self,
        *,
        states: Sequence[State | str] = (),
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        request_timeout_s: float | None = None,
    ) -> list[SandboxInfo]:
        """The project's sandboxes; see `AsyncSandbox.list`."""
        return await AsyncSandbox.list(
            states=states, run=run, labels=labels, limit=limit, client=self, request_timeout_s=request_timeout_s
        )

    async def kill(self, sandbox_id: str, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """End a sandbox; again: the same answer. Raises `SandboxNotFound`."""
        url = self._transport.url(f"/v1/sandboxes/{quote(sandbox_id, safe='')}")
        return await self._transport.call("DELETE", url, SandboxInfo, request_timeout_s=request_timeout_s)

    async def kill_many(
        self,
        sandboxes: Iterable[str | AsyncSandbox | SandboxInfo],
        *,
        cause: Cause = Cause.DELETED,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError]:
        """End many sandboxes; returns the errors by id; see `AsyncSandbox.kill_many`."""
        return await AsyncSandbox.kill_many(sandboxes, cause=cause, client=self, request_timeout_s=request_timeout_s)

    async def pause_many(
        self,
        sandboxes: Iterable[str | AsyncSandbox | SandboxInfo] = (),
        *,
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError | None]:
        """Pause many sandboxes in one call: those given, or all running ones of a run and with these labels. Returns
        what became of each: None, or why it could not be paused."""
        asked = chosen(sandboxes, run, labels)
        return await move_many(self._transport, "pause", asked, request_timeout_s)

    async def resume_many(
        self,
        sandboxes: Iterable[str | AsyncSandbox | SandboxInfo] = (),
        *,
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        request_timeout_s: float | None = None,
    ) -> dict[str, DsecError | None]:
        """Let many paused sandboxes go on; as `pause_many`."""
        asked = chosen(sandboxes, run, labels)
        return await move_many(self._transport, "resume", asked, request_timeout_s)

    async def rebuild(
        self,
        sandbox_id: str,
        *,
        upto: int | None = None,
        stop: bool = False,
        from_start: bool = False,
        request_timeout_s: float | None = None,
    ) -> Rebuilt:
        """Make a sandbox again, under another id, from its trajectory: what its callers did is done again (entries up
        to the number `upto`) and compared; `diverged` says where outcomes first differ. `stop`: end there. It
        begins from the last snapshot that was taken of everything (`scrub=False`) while nothing ran inside, unless
        `from_start`. Connect to `rebuilt.sandbox.id`; keys of commands have their results there too. Not repeated where
        the connection breaks (`OutcomeUnknown`)."""
        request = RebuildRequest(
            sandbox=sandbox_id, upto=upto, on_divergence="stop" if stop else "go_on", from_start=from_start
        )
        return await self._transport.call(
            "POST",
            self._transport.url("/v1/sandboxes:rebuild"),
            Rebuilt,
            body=msgspec.json.encode(request),
            headers=_JSON,
            replay=False,
            request_timeout_s=request_timeout_s,
        )

    async def run_many(
        self,
        commands: Iterable[tuple[AsyncSandbox, str | Sequence[str] | ExecSpec]],
        *,
        request_timeout_s: float | None = None,
    ) -> AsyncIterator[RunResult]:
        """Run a command in each of many sandboxes, by one request: yields a `RunResult` for each as it ends, with a
        result or an error.

        A command is argv, a str for the shell, or an `ExecSpec` (without `stdin`) whose `key`, if it has one, is an
        idempotency key as in `commands.run`. A connection that breaks is made again, and nothing runs twice. Leaving
        the loop stops nothing. Raises what is wrong with the request as a whole.
        """
        async for result in run_many(self._transport, commands, request_timeout_s):
            yield result

    def function(self, target: Callable[..., Any] | str | FunctionSpec, name: str = "", **fields: Any) -> AsyncFunction:
        """A function to be called on the server's side, each call in a fresh, jailed process.

        `target`: a function, of which its source is taken (it sees none of the names around it here); a source, with
        the `name` in it that is called, or without one a program that each call runs; or `module:name` of the
        environment's own. `fields` are those of `FunctionSpec`: `environment`, `imports` (modules that are there
        already when a call begins), `language`, `files`, `take`, `limits` and so on. Raises `InvalidRequest`.
        """
        return AsyncFunction(self._transport, function_spec(target, name, fields))

    async def judge(
        self,
        source: str | JudgeSpec,
        cases: Cases = (),
        *,
        on_case: OnCase | None = None,
        request_timeout_s: float | None = None,
        **fields: Any,
    ) -> Judged:
        """Judge a program by test cases: `Case`s, or pairs of stdin and what is expected. `fields` are those of
        `JudgeSpec`: `language`, `environment`, `checker`, `limits`, `stop_early` and so on; or pass a whole one.

        Safe to repeat: a connection that breaks is made again and the submission judged again. Cancelling it ends what
        runs. Raises `InvalidRequest`, `EnvironmentNotFound`, `Unsupported` (no such toolchain there)."""
        return await judge(self._transport, judge_spec(source, cases, fields), on_case, request_timeout_s)

    async def judge_stream(
        self, source: str | JudgeSpec, cases: Cases = (), **fields: Any
    ) -> AsyncIterator[CaseVerdict | JudgeVerdict]:
        """As `judge`: the cases' verdicts as they come, the submission's last. Leaving the loop ends what runs."""
        lines = judge_lines(self._transport, judge_spec(source, cases, fields))
        async with aclosing(lines):
            async for line in lines:
                yield line

    async def judge_many(self, specs: Iterable[JudgeSpec], *, at_once: int = 16) -> AsyncIterator[JudgeResult]:
        """Judge many submissions, `at_once` at a time; yields a `JudgeResult` for each as it ends, with its verdicts or
        an error. Leaving the loop ends what runs."""
        results = judge_many(self._transport, specs, at_once)
        async with aclosing(results):
            async for result in results:
                yield result

    async def environments(self, *, request_timeout_s: float | None = None) -> dict[str, Layers]:
        """Environments that sandboxes can be made of, with their layers, top first."""
        url = self._transport.url("/v1/environments")
        answer = await self._transport.call("GET", url, dict[str, Any], request_timeout_s=request_timeout_s)
        return {each["name"]: each["layers"] for each in answer["environments"]}

    async def node(self, *, request_timeout_s: float | None = None) -> dict[str, Any]:
        """Facts and counts of the server's node."""
        url = self._transport.url("/v1/node")
        return await self._transport.call("GET", url, dict[str, Any], request_timeout_s=request_timeout_s)

    async def create_key(
        self, label: str = "", *, policy: KeyPolicy | None = None, request_timeout_s: float | None = None
    ) -> str:
        """A further API key of this project; it is not shown again. `policy`: what it may grant sandboxes to reach, at
        most what this client's key may (None: the same). Not repeated where the connection breaks
        (`OutcomeUnknown`)."""
        answer = await self._transport.call(
            "POST",
            self._transport.url("/v1/keys"),
            dict[str, str],
            body=msgspec.json.encode({"label": label, "policy": policy}),
            headers=_JSON,
            replay=False,
            request_timeout_s=request_timeout_s,
        )
        return answer["key"]

    async def list_keys(self, *, request_timeout_s: float | None = None) -> Keys:
        """The project's API keys: `id`, `label`, `created_at`, `revoked_at`; not the keys themselves."""
        url = self._transport.url("/v1/keys")
        answer = await self._transport.call("GET", url, dict[str, Any], request_timeout_s=request_timeout_s)
        keys: Keys = answer["keys"]
        return keys

    async def revoke_key(self, key_id: str, *, request_timeout_s: float | None = None) -> None:
        """Revoke an API key by its id. Raises `NotFound`."""
        url = self._transport.url(f"/v1/keys/{quote(key_id, safe='')}")
        await self._transport.call("DELETE", url, type(None), request_timeout_s=request_timeout_s)

    async def close(self) -> None:
        """Close the connections; sandboxes and commands go on. Idempotent. Connections of a client that nobody closed
        are closed when the event loop ends."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

"""Runs the judge's commands in containers: a sandbox for each, made and ended by the edge."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import cast

from dsec.edge.client import Created, EdgeClient, Execution
from dsec.errors import CallerError, DsecError, OutcomeUnknown
from dsec.grading.running import Job, Ran
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import MIB, ExecSpec, ExecStatus, SandboxSpec

LABEL = "dsec.judge"
_GRACE_S = 60.0
_STDIN_CHUNK = 1 << 18
_LEAST_LOOK_S = 0.02
_OTHER_CPU_S = 0.05
"""Of the sandbox's CPU time that is not the command's."""


class ContainerRunner:
    """A fresh container for each job. As many at once as are asked for: the judge bounds them."""

    def __init__(self, edge: EdgeClient) -> None:
        self._edge = edge

    async def run(self, job: Job) -> Ran:
        """See `Runner`."""
        limits = job.limits
        wanted = SandboxSpec(
            environment=job.environment,
            memory_bytes=limits.memory_bytes,
            disk_bytes=256 * MIB,
            pids=limits.pids,
            ttl_s=limits.wall_s + _GRACE_S,
            user="root",
            no_new_privs=True,
            labels={LABEL: "1"},
        )
        creating = asyncio.ensure_future(self._edge.create(wanted, project=job.project))
        try:
            sandbox = (await asyncio.shield(creating)).sandbox.id
            for path, content in job.files.items():
                deep = path.count(b"/") > 2
                await self._edge.write_file(sandbox, path, _once(content), user="nobody", mode=0o755, parents=deep)
            return await self._run(sandbox, job)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end(creating)))

    async def _end(self, creating: asyncio.Future[Created]) -> None:
        with suppress(DsecError):
            created = await creating
            await self._edge.delete(created.sandbox.id)

    async def _run(self, sandbox: str, job: Job) -> Ran:
        spec = ExecSpec(
            argv=list(job.argv),
            cwd="/tmp",
            user="nobody",
            env={"HOME": "/tmp"},
            stdin=bool(job.stdin),
            command_timeout_s=job.limits.wall_s,
            output_bytes=job.limits.output_bytes,
            kill_leftovers=True,
        )
        execution = await self._edge.exec(sandbox, spec, patient=True)
        helpers = [asyncio.ensure_future(self._watch(sandbox, execution.key, job.limits.cpu_s))]
        if job.stdin:
            helpers.append(asyncio.ensure_future(_feed(execution, job.stdin)))
        streams = (bytearray(), bytearray())
        try:
            events = cast("AsyncGenerator[Chunk | ExecStatus]", execution.events())
            async with aclosing(events):
                async for event in events:
                    if not isinstance(event, ExecStatus):
                        streams[event.stderr].extend(event.data)
                        continue
                    fetched = await self._fetched(sandbox, job) if job.fetch else {}
                    return Ran(status=event, stdout=bytes(streams[0]), stderr=bytes(streams[1]), fetched=fetched)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        raise OutcomeUnknown("the command's end was never told")

    async def _watch(self, sandbox: str, key: str, cpu_s: float) -> None:
        """End what has used its CPU time, which takes at least a share of that of wall time."""
        cores = os.cpu_count() or 1
        left = cpu_s
        while True:
            await asyncio.sleep(max(left / cores, _LEAST_LOOK_S))
            left = cpu_s + _OTHER_CPU_S - self._edge.usage(sandbox).cpu_us / 1e6
            if left < 0:
                await self._edge.signal(sandbox, key, 9, "all")
                return

    async def _fetched(self, sandbox: str, job: Job) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        room = job.fetch_bytes
        for path in job.fetch:
            with suppress(CallerError):
                if (await self._edge.stat_file(sandbox, path, user="nobody")).type != "file":
                    continue
                reading = self._edge.read_file(sandbox, path, user="nobody", length=room + 1)
                chunks = cast("AsyncGenerator[bytes]", reading)
                async with aclosing(chunks):
                    content = b"".join([data async for data in chunks])
                if len(content) <= room:
                    found[path] = content
                    room -= len(content)
        return found


async def _feed(execution: Execution, stdin: bytes) -> None:
    for at in range(0, len(stdin), _STDIN_CHUNK):
        await execution.write_stdin(stdin[at : at + _STDIN_CHUNK])
    await execution.close_stdin()


async def _once(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data

"""Verification apart: a grader runs in a fresh sandbox from pristine layers plus the allowed part of an agent's
changes.

Invariants: nothing of the agent's sandbox reaches the grader's but the content of plain files at allowed paths; hidden
files are put there last and were never in the agent's; the grader's sandbox has no network and ends with its run;
what the platform did wrong is `infra` and no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from dsec.edge.client import EdgeClient, Principal
from dsec.errors import CallerError, DsecError, FileError, FileMissing, InvalidRequest, OutcomeUnknown
from dsec.grading.submission import Change, Submission, read_submission
from dsec.plan.reports import MAX_REPORT_BYTES, Outcome, differ, judge
from dsec.plan.submission import NEVER_INHERITED, Allowed, normal_path, steers
from dsec.spec.causes import Cause
from dsec.spec.grading import Grader, GraderRun, ReportKind, Untaken, Verdict, VerifySpec, Why
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, SandboxInfo, SandboxSpec, invalid_exec
from dsec.store.environments import PATH, SCRATCH

LABEL = "dsec.verify"
AT_ONCE = 16
"""Graders; others wait."""
LAST_BYTES = 8192
"""Of a grader's output, in the verdict."""
TOLD = 1000
_SLACK_S = 300.0
_WRITERS = 8
_DEPTH = 1000
CLEAN = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}
"""Over the environment's own variables; a grader that wants another value says so."""

T = TypeVar("T")
Lending = Callable[[str, Iterable[str]], AbstractContextManager[None]]


class Verifier:
    """The verifications of one node."""

    def __init__(
        self,
        edge: EdgeClient,
        *,
        written: Callable[[str], AbstractAsyncContextManager[Path]],
        lending: Lending,
        scratch: Callable[[], TemporaryDirectory[str]],
    ) -> None:
        """`written`: what a sandbox has written, as an overlay's upper directory, in which nothing changes while the
        context lasts. `lending`: as `EnvironmentStore.lending`. `scratch`: a directory on the data's disk."""
        self._edge = edge
        self._written = written
        self._lending = lending
        self._scratch = scratch
        self._room = asyncio.Semaphore(AT_ONCE)

    async def clear(self) -> None:
        """End the graders of an earlier server. Call when none runs."""
        for project in {key.project for key in self._edge.list_keys()}:
            page = await self._edge.list_sandboxes(project, limit=1000)
            for info in page.sandboxes:
                if LABEL in info.spec.labels:
                    await self._end(info.id)

    async def verify(self, principal: Principal, sandbox_id: str, spec: VerifySpec) -> Verdict:
        """Judge what the agent has changed so far. Raises `InvalidRequest`, `SandboxEnded`, `TooLarge` (more changes
        than can be taken), `NotFound` (a hidden layer), `Unsupported`, and what making a sandbox raises."""
        allowed = Allowed(spec.paths, spec.grader.files)
        wrong = invalid_exec(ExecSpec(argv=spec.grader.argv, env=spec.grader.env, user=spec.grader.user))
        if wrong is not None:
            raise InvalidRequest(wrong, field="grader")
        info = self._edge.get(sandbox_id)
        scratch = self._scratch()
        try:
            submission = await self._taken(sandbox_id, allowed, Path(scratch.name))
            graded = (self._graded(principal.project, info, spec.grader, submission) for _ in range(spec.repeats))
            return _verdict(submission, await _gather(graded))
        finally:
            await asyncio.to_thread(scratch.cleanup)

    async def _taken(self, sandbox_id: str, allowed: Allowed, scratch: Path) -> Submission:
        try:
            async with self._written(sandbox_id) as upper:
                return await asyncio.to_thread(read_submission, upper, allowed, scratch)
        except FileNotFoundError:
            self._edge.usage(sandbox_id)  # says how it ended
            raise OutcomeUnknown("the sandbox's files went away while they were read") from None

    async def _graded(
        self, project: str, info: SandboxInfo, grader: Grader, submission: Submission
    ) -> tuple[GraderRun, Outcome | None]:
        async with self._room:
            layers = list(info.spec.layers)
            wanted = SandboxSpec(
                environment=SCRATCH if layers else info.spec.environment,
                backend=info.spec.backend,
                layers=[*grader.layers, *layers],
                cpus=grader.cpus,
                memory_bytes=grader.memory_bytes,
                disk_bytes=grader.disk_bytes,
                pids=grader.pids,
                ttl_s=grader.timeout_s + _SLACK_S,
                user="root",
                workdir="/",
                no_new_privs=True,
                labels={LABEL: info.id},
            )
            with self._lending(project, layers):
                creating = asyncio.ensure_future(self._edge.create(wanted, project=project))
                try:
                    created = await asyncio.shield(creating)
                except asyncio.CancelledError:
                    creating.add_done_callback(
                        lambda made: (
                            None if made.cancelled() or made.exception() else self._end_soon(made.result().sandbox.id)
                        )
                    )
                    raise
            sandbox = created.sandbox.id
            try:
                untaken = await self._place(sandbox, submission.changes)
                submission.untaken_total += len(untaken)
                submission.untaken += untaken
                await self._hide(sandbox, grader)
                return await self._run(sandbox, info, created.sandbox, grader)
            finally:
                await asyncio.shield(asyncio.ensure_future(self._end(sandbox)))

    def _end_soon(self, sandbox: str) -> None:
        _ending.add(task := asyncio.ensure_future(self._end(sandbox)))
        task.add_done_callback(_ending.discard)

    async def _end(self, sandbox: str) -> None:
        with contextlib.suppress(DsecError):
            await self._edge.delete(sandbox)

    # --- the tree ---

    async def _place(self, sandbox: str, changes: Iterable[Change]) -> list[Untaken]:
        """Make the pristine tree the submission; what can't be, since pristine files that steer tools are in the
        way, is returned."""
        refused: list[Untaken] = []
        files: list[Change] = []
        for change in changes:
            if change.kind == "clear":
                await self._clear(sandbox, change.path)
            elif change.kind == "directory":
                with contextlib.suppress(FileError):
                    await self._edge.make_directory(sandbox, change.path, user="root", mode=change.mode, parents=True)
            else:
                files.append(change)
        room = asyncio.Semaphore(_WRITERS)

        async def write(change: Change) -> None:
            assert change.content is not None
            async with room:
                try:
                    await self._edge.write_file(
                        sandbox,
                        change.path,
                        _pieces(change.content),
                        user="root",
                        mode=change.mode,
                        parents=True,
                        exclusive=True,
                    )
                except FileError as error:
                    if error.details.get("errno") not in ("EEXIST", "ENOTDIR"):
                        raise
                    refused.append(Untaken(change.path.decode(errors="replace"), "file", Why.STEERS))

        await _gather(write(change) for change in files)
        return refused

    async def _clear(self, sandbox: str, path: bytes) -> None:
        """Remove what is there, but files that steer tools: the agent may not take those away either."""
        try:
            top = await self._edge.stat_file(sandbox, path, user="root")
            entries = (
                await self._edge.list_files(sandbox, path, user="root", depth=_DEPTH) if top.type == "directory" else []
            )
        except (FileMissing, FileError):
            return
        names = {_bytes(entry.name, entry.name_b64): entry.type for entry in entries}
        kept = {name for name in names if any(steers(part) for part in name.split(b"/"))}
        kept |= {name[:at] for name in kept for at in range(len(name)) if name[at : at + 1] == b"/"}
        if not kept:
            await self._edge.remove_file(sandbox, path, user="root", recursive=True)
            return
        for name in sorted(names.keys() - kept):
            if name.rpartition(b"/")[0] in kept or b"/" not in name:
                await self._edge.remove_file(sandbox, path + b"/" + name, user="root", recursive=True)

    async def _hide(self, sandbox: str, grader: Grader) -> None:
        """Put the hidden files in, over whatever is there."""
        private = grader.user in ("root", "0")
        for name, content in grader.files.items():
            path = normal_path(name)
            with contextlib.suppress(FileMissing, FileError):
                await self._edge.remove_file(sandbox, path, user="root", recursive=True)
            mode = 0o700 if private else 0o755
            await self._edge.write_file(
                sandbox, path, _once(content), user="root", mode=mode, parents=True, exclusive=True
            )

    # --- the run ---

    async def _run(
        self, sandbox: str, agent: SandboxInfo, fresh: SandboxInfo, grader: Grader
    ) -> tuple[GraderRun, Outcome | None]:
        directory = f"/tmp/dsec-{secrets.token_hex(8)}"
        report = f"{directory}/report"
        await self._edge.make_directory(sandbox, directory.encode(), user=grader.user, mode=0o700)
        root = grader.user in ("root", "0")
        env = {"PATH": PATH} | fresh.spec.env | agent.spec.env
        env |= {name: "" for name in NEVER_INHERITED if name in env} | CLEAN
        env |= {"HOME": "/root" if root else directory, "DSEC_REPORT": report} | grader.env
        argv = list(grader.argv)
        if grader.report is ReportKind.PYTEST:
            argv += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        spec = ExecSpec(
            argv=argv,
            env=env,
            cwd=grader.cwd or agent.spec.workdir or "/",
            user=grader.user,
            command_timeout_s=grader.timeout_s,
            output_bytes=grader.output_bytes,
            kill_leftovers=True,
        )
        status, stdout, stderr = await self._followed(sandbox, spec)
        if status.infra:
            return _told(sandbox, status, None, stdout, stderr), None
        content = None
        if grader.report not in (ReportKind.EXIT, ReportKind.TAP):
            content = await self._report(sandbox, report, grader.user)
        outcome = judge(grader, status.exit_code, stdout, content)
        if status.cause is not Cause.EXITED:
            message = f"the grader was ended: {status.cause.value}"
            outcome = Outcome(reward=0.0, tests=outcome.tests, score=outcome.score, message=message)
        return _told(sandbox, status, outcome, stdout, stderr), outcome

    async def _report(self, sandbox: str, path: str, user: str) -> bytes | None:
        parts = []
        try:
            chunks = cast(
                "AsyncGenerator[bytes]",
                self._edge.read_file(sandbox, path.encode(), user=user, length=MAX_REPORT_BYTES + 1),
            )
            async with aclosing(chunks):
                parts += [data async for data in chunks]
        except CallerError:
            return None
        return b"".join(parts)

    async def _followed(self, sandbox: str, spec: ExecSpec) -> tuple[ExecStatus, bytes, bytes]:
        execution = await self._edge.exec(sandbox, spec)
        streams = (bytearray(), bytearray())
        events = cast("AsyncGenerator[Chunk | ExecStatus]", execution.events())
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ExecStatus):
                    return event, bytes(streams[0]), bytes(streams[1])
                streams[event.stderr].extend(event.data)
        raise OutcomeUnknown("the grader's end was never told")


_ending: set[asyncio.Task[None]] = set()


def _told(sandbox: str, status: ExecStatus, outcome: Outcome | None, stdout: bytes, stderr: bytes) -> GraderRun:
    return GraderRun(
        sandbox=sandbox,
        reward=None if outcome is None else outcome.reward,
        exit_code=status.exit_code,
        cause=status.cause,
        infra=status.infra,
        message=status.message if outcome is None else outcome.message,
        passed=0 if outcome is None else outcome.passed,
        failed=0 if outcome is None else outcome.failed,
        tests=[] if outcome is None else outcome.tests,
        score=None if outcome is None else outcome.score,
        stdout=stdout[-LAST_BYTES:].decode(errors="replace"),
        stderr=stderr[-LAST_BYTES:].decode(errors="replace"),
        wall_s=status.wall_s,
        cpu_s=status.cpu_s,
    )


def _verdict(submission: Submission, results: list[tuple[GraderRun, Outcome | None]]) -> Verdict:
    runs = [run for run, _ in results]
    outcomes = [outcome for _, outcome in results if outcome is not None]
    infra = len(outcomes) < len(runs)
    flaky = differ(outcomes)
    taken = [
        change.path.decode(errors="replace")
        for before, change in zip([None, *submission.changes], submission.changes, strict=False)
        if change.kind != "directory" and not (before and before.kind == "clear" and change.path == before.path)
    ]
    untaken = sorted({(each.path, each.kind, each.why) for each in submission.untaken})
    message = next((run.message for run in runs if run.message), "")
    return Verdict(
        reward=None if infra else min(outcome.reward for outcome in outcomes),
        infra=infra,
        flaky=flaky,
        message=message or ("the runs differ" if flaky else ""),
        runs=runs,
        taken=taken[:TOLD],
        taken_total=len(taken),
        untaken=[Untaken(*each) for each in untaken[:TOLD]],
        untaken_total=max(len(untaken), submission.untaken_total if len(untaken) >= TOLD else 0),
    )


def _bytes(name: str, encoded: str | None) -> bytes:
    return name.encode() if encoded is None else b64decode(encoded)


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results. The first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with open(path, "rb", buffering=0) as file:  # noqa: ASYNC230 (just written: the page cache's)
        while data := file.read(1 << 18):
            yield data


async def _once(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data

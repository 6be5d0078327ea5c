"""Where cases are tried: real sandboxes of a server, made by the SDK, of any backend.

Owns the sandboxes: one that attempts share, and fresh ones for cases that spoil theirs. After every batch of attempts
the shared one is looked at from outside: it must run, answer, and be what it was.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from dsec.errors import DsecError, Unsupported
from dsec.sdk._client import AsyncClient
from dsec.sdk._sandbox import AsyncSandbox
from dsec.spec.sandbox import State
from dsec.testing.misbehaviour import inside
from dsec.testing.misbehaviour.case import Case, Check, Outcome, Skipped, Verdict

BATCH_TIMEOUT_S = 120.0
CASE_TIMEOUT_S = 90.0
WIDTH = 3
"""Cases with sandboxes of their own that run at the same time."""

Told = Callable[[Outcome], None]


class Arena:
    """Sandboxes to misbehave in."""

    def __init__(self, client: AsyncClient, environment: str = "debian", backend: str = "container") -> None:
        self.client = client
        self._fields: dict[str, Any] = {"environment": environment, "backend": backend, "ttl_s": 900.0}

    @asynccontextmanager
    async def sandbox(self, **fields: Any) -> AsyncIterator[AsyncSandbox]:
        """A fresh one, which is ended afterwards. Raises `Skipped` where the backend hasn't got what is asked for."""
        try:
            made = await self.client.create(**{**self._fields, **fields})
        except Unsupported as error:
            raise Skipped(error.message) from error
        async with made:
            yield made

    async def attempt(self, sandbox: AsyncSandbox, code: str, *, user: str | None = None) -> str:
        """Make one attempt inside; what it saw."""
        return (await self.attempts(sandbox, {"one": code}, user=user)).get("one", "nothing")

    async def attempts(
        self, sandbox: AsyncSandbox, codes: dict[str, str], *, user: str | None = None
    ) -> dict[str, str]:
        """Make attempts one after the other; what each saw."""
        program = f"{inspect.getsource(inside)}\nmain({json.dumps(json.dumps(codes))})\n"
        result = await sandbox.commands.run(
            ["python3", "-"], stdin=program, user=user, command_timeout_s=BATCH_TIMEOUT_S, kill_leftovers=True
        )
        if result.exit_code == 127:
            raise Skipped("the environment has no python3")
        seen = {}
        for line in result.stdout.splitlines():
            try:
                said = json.loads(line)
                seen[str(said["name"])] = str(said["seen"])
            except (ValueError, KeyError, TypeError):
                continue  # an attempt wrote to what it inherited
        return seen

    async def unharmed(self, sandbox: AsyncSandbox) -> str:
        """Look from outside: empty where it runs, answers and runs commands; else what is wrong."""
        try:
            info = await sandbox.refresh()
            if info.state is not State.RUNNING:
                return f"the sandbox is {info.state}: {info.cause} {info.message}"
            result = await sandbox.commands.run(["/bin/echo", "unharmed"], command_timeout_s=30.0)
            if result.stdout != "unharmed\n":
                return f"a command said {result.stdout[:100]!r}, exit {result.exit_code}, {result.cause}"
            await sandbox.files.write("/tmp/unharmed", b"yes")
            if await sandbox.files.read_bytes("/tmp/unharmed") != b"yes":
                return "a file call gives back other bytes"
        except DsecError as error:
            return f"it doesn't answer: {error}"
        return ""


async def run_cases(arena: Arena, cases: Sequence[Case], told: Told = lambda _: None) -> list[Outcome]:
    """Try them; in the order of `cases`. `told` hears of each as it is decided."""
    found: dict[str, Outcome] = {}

    def decide(case: Case, verdict: Verdict, *, skipped: bool = False) -> None:
        outcome = Outcome(
            case=case.id,
            group=case.group,
            tries=case.tries,
            expected=case.expected,
            observed=verdict.observed,
            ok=verdict.ok,
            why=verdict.why,
            skipped=skipped,
        )
        found[case.id] = outcome
        told(outcome)

    attempts = [case for case in cases if not isinstance(case, Check)]
    for user in sorted({case.user for case in attempts}):
        await _batch(arena, [case for case in attempts if case.user == user], user, decide)
    room = asyncio.Semaphore(WIDTH)

    async def one(case: Check) -> None:
        async with room:
            try:
                async with asyncio.timeout(CASE_TIMEOUT_S):
                    decide(case, await case.check(arena))
            except Skipped as why:
                decide(case, Verdict(True, "not tried", str(why)), skipped=True)
            except TimeoutError:
                decide(case, Verdict(False, "no end", f"nothing was decided within {CASE_TIMEOUT_S:g} s"))
            except DsecError as error:
                decide(case, Verdict(False, error.code, f"the platform failed: {error}"))

    async with asyncio.TaskGroup() as group:
        for case in cases:
            if isinstance(case, Check):
                group.create_task(one(case))
    return [found[case.id] for case in cases]


async def _batch(arena: Arena, cases: list[Case], user: str, decide: Callable[..., None]) -> None:
    """Attempts that share a sandbox. Where that comes to harm, each is tried again alone, to say which one it was."""
    async with AsyncExitStack() as stack:
        try:
            sandbox = await stack.enter_async_context(arena.sandbox())
            seen = await arena.attempts(sandbox, {case.id: case.attempt for case in cases}, user=user)
        except Skipped as why:
            for case in cases:
                decide(case, Verdict(True, "not tried", str(why)), skipped=True)
            return
        harm = await arena.unharmed(sandbox)
    for case in cases:
        observed, wrong = seen.get(case.id, "nothing"), harm
        if harm or case.id not in seen:
            async with arena.sandbox() as alone:
                observed = await arena.attempt(alone, case.attempt, user=user)
                wrong = await arena.unharmed(alone)
        decide(case, judge(case, observed, wrong))


def judge(case: Case, observed: str, harm: str = "") -> Verdict:
    """An attempt, by what it saw and what was seen from outside."""
    if harm:
        return Verdict(False, observed, harm)
    if re.fullmatch(case.expected, observed, re.DOTALL):
        return Verdict(True, observed)
    return Verdict(False, observed, f"what was seen doesn't match {case.expected!r}")

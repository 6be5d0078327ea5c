"""The loads that the benchmarks put on a server, through SDK and HTTP. Bounded in count; whatever they make they
end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from msgspec import Struct

from dsec import AsyncClient, AsyncSandbox
from dsec.bench.rounds import Turn
from dsec.errors import DsecError
from dsec.spec.sandbox import MIB, PtySize, SandboxSpec

TRUE = ("/bin/true",)
_AT_ONCE, _MIXED = 25, 300
_CHUNK = bytes(1 * MIB)


def event_loop() -> tuple[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The name and the maker of the event loop that the client of a benchmark runs in: uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 (an extra of the client's)
    except ImportError:
        return "asyncio", asyncio.new_event_loop
    return "uvloop", uvloop.new_event_loop


async def groups(client: AsyncClient, spec: SandboxSpec, count: int, group: int) -> Turn:
    """Create `count` sandboxes in groups of `group`, run `/bin/true` in all of a group by one request, end the group by
    one request.

    The next group is made while the last one runs and is ended, so that at most two groups are live.
    """
    problems: list[str] = []
    began = time.perf_counter()
    last: asyncio.Task[None] | None = None
    for start in range(0, count, group):
        made: list[AsyncSandbox] = []
        async for result in client.create_many(spec, count=min(group, count - start), deadline_s=60.0):
            if result.sandbox is None:
                problems.append(str(result.error))
            else:
                made.append(result.sandbox)
        if last is not None:
            await last
        last = asyncio.create_task(_use(client, made, problems))
    if last is not None:
        await last
    return Turn(count, time.perf_counter() - began, len(problems), problems[0] if problems else "")


async def _use(client: AsyncClient, sandboxes: list[AsyncSandbox], problems: list[str]) -> None:
    async for item in client.run_many((sandbox, TRUE) for sandbox in sandboxes):
        try:
            item.unwrap().check()
        except DsecError as error:
            problems.append(str(error))
    await _end(client, sandboxes, problems)


class OneAtATime(Struct, frozen=True):
    """Milliseconds of each sandbox that was made alone."""

    create_ms: list[float]
    cycle_ms: list[float]
    """Create, `true`, destroy."""
    failures: int = 0


async def one_at_a_time(client: AsyncClient, spec: SandboxSpec, count: int) -> OneAtATime:
    """Create, run `true`, destroy; then the next."""
    create_ms, cycle_ms, problems = [], [], list[str]()
    for _ in range(count):
        began = time.perf_counter()
        sandbox = await client.create(spec)
        created = time.perf_counter()
        await _true(sandbox, problems)
        await sandbox.kill()
        create_ms.append((created - began) * 1e3)
        cycle_ms.append((time.perf_counter() - began) * 1e3)
    return OneAtATime(create_ms, cycle_ms, len(problems))


async def make(client: AsyncClient, spec: SandboxSpec, count: int) -> list[AsyncSandbox]:
    """`count` live sandboxes. Raises the first error, after ending those that were made."""
    made, errors = [], []
    async for result in client.create_many(spec, count=count, deadline_s=120.0):
        if result.sandbox is None:
            errors.append(result.error)
        else:
            made.append(result.sandbox)
    if errors:
        await client.kill_many(made)
        raise errors[0] or DsecError("a sandbox could not be made")
    return made


async def exec_times(sandbox: AsyncSandbox, count: int) -> list[float]:
    """Milliseconds of `count` commands, one after the other."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        (await sandbox.commands.run(TRUE)).check()
        times.append((time.perf_counter() - began) * 1e3)
    return times


async def echo_times(sandbox: AsyncSandbox, count: int) -> list[float]:
    """Milliseconds from a key that is typed to its echo by the terminal of a waiting program, one after the other."""
    times = []
    async with await sandbox.commands.start(["/bin/sleep", "3600"], pty=PtySize(80, 24)) as program:
        echo = aiter(program)
        for _ in range(count):
            began = time.perf_counter()
            await program.write_stdin(b"x")
            await anext(echo)
            times.append((time.perf_counter() - began) * 1e3)
    return times


@asynccontextmanager
async def idle_streams(sandboxes: list[AsyncSandbox], count: int) -> AsyncIterator[None]:
    """`count` open streams over the sandboxes in turn, by kind in turn: a watch, the output of a command that says
    nothing, the events of a sandbox. Nothing happens on any of them."""

    async def open_one(stack: AsyncExitStack, index: int) -> None:
        sandbox = sandboxes[index % len(sandboxes)]
        turn = index // len(sandboxes)
        kind = turn % 3 if turn < _MIXED else 2  # a sandbox has 128 watches, and a limit of processes
        if kind == 0:
            watch = await sandbox.files.watch("/tmp")
            stack.push_async_callback(watch.close)
        elif kind == 1:
            command = await sandbox.commands.start(["/bin/sleep", "3600"])
            await stack.enter_async_context(command)
            waiting = asyncio.create_task(command.wait())
            stack.push_async_callback(_cancel, waiting)
        else:
            events = asyncio.create_task(_follow(sandbox))
            stack.push_async_callback(_cancel, events)

    async with AsyncExitStack() as stack:
        for start in range(0, count, _AT_ONCE):
            await asyncio.gather(*(open_one(stack, index) for index in range(start, min(count, start + _AT_ONCE))))
        yield


async def _follow(sandbox: AsyncSandbox) -> None:
    async for _ in sandbox.events(follow=True):
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def exec_parallel(sandboxes: list[AsyncSandbox], count: int, at_once: int) -> Turn:
    """`count` commands in all, `at_once` at the same time, over the sandboxes in turn."""
    tickets, problems = itertools.count(), list[str]()

    async def lane(sandbox: AsyncSandbox) -> None:
        while next(tickets) < count:
            await _true(sandbox, problems)

    began = time.perf_counter()
    await asyncio.gather(*(lane(sandboxes[index % len(sandboxes)]) for index in range(at_once)))
    return Turn(count, time.perf_counter() - began, len(problems), problems[0] if problems else "")


async def output(sandbox: AsyncSandbox, size: int) -> float:
    """MB a second of a command's output of `size` bytes, thrown away piece by piece. Raises `DsecError` where some is
    missing."""
    began = time.perf_counter()
    command = await sandbox.commands.start(["head", "-c", str(size), "/dev/zero"], output_bytes=size + 1)
    received = 0
    async for piece in command:
        received += len(piece.data)
    (await command.wait()).check()
    if received != size:
        raise DsecError(f"{received} of {size} bytes of output arrived")
    return size / 1e6 / (time.perf_counter() - began)


async def upload(sandbox: AsyncSandbox, size: int) -> float:
    """MB a second of a file of `size` bytes, streamed in. Raises `DsecError` where it isn't whole."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, len(_CHUNK)):
            yield _CHUNK[: size - start]

    began = time.perf_counter()
    await sandbox.files.write("/uploaded", pieces())
    seconds = time.perf_counter() - began
    found = (await sandbox.files.stat("/uploaded")).size
    if found != size:
        raise DsecError(f"{found} of {size} bytes were stored")
    return size / 1e6 / seconds


async def download(sandbox: AsyncSandbox, size: int) -> float:
    """MB a second of the file that `upload` left, streamed out and thrown away."""
    began = time.perf_counter()
    received = 0
    async for piece in sandbox.files.read_stream("/uploaded"):
        received += len(piece)
    if received != size:
        raise DsecError(f"{received} of {size} bytes arrived")
    return size / 1e6 / (time.perf_counter() - began)


async def _true(sandbox: AsyncSandbox, problems: list[str]) -> None:
    await _noting(_checked(sandbox), problems)


async def _checked(sandbox: AsyncSandbox) -> None:
    (await sandbox.commands.run(TRUE)).check()


async def _noting(work: Coroutine[Any, Any, None], problems: list[str]) -> None:
    try:
        await work
    except DsecError as error:
        problems.append(str(error))


async def _end(client: AsyncClient, sandboxes: list[AsyncSandbox], problems: list[str]) -> None:
    errors = await client.kill_many(sandboxes)
    problems += [str(error) for error in errors.values()]

"""A one-node server as a child process: started on a state directory, awaited until it answers, stopped.

Invariants: a server that was started here is stopped here, unless it is to be kept; its sandboxes end with it. What it
says goes to `server.log` in the state directory, whose end is shown when it doesn't start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from dsec import AsyncClient
from dsec.errors import DsecError, Unavailable
from dsec.sdk._config import FILE_NAME, Endpoint

T = TypeVar("T")

START_TIMEOUT_S = 900.0
"""The first start makes the base layer, downloads included, on whatever network there is."""
STOP_TIMEOUT_S = 90.0


def default_state() -> Path:
    """Where a server on this machine keeps its state unless it is told otherwise."""
    return Path(os.environ.get("DSEC_STATE") or "/var/lib/dsec")


async def running(state: Path) -> AsyncClient | None:
    """A client of the server that runs on `state`, or None where none does."""
    try:
        endpoint = msgspec.json.decode((state / FILE_NAME).read_bytes(), type=Endpoint)
    except (OSError, msgspec.MsgspecError):
        return None
    client = AsyncClient(endpoint.url, endpoint.api_key)
    try:
        await client.node(request_timeout_s=5.0)
    except DsecError:
        await client.close()
        return None
    return client


def run(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """As `asyncio.run`, but SIGTERM and SIGHUP cancel it too, so that a server that was started is stopped. Raises
    `asyncio.CancelledError` then."""

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(cancellable())


class LocalServer:
    """A server that this process started."""

    def __init__(self, state: Path, process: asyncio.subprocess.Process, client: AsyncClient) -> None:
        """Use `start`."""
        self.state = state
        self.client = client
        self.pid = process.pid
        self._process = process

    @classmethod
    async def start(cls, state: Path, *, told: Callable[[str], None] = lambda _: None) -> LocalServer:
        """Start `dsec serve` on `state`, at any free port; returns when it answers. `told` hears what it says.

        Raises `Unavailable` where it doesn't start.
        """
        log, output = _open_log(state)
        with output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dsec.cli.main", "serve", "--port", "0", "--on-exit", "destroy"),
                env={**os.environ, "DSEC_STATE": str(state)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # an interrupt from the keyboard is for us; we stop it in our own order
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        heard = 0
        try:
            while process.returncode is None and time.monotonic() < deadline:
                lines = _messages(log)
                for line in lines[heard:]:
                    told(line)
                heard = len(lines)
                client = await running(state)
                if client is not None:
                    return cls(state, process, client)
                await asyncio.sleep(0.05)
        except BaseException:
            await _end(process)
            raise
        await _end(process)
        raise Unavailable(f"the server did not start: {_tail(log)}", remedy="`dsec doctor` lists what this host lacks.")

    async def stop(self) -> None:
        """End it, its sandboxes, and everything it made on the host. Idempotent."""
        await self.client.close()
        await _end(self._process)

    async def keep(self) -> None:
        """Let it run on after this process."""
        await self.client.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _open_log(state: Path) -> tuple[Path, IO[bytes]]:
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = state / "server.log"
    return log, log.open("wb")


def _messages(log: Path) -> list[str]:
    """What the log's whole lines say, without time and level."""
    return [line.partition(": ")[2] for line in log.read_text(errors="replace").split("\n")[:-1]]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-12:]) or "it said nothing"

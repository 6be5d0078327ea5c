"""`port-forward`: a port here is a port inside. It ends with an interrupt, or with the sandbox."""

from __future__ import annotations

import asyncio
import contextlib

import click

from dsec import AsyncClient, AsyncSandbox
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.output import note
from dsec.errors import DsecError, InvalidRequest, SandboxEnded, SandboxLost, SandboxNotFound
from dsec.sdk._streams import AsyncPortStream

_READ_AT_ONCE = 256 << 10
_GONE = (SandboxEnded, SandboxLost, SandboxNotFound)


@click.command("port-forward")
@click.option("--address", default="127.0.0.1", show_default=True, help="Address here to listen on.")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("ports", metavar="[LOCAL:]REMOTE...", nargs=-1, required=True)
def port_forward(sandbox_id: str, ports: tuple[str, ...], address: str) -> int:
    """Listen on ports here and connect to ports on the loopback inside. LOCAL 0: any free one.

    Says on stdout, a line each, where it listens.
    """
    pairs = [_pair(each) for each in ports]

    async def work() -> int:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            async with contextlib.AsyncExitStack() as stack:
                for local, remote in pairs:
                    server = await _listen(sandbox, address, local, remote, gone)
                    stack.callback(server.close)
                    host, port = server.sockets[0].getsockname()[:2]
                    click.echo(f"{host}:{port} -> {remote}")
                await gone
        return 0

    return signals.run(work())


def _pair(text: str) -> tuple[int, int]:
    local, colon, remote = text.rpartition(":")
    numbers = (local if colon else remote, remote)
    if not all(each.isascii() and each.isdigit() and int(each) < 65536 for each in numbers) or int(remote) == 0:
        raise InvalidRequest(f"{text!r} is not of the form LOCAL:REMOTE, two ports")
    return int(numbers[0]), int(numbers[1])


async def _listen(
    sandbox: AsyncSandbox, address: str, local: int, remote: int, gone: asyncio.Future[None]
) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await sandbox.ports.connect(remote) as stream:
                await _pump(stream, reader, writer)
        except DsecError as error:
            if isinstance(error, _GONE) and not gone.done():
                gone.set_exception(error)
            elif not gone.done():
                note(f"port {remote}: {error}")
        except OSError:
            return  # who connected here went away
        finally:
            writer.transport.abort()

    try:
        return await asyncio.start_server(serve, address, local)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {address}:{local}: {error.strerror}") from None


async def _pump(stream: AsyncPortStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both directions, each to its own end."""

    async def inwards() -> None:
        while data := await reader.read(_READ_AT_ONCE):
            await stream.write(data)
        await stream.close_write()

    async def outwards() -> None:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    tasks = [asyncio.ensure_future(inwards()), asyncio.ensure_future(outwards())]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    writer.close()
    await writer.wait_closed()


COMMANDS: tuple[click.Command, ...] = (port_forward,)

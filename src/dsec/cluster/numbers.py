"""Which number a node has that was given the credentials of many: a directory of `edge-N.json`, as a DaemonSet mounts
it on every node alike.

The first time a number that nobody ever had is asked for, from one that the machine's name leads to so that nodes
which start together don't ask for the same; where there is none left, that of a node that was lost. It is kept in the
state directory (`number`), and is the node's from then on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import zlib
from pathlib import Path

import msgspec

from dsec.cluster.bus import open_bus
from dsec.cluster.credentials import Credentials, read_credentials
from dsec.cluster.wire import Join, Joined
from dsec.errors import Conflict, InvalidRequest, Unavailable
from dsec.kernel.files import replace_file
from dsec.plan.fencing import Free
from dsec.spec.cluster import NodeFacts

FILE = "number"
AGAIN_S = 1.0
log = logging.getLogger("dsec.cluster")


async def settle(urls: list[str], directory: Path, state: Path, *, host: str) -> Credentials:
    """The credentials of this node's number; it is given one where it has none, as soon as an apiserver is there.
    `host`: as it will join.

    Raises `InvalidRequest` where the directory has no credentials or not its own, `Conflict` where all numbers are
    other nodes', `Unavailable` where no server of the cluster can be reached."""
    found = _numbers(directory)
    if not found:
        raise InvalidRequest(f"{directory} holds no edge-N.json", remedy="`dsec cluster init` writes them.")
    own = _own(state)
    if own is not None:
        if own not in found:
            raise InvalidRequest(
                f"{directory} has no credentials of edge {own}, which this node is",
                remedy=f"Add edge-{own}.json, or remove {state / FILE} to be given another number.",
            )
        return read_credentials(found[own])
    numbers = sorted(found)
    first = zlib.crc32(socket.gethostname().encode()) % len(numbers)
    passes: tuple[Free, ...] = ("new", "lost")
    for free in passes:
        for number in numbers[first:] + numbers[:first]:
            credentials = read_credentials(found[number])
            if credentials.edge == number and await _reserve(urls, credentials, free, host):
                replace_file(state / FILE, f"{number}\n".encode())
                log.info("this node is edge %d from now on", number)
                return credentials
    raise Conflict(
        f"all {len(numbers)} numbers in {directory} are other nodes'",
        remedy="Make more: `dsec cluster init` in a new directory with more --edges, or end nodes that are gone.",
    )


async def _reserve(urls: list[str], credentials: Credentials, free: Free, host: str) -> bool:
    """Join under a number if it is free; waits for an apiserver. Raises `Unavailable`."""
    assert credentials.edge is not None
    asked = Join(
        facts=NodeFacts(edge=credentials.edge, backends=()),
        instance=f"e{credentials.edge}-{secrets.token_hex(6)}",
        host=host,
        had=None,
        url="http://127.0.0.1",
        secret=secrets.token_hex(32),
        free=free,
    )
    bus = await open_bus(urls, credentials)
    try:
        while True:
            try:
                answer = await bus.ask(f"dsec.join.{credentials.edge}", asked)
                return msgspec.json.decode(answer, type=Joined).claim is not None
            except (Unavailable, msgspec.MsgspecError) as error:
                log.warning("asking for a number: %s", error)
                await asyncio.sleep(AGAIN_S)
    finally:
        await bus.close()


def _numbers(directory: Path) -> dict[int, Path]:
    return {int(path.stem[5:]): path for path in directory.glob("edge-*.json") if path.stem[5:].isdecimal()}


def _own(state: Path) -> int | None:
    path = state / FILE
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    if not text.strip().isdecimal():
        raise InvalidRequest(f"{path} holds no number", remedy="It is the node's number in its cluster.")
    return int(text)

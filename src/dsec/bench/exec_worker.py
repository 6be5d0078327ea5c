"""A client of its own process for `dsec.bench.log_overhead`: runs `/bin/true` by the SDK when it is told to.

Arguments: ids of sandboxes; server and key are in the environment. Each line on stdin is `alone N` or `parallel N`; the
answer is a line of JSON: `{"p50_ms"}`, or `{"rate"}` of N commands, AT_ONCE at the same time.
"""

from __future__ import annotations

import asyncio
import sys
from statistics import median

import msgspec

from dsec import AsyncClient, AsyncSandbox
from dsec.bench import load
from dsec.errors import DsecError

AT_ONCE = 32


async def _serve(ids: list[str]) -> None:
    async with AsyncClient() as client:
        boxes = [await client.connect(each) for each in ids]
        while order := await asyncio.to_thread(sys.stdin.readline):
            kind, count = order.split()
            sys.stdout.buffer.write(msgspec.json.encode(await _turn(boxes, kind, int(count))) + b"\n")
            sys.stdout.flush()


async def _turn(boxes: list[AsyncSandbox], kind: str, count: int) -> dict[str, float]:
    if kind == "alone":
        return {"p50_ms": median(await load.exec_times(boxes[0], count))}
    turn = await load.exec_parallel(boxes, count, AT_ONCE)
    if turn.failures:
        raise DsecError(f"{turn.failures} commands failed: {turn.error}")
    return {"rate": turn.rate}


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=load.event_loop()[1]) as runner:
        runner.run(_serve(sys.argv[1:]))

"""Whoever waits for the filler hears of it, whatever went wrong there; and a benchmark's store is as far as it says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import native_guest
import uvloop

from dsec.bench.lazy_filler import FarCopier, FarDirectory
from dsec.edge.config import SystemClock
from dsec.store.lazy.control import Control

LATENCY_S = 0.002


async def test_a_call_that_fails_as_nobody_foresaw_is_answered(tmp_path: Path) -> None:
    async def call(name: str, layer: str) -> dict[str, Any]:
        if name == "attach":
            raise KeyError(layer)
        return {}

    control = Control(call)
    server = await control.serve(tmp_path / "fill.sock")
    reader, writer = await asyncio.open_unix_connection(tmp_path / "fill.sock")
    for number, name in enumerate(("attach", "status")):
        writer.write(json.dumps({"id": number, "call": name, "layer": "ab"}).encode() + b"\n")
    async with asyncio.timeout(native_guest.PATIENCE_S):
        answers = {answer["id"]: answer for answer in [json.loads(await reader.readline()) for _ in range(2)]}
    assert answers[0]["error"]["code"] == "internal"
    assert "KeyError: 'ab'" in answers[0]["error"]["message"]
    assert answers[1]["ok"] == {}
    writer.close()
    server.close()
    await control.close()


async def test_a_far_copier_tells_digests_too(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(300_000)
    (tmp_path / "from").write_bytes(data)
    copier = FarCopier(native_guest.built("sanitized", "copier"), None, SystemClock(), LATENCY_S, 0)  # type: ignore[arg-type]
    target = os.open(tmp_path / "to", os.O_RDWR | os.O_CREAT)
    try:
        began = time.monotonic()
        told = await copier.copy_telling(tmp_path / "from", target, 1 << 20, nice=0)
        assert time.monotonic() - began >= LATENCY_S
    finally:
        os.close(target)
        await copier.close()
    assert told == hashlib.sha256(data).digest()
    assert (tmp_path / "to").read_bytes() == data


def test_a_far_directory_is_never_nearer_than_it_says(tmp_path: Path) -> None:
    """Else a filler would take it for a near one now and then."""
    (tmp_path / "object").write_bytes(b"x")
    store = FarDirectory(tmp_path, LATENCY_S, 0.0)

    async def quickest(dice: random.Random) -> float:
        took = []
        for _ in range(100):
            began = time.monotonic()
            await (store.get("object") if dice.random() < 0.5 else store.size("object"))
            took.append(time.monotonic() - began)
            await asyncio.sleep(dice.random() * LATENCY_S)  # the loop wakes for others too
        return min(took)

    async def all_of_them() -> list[float]:
        try:
            return await asyncio.gather(*(quickest(random.Random(seed)) for seed in range(5)))
        finally:
            await store.close()

    assert min(uvloop.run(all_of_them())) >= LATENCY_S

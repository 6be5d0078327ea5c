"""E2B's own client as a load, where its package is at hand: installed, in a directory that is named, or where the
project's tests put it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
from pathlib import Path

import msgspec

from dsec.errors import Unavailable
from dsec.sdk._config import Endpoint

_CHECKOUT = Path(__file__).parents[3]
_WORKER = Path(__file__).with_name("e2b_worker.py")


def find(directory: Path | None) -> Path | None:
    """What to put on the module path for `import e2b`: `directory` where it is named, else what is found; None where
    nothing is."""
    if directory is not None:
        return directory
    spec = importlib.util.find_spec("e2b")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parents[1]
    found = [*(_CHECKOUT / "build" / "e2b").glob(f"*-{sys.implementation.cache_tag}")]
    return max(found, key=_version, default=None)


async def run_times(package: Path, endpoint: Endpoint, sandbox_id: str, count: int) -> list[float]:
    """Milliseconds of `commands.run("true")`, one after the other, in a process of its own. Raises `Unavailable` where
    that fails."""
    environment = {
        **os.environ,
        "E2B_API_KEY": endpoint.api_key,
        "E2B_API_URL": endpoint.url,
        "E2B_SANDBOX_URL": endpoint.url,
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(_WORKER), sandbox_id, str(count),  # -P: our `copy.py` beside it is not the library's
        env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise Unavailable(f"E2B's client failed: {said.decode(errors='replace').strip()[-500:]}")
    return msgspec.json.decode(out, type=list[float])


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", path.name.partition("-")[0]))

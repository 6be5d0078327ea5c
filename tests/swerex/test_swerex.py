"""SWE-ReX's stock client, unmodified, against a real server with real containers. The client lives in a virtual
environment of its own, made once."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_kit import Server, serving

pytestmark = [pytest.mark.root, pytest.mark.slow]
VERSION = "1.4.0"
REQUIRED = [f"swe-rex=={VERSION}", "aiohttp>=3.14,<4", "pytest==9.2.0"]
HERE = Path(__file__).parent
CASES = re.findall(r"@case\nasync def (\w+)", (HERE / "cases.py").read_text())


@pytest.fixture(scope="session")
def swerex_python() -> Path:
    """The interpreter of an environment with the client."""
    place = HERE.parents[1] / "build" / f"swerex-{VERSION}-py{sys.version_info.major}{sys.version_info.minor}"
    python = place / "bin" / "python"
    done = place / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *REQUIRED], check=True)
        done.touch()
    return python


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as running:
        yield running


async def run_case(server: Server, python: Path, name: str, *, at_root: bool) -> None:
    async with server.client() as client, await client.create("debian") as sandbox:
        if at_root:
            host, token = server.url, sandbox.info.token
        else:
            host, token = f"{server.url}/swerex/{sandbox.id}", server.endpoint().api_key
        assert token is not None
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DSEC")}
        done = await asyncio.to_thread(
            subprocess.run,
            [str(python), str(HERE / "cases.py"), name, host, token],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.parametrize("name", CASES)
async def test_stock_client(server: Server, swerex_python: Path, name: str) -> None:
    await run_case(server, swerex_python, name, at_root=False)


async def test_a_sandbox_is_its_token_where_the_client_names_host_and_port_alone(
    server: Server, swerex_python: Path
) -> None:
    await run_case(server, swerex_python, "state_is_kept", at_root=True)

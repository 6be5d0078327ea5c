"""SWE-ReX's stock client, unmodified, against a real server with real containers. The client lives in a virtual
environment of its own, made once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
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
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(place)], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        subprocess.run([*pip, "install", "-q", *REQUIRED], check=True)
        done.touch()
    return python


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as running:
        yield running


async def run_cases(server: Server, python: Path, names: list[str], *, at_root: bool) -> dict[str, str | None]:
    """In one process, each with a sandbox of its own; what went wrong with each, or None."""
    words: list[str] = []
    async with server.client() as client:
        boxes = [await client.create("debian") for _ in names]
        for name, box in zip(names, boxes, strict=True):
            assert box.info.token is not None
            words += [name, server.url, box.info.token] if at_root else [
                name, f"{server.url}/swerex/{box.id}", server.endpoint().api_key
            ]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DSEC")}
        done = await asyncio.to_thread(
            subprocess.run,
            [str(python), str(HERE / "cases.py"), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        await client.kill_many(boxes)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line["wrong"] for line in lines}


@pytest.fixture(scope="module")
def outcomes(server: Server, swerex_python: Path) -> dict[str, str | None]:
    return asyncio.run(run_cases(server, swerex_python, CASES, at_root=False))


@pytest.mark.parametrize("name", CASES)
def test_stock_client(outcomes: dict[str, str | None], name: str) -> None:
    assert name in outcomes, "the script didn't come that far"
    assert outcomes[name] is None, outcomes[name]


async def test_bad_requests(server: Server) -> None:
    async with (
        server.client() as client,
        await client.create("debian") as sandbox,
        await client.create("debian") as other,
    ):
        base, key = f"{server.url}/swerex/{sandbox.id}", server.endpoint().api_key
        async with aiohttp.ClientSession() as http:

            async def ask(method: str, url: str, token: str | None, data: object = b"{}") -> tuple[int, str]:
                headers = {"X-API-Key": token} if token else {}
                async with http.request(method, url, data=data, headers=headers) as response:  # type: ignore[arg-type]
                    return response.status, await response.text()

            assert (await ask("GET", f"{base}/is_alive", key))[0] == 200
            assert (await ask("GET", f"{base}/is_alive", None))[0] == 401
            assert (await ask("GET", f"{base}/is_alive", "wrong"))[0] == 401
            assert (await ask("GET", f"{base}/is_alive", other.info.token))[0] == 403
            assert (await ask("GET", f"{server.url}/is_alive", key))[0] == 403
            assert (await ask("GET", f"{server.url}/swerex/nosuchsandbox/is_alive", key))[0] == 404
            assert (await ask("POST", f"{base}/is_alive", key))[0] == 405
            assert (await ask("GET", f"{base}/execute", key))[0] == 405
            assert (await ask("POST", f"{base}/nope", key))[0] == 404
            form = aiohttp.FormData()
            form.add_field("target_path", "/tmp/x", content_type="text/plain")
            cut = {"Content-Type": "multipart/form-data; boundary=b"}
            for method, endpoint, data, said in (
                ("POST", "execute", b"{", "can't be read"),
                ("POST", "execute", b'{"command": 1}', "can't be read"),
                ("POST", "execute", b'{"command": []}', "is empty"),
                ("POST", "run_in_session", b'{"action_type": "other"}', "can't be read"),
                ("POST", "create_session", b'{"session": ""}', "1 to 100"),
                ("POST", "create_session", b'{"session_type": "zsh"}', "can't be read"),
                ("POST", "read_file", b'{"path": ""}', "not empty"),
                ("POST", "upload", b"{}", "form"),
                ("POST", "upload", form, "needs the fields"),
            ):
                status, text = await ask(method, f"{base}/{endpoint}", key, data)
                assert status == 511, (endpoint, text)
                assert said in text, (endpoint, text)
                assert '"class_path":"builtins.ValueError"' in text
            headers = {**cut, "X-API-Key": key}
            async with http.post(f"{base}/upload", data=b"--b\r\n", headers=headers) as response:
                assert response.status == 511
        await sandbox.kill()
        async with aiohttp.ClientSession(headers={"X-API-Key": key}) as http, http.get(f"{base}/is_alive") as response:
            answer = await response.json()
            assert answer["is_alive"] is False
            assert "deleted" in answer["message"]


async def test_a_sandbox_is_its_token_where_the_client_names_host_and_port_alone(
    server: Server, swerex_python: Path
) -> None:
    name = "state_is_kept"
    assert await run_cases(server, swerex_python, [name], at_root=True) == {name: None}

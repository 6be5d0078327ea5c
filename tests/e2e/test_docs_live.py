"""What the documents show is run as it stands there, by a user who has nothing but a server with `debian`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_kit import PATIENCE_S, Server, serving

pytestmark = pytest.mark.root
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as running:
        yield running


def shown(document: str, language: str) -> str:
    """The first piece of code of a document's."""
    found = re.search(rf"^```{language}\n(.*?)^```$", (DOCS / document).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def run(server: Server, place: Path, *argv: str) -> str:
    """Run Python here; its output."""
    endpoint = server.endpoint()
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=place,
        env={**os.environ, "DSEC_URL": endpoint.url, "DSEC_API_KEY": endpoint.api_key},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dsec(server: Server, place: Path, *argv: str) -> str:
    return run(server, place, "-m", "dsec.cli.main", *argv)


@pytest.mark.parametrize(
    ("document", "last"),
    [
        ("FUNCTIONS.md", "assert fn.remote('abc de', 5.0) == 2.5"),
        ("GROUPS.md", ""),
        ("JUDGE.md", "assert (judged.verdict, judged.passed) == ('accepted', 2)"),
        ("GRADING.md", "assert verdict.reward == 1.0 and not verdict.untaken; sandbox.kill()"),
    ],
)
def test_the_python_of_a_document(server: Server, tmp_path: Path, document: str, last: str) -> None:
    (tmp_path / "shown.py").write_text(f"{shown(document, 'python')}\n{last}\n")
    run(server, tmp_path, "shown.py")


def test_a_group_from_its_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "shop.toml").write_text(shown("GROUPS.md", "toml"))
    up, down = "group up shop.toml", "group down shop"
    assert f"# shop.toml: dsec {up}; dsec group ls; dsec {down}" in shown("GROUPS.md", "toml")
    assert set(json.loads(dsec(server, tmp_path, *up.split()))) == {"app", "db"}
    assert all(service["ready"] for service in json.loads(dsec(server, tmp_path, "group", "ls")))
    dsec(server, tmp_path, *down.split())
    assert json.loads(dsec(server, tmp_path, "group", "ls")) == []


def test_grading_on_the_command_line(server: Server, tmp_path: Path) -> None:
    names: dict[str, bytes] = {}
    exec(shown("GRADING.md", "python").split("\nsandbox = ")[0], names)
    (tmp_path / "run.py").write_bytes(names["RUNNER"])
    (tmp_path / "expected").write_bytes(b"42\n")
    agent = "mkdir -p /project/src; echo 'print(6 * 7)' > /project/src/answer.py; sleep infinity"
    box = json.loads(dsec(server, tmp_path, "group", "up", str(_agent(tmp_path, agent))))["agent"]["id"]
    line = re.search(r"^    dsec (verify ID(?:.*\\\n)*.*)$", (DOCS / "GRADING.md").read_text(), re.MULTILINE)
    assert line is not None
    words = line[1].replace("\\\n", " ").replace("ID", box).split()
    assert json.loads(dsec(server, tmp_path, *words))["reward"] == 1.0
    dsec(server, tmp_path, "kill", box)


def _agent(place: Path, command: str) -> Path:
    file = place / "agent.toml"
    health = 'health = { command = ["test", "-s", "/project/src/answer.py"] }'
    file.write_text(f'[services.agent]\nenvironment = "debian"\ncommand = {json.dumps(command)}\n{health}\n')
    return file

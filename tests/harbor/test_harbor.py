"""Harbor, unmodified, with `-e e2b`: the oracle's solution is rewarded with 1.0, doing nothing with 0.0.

A job of its own, since it needs Python 3.12 and some hundred megabytes of packages: `bin/test tests/harbor`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from server_kit import Server, serving

pytestmark = [pytest.mark.root, pytest.mark.slow]

VERSION = "0.25.0"
BUILD = Path(__file__).parents[2] / "build" / "harbor"
PATIENCE_S = 600

TASK = {
    "task.toml": 'version = "1.0"\n[environment]\nallow_internet = false\n',
    "instruction.md": "Write `Hello, world!` into /app/hello.txt.\n",
    "environment/Dockerfile": "FROM debian\n",
    "solution/solve.sh": "#!/bin/bash\nmkdir -p /app\necho 'Hello, world!' > /app/hello.txt\n",
    "tests/test.sh": "#!/bin/bash\nmkdir -p /logs/verifier\n"
    "grep -qx 'Hello, world!' /app/hello.txt && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n",
}


@pytest.fixture(scope="module")
def harbor() -> Path:
    """The program, installed once."""
    python = next((found for name in ("python3.12", "python3.13") if (found := _works(name))), None)
    if python is None:
        pytest.skip("needs Python 3.12")
    target = BUILD / VERSION
    if not (target / "whole").exists():
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(target)], check=True)
        pip = [str(target / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, f"harbor[e2b]=={VERSION}"], check=True)
        (target / "whole").touch()
    return target / "bin" / "harbor"


def _works(name: str) -> str | None:
    path = shutil.which(name)
    if path is None or subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode:
        return None
    return path


def run(harbor: Path, server: Server, root: Path, agent: str) -> Path:
    """One job; returns its directory."""
    endpoint = server.endpoint()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "DSEC_", "PYTHON"))}
    ours = {"E2B_API_KEY": endpoint.api_key, "E2B_API_URL": endpoint.url, "E2B_SANDBOX_URL": endpoint.url}
    name = f"job-{len(list(root.glob('jobs/*')))}"
    command = [str(harbor), "run", "-p", str(root / "task"), "-a", agent, "-e", "e2b", "-o", str(root / "jobs")]
    subprocess.run(
        [*command, "--job-name", name],
        env={**kept, **ours, "HOME": str(root)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return root / "jobs" / name


def reward(job: Path) -> float:
    """The reward of a job's only trial."""
    (result,) = job.glob("*/result.json")
    trial = json.loads(result.read_text())
    assert trial["exception_info"] is None, trial["exception_info"]
    return float(trial["verifier_result"]["rewards"]["reward"])


def test_the_oracle_is_rewarded_and_nothing_is_not(harbor: Path, debian_state: Path, tmp_path: Path) -> None:
    for name, text in TASK.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with serving(debian_state) as server:
        log = "".join(path.read_text() for path in run(harbor, server, tmp_path, "nop").glob("*/trial.log"))
        assert "building templates is not available" in log, server.log()[-2000:]
    template = re.findall(r"Creating template (\S+)", log)[0]
    (debian_state / "e2b.json").write_text(json.dumps({"templates": {template: "debian"}}))
    with serving(debian_state) as server:
        assert reward(run(harbor, server, tmp_path, "oracle")) == 1.0
        assert reward(run(harbor, server, tmp_path, "nop")) == 0.0

"""E2B's own packages, unmodified, each in a directory of its own, and the runs of their case scripts."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

VERSIONS = ("2.63.0", "2.56.0")
HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "e2b"
PATIENCE_S = 600


@cache
def package(version: str) -> Path:
    """The directory with this version of the package and what it needs, installed once."""
    target = BUILD / f"{version}-{sys.implementation.cache_tag}"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        try:
            subprocess.run([*pip, "--target", str(draft), f"e2b=={version}"], check=True)
            draft.rename(target)
        except OSError:
            assert target.exists()  # another run was quicker
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


def environment(version: str, url: str, key: str) -> dict[str, str]:
    """For a program that uses the client: that client alone, and this server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "DSEC_", "PYTHON"))}
    ours = {"E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "PYTHONPATH": str(package(version))}
    return {**kept, **ours, "PYTHONDONTWRITEBYTECODE": "1"}


def cases(script: str) -> list[str]:
    """The names of a script's cases."""
    tree = ast.parse((HERE / script).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function.name for function in functions if function.name.startswith("case_")]


def run(script: str, version: str, url: str, key: str, **more: str) -> dict[str, str | None]:
    """Run all cases of a script in one process; what went wrong with each, or None. `more`: variables for it."""
    process = subprocess.run(
        [sys.executable, str(HERE / script)],
        env=environment(version, url, key) | more,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    found: dict[str, str | None] = {line["case"]: line["wrong"] for line in lines}
    assert process.returncode == 0, process.stderr[-3000:]
    return found

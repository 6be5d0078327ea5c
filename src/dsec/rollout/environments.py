"""The two environments of the job, made on the node's own disk: layers of files on top of the base environment.

    cachetools@5.5.2/<fault>    fault / project / debian        what an agent gets
    cachetools@5.5.2/grader     runner / project / debian       what a grader gets: nothing in it came from an agent

Made once for each content: an environment's description names what it was made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from dsec.errors import EnvironmentNotFound
from dsec.rollout import grading
from dsec.rollout.candidates import Burst
from dsec.rollout.project import Project
from dsec.rollout.step import ROOT, RUNNER
from dsec.store.build import build_directory_layer
from dsec.store.environments import DEFAULT, EnvironmentStore
from dsec.store.layers import Entry

Files = Mapping[str, bytes]


def ensure_environments(state: Path, project: Project, files: Files, burst: Burst) -> tuple[str, str]:
    """Names of the agent's and the grader's environment in the store of the node at `state`.

    `files`: the pristine project. Raises `EnvironmentNotFound` where the node has no base environment.
    """
    store = EnvironmentStore(state)
    pristine = {f"{ROOT}/{path}": content for path, content in files.items()}
    fault = {f"{ROOT}/{path}": text.encode() for path, text in burst.planted.items()}
    runner = {RUNNER: grading.INSIDE.read_bytes()}
    name = f"{project.name}@{project.version}"
    return (
        _ensure(store, f"{name}/{burst.fault.name}", fault, pristine),
        _ensure(store, f"{name}/grader", runner, pristine),
    )


def _ensure(store: EnvironmentStore, name: str, *trees: Files) -> str:
    base = store.get(DEFAULT)
    digest = hashlib.sha256(repr([base.layers, *(sorted(tree.items()) for tree in trees)]).encode()).hexdigest()
    description = f"made of {digest}"
    try:
        if store.get(name).description == description:
            return name
    except EnvironmentNotFound:
        pass
    layers = (build_directory_layer(store.layers, _entries(tree), description=name).digest for tree in trees)
    store.put(name, (*layers, *base.layers), env=base.env, workdir=ROOT, description=description)
    return name


def _entries(files: Files) -> dict[str, Entry]:
    return {path.lstrip("/"): Entry(content) for path, content in files.items()}

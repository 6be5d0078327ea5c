"""Boxes for the attack suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from security_box import Box, Nursery


@pytest.fixture(scope="session")
def nursery(native_programs: Path) -> Iterator[Nursery]:
    """Where boxes come from; one zygote for all."""
    name = f"dsec-security-{os.getpid()}"
    nursery = Nursery(Path("/run/dsec") / name, name, native_programs)
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def box(nursery: Nursery) -> Iterator[Box]:
    """A sandbox that the attacks of one module share, and that has to survive them."""
    box = nursery.make()
    yield box
    assert box.alive, "an attack ended the sandbox"
    box.close()


@pytest.fixture
def make_box(nursery: Nursery) -> Iterator[Callable[..., Box]]:
    """Makes sandboxes for one test."""
    made: list[Box] = []

    def make(**options: Any) -> Box:
        made.append(nursery.make(**options))
        return made[-1]

    yield make
    for box in made:
        box.close()

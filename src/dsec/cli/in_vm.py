"""Options of verbs whose server may run in a virtual machine of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option("--in-vm", is_flag=True, help="Run containers and function calls in one virtual machine."),
    click.option("--vm-cpus", type=click.IntRange(1, 64), default=2, show_default=True, help="Of that machine."),
    click.option("--vm-memory-mib", type=click.IntRange(512), default=4096, show_default=True, help="Of that machine."),
    click.option(
        "--vm-state-gib", type=click.IntRange(1), default=64, show_default=True, help="What it may keep on disk."
    ),
)


def in_vm_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`in_vm`, and `vm_cpus`, `vm_memory_mib`, `vm_state_gib` as `app_shield.shape_of` takes them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command

"""What the benchmarks of layers have in common: how they are called, and where they work. They need root and an
environment that is built, and start no server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from dsec.backends.container.native import build_native
from dsec.bench.lazy_node import Place, unmounted_after
from dsec.bench.output import write_result
from dsec.rollout.server import default_state, run
from dsec.store.environments import EnvironmentStore
from dsec.store.layers import LayerStore

MIB = 1 << 20
P = TypeVar("P")


def layers_command(
    name: str,
    about: str | None,
    plan: Callable[..., P],
    measure: Callable[[P, Path], Coroutine[Any, Any, dict[str, Any]]],
    *options: Callable[[click.Command], click.Command],
) -> Callable[[list[str]], int]:
    """`dsec bench NAME`: with arguments it returns the exit code. `plan`: made of the options and `environment`."""

    @click.command(name, help=about, context_settings={"help_option_names": ["-h", "--help"]})
    @click.option("--environment", default="debian", show_default=True, help="Its layers are the base.")
    @click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
    def command(state: Path | None, as_json: bool, **fields: Any) -> int:
        result = run(measure(plan(**fields), state or default_state()), asyncio.new_event_loop)
        write_result(result, as_json=as_json)
        return 0

    for option in options:
        option(command)

    def main(arguments: list[str]) -> int:
        return int(command.main(arguments, prog_name=f"dsec bench {name}", standalone_mode=False) or 0)

    return main


@asynccontextmanager
async def place_for(environment: str, state: Path) -> AsyncIterator[tuple[Place, LayerStore, list[str]]]:
    """A place for nodes and their store, with this machine's layers of an environment in both: the place, this
    machine's layers, their digests. Raises `EnvironmentNotFound`."""
    environments = EnvironmentStore(state)
    base = [each for each in environments.get(environment).layers if each != environments.runtime()]
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir=state) as directory, ExitStack() as undo:
        root = Path(directory)
        undo.enter_context(unmounted_after(root))
        place = undo.enter_context(Place(root, build_native(state) / "holder"))
        own = LayerStore(place.fresh("source"))
        for digest in base:
            (own.root / digest).symlink_to(environments.layers.root / digest)
        await place.publish(own, base)
        yield place, own, base

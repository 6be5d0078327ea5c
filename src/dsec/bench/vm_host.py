"""A host for a benchmark of machines: what there is of a state directory, in a run directory of its own, of which
nothing is left. What machines are made of stays in the state directory, also where it was made for the benchmark."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.app import build_default, check_root, make_state, open_environments, open_host
from dsec.backends.container.host import Host
from dsec.bench.output import say
from dsec.configuration import Config, read_config
from dsec.errors import EnvironmentNotFound
from dsec.kernel.ledger import Ledger
from dsec.store.environments import DEFAULT
from dsec.store.kernels import KernelStore
from dsec.store.views import remove_dev
from dsec.vmm.images import ImageStore


def have(state: Path | None, environment: str, disk: str | None) -> None:
    """The environment, a kernel and the disk of full machines (None: none is needed): what isn't there and has the name
    that is usual is made, which takes about a minute each. Blocks. Raises `EnvironmentNotFound` for another name,
    `PermissionDenied`, `PlatformError`, `Unsupported`."""
    check_root()
    config = read_config(state)
    make_state(config)
    environments, kernels, images = open_environments(config), KernelStore(config.state), ImageStore(config.state)
    if environment == DEFAULT:
        environments.ensure_default(build_default)
    if not kernels.list():
        say("there is no kernel for machines: the distribution's is imported")
        kernels.import_package(progress=say)
    if disk is None:
        return
    try:
        images.find(disk)
    except EnvironmentNotFound:
        if disk != DEFAULT:
            raise
        say(f"there is no disk {disk!r} for full machines: it is built; --no-full leaves them out")
        images.build(disk, progress=say)


@asynccontextmanager
async def bench_host(state: Path | None, *, spare: int = 0) -> AsyncIterator[tuple[Config, Host]]:
    """`state`: whose store and programs are used. `spare`: machines to have ready of a kind."""
    found = read_config(state)
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as scratch:
        own = Path(scratch) / "state"
        own.mkdir()
        for part in ("store", "native"):
            (found.state / part).mkdir(exist_ok=True)
            (own / part).symlink_to(found.state / part)
        run = found.run.parent / f"bench-vm-{secrets.token_hex(4)}"
        config = Config(state=own, run=run, vm_spare=spare, vm_accel=found.vm_accel)
        host = await asyncio.to_thread(open_host, config)
        try:
            yield config, host
        finally:
            host.volume.close(keep=False)
            host.layers.unmount_all()
            host.views.remove()
            remove_dev(host.run)
            for line in Ledger(own / "host.json").undo_kind("zram"):
                say(line)
            for path in sorted(run.rglob("*"), reverse=True):
                path.rmdir()
            run.rmdir()

"""A host for a benchmark of machines: what there is of a state directory, in a run directory of its own, of which
nothing is left."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.app import open_host
from dsec.backends.container.host import Host
from dsec.bench.output import say
from dsec.configuration import Config, read_config
from dsec.kernel.ledger import Ledger
from dsec.store.views import remove_dev


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

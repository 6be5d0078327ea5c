"""A data volume that nobody can go on with: what stands on it is ended, so that it can be mounted anew.

The kernel makes a volume read-only for good where the disk below it was full or broke; and whoever removes a state
directory while sandboxes run, or before `host undo`, leaves the volume of it mounted without a file. Neither comes
right while a single sandbox stands on it. So a server that starts ends them all, as the loss of a machine does (their
records say `node_lost`), and what was on the disk by the kernel's last commit is there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from dsec.backends.container.zygote import ZygoteClient
from dsec.configuration import Config
from dsec.errors import Unavailable
from dsec.store.volume import Volume
from dsec.vmm.launching import LauncherClient

log = logging.getLogger("dsec")


async def renew_volume(config: Config) -> None:
    """Let go of a volume that is in trouble; nothing where it isn't. Before anything else of the node is opened, and by
    who holds the lock of the state directory. Raises `Unavailable` where something still stands on it."""
    trouble = await asyncio.to_thread(Volume.trouble, config.state, config.run)
    if not trouble:
        return
    log.warning("%s: all sandboxes of it end, and it is mounted anew", trouble)
    with contextlib.suppress(Unavailable):
        zygote = ZygoteClient(on_exit=lambda *_: None)
        await zygote.connect(config.run / "zygote.sock")
        await zygote.shutdown()
    for name in ("vm", "full"):
        with contextlib.suppress(Unavailable):
            launcher = LauncherClient(on_exit=lambda *_: None, on_lost=lambda: None)
            await launcher.connect(config.run / f"{name}.sock")
            await launcher.shutdown()
    await asyncio.to_thread(Volume.let_go, config.run)

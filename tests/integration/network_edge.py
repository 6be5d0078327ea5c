"""An edge that dies: makes a sandbox with a network, starts a program in it, says where both are, and hangs until it is
killed. Run as a program: STATE RUN CODE.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from network_kit import PRELUDE, make, open_backend

from dsec.spec.operations import OpRequest


async def begin(state: Path, run: Path, code: str) -> dict[str, Any]:
    backend = open_backend(state, run)
    await backend.open({})
    box = await make(backend)
    await box.serve()
    assert await box.python("print(say('1.2.3.4', 80))") == "1.2.3.4:80"
    argv = tuple(word.encode() for word in ("/usr/bin/python3", "-c", PRELUDE + code))
    await box.instance.channel.start(OpRequest(argv=argv, key=b"program"))
    return {"id": box.id, "handle": box.handle, "pid": box.instance.pid}


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    told = loop.run_until_complete(begin(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    time.sleep(3600)  # the event loop stands still: nothing is accepted any more

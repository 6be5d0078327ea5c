"""Times E2B's own client: a process with that package alone, and this file as its script.

    python e2b_worker.py SANDBOX_ID COUNT

Connects to the sandbox that the environment's server has, runs `true` so many times, one at a time, and writes the
milliseconds of each as a JSON list.
"""

from __future__ import annotations

import json
import sys
import time

WARM_UP = 20


def main(sandbox_id: str, count: int) -> None:
    from e2b import Sandbox  # type: ignore[import-not-found]  # noqa: PLC0415 (not one of our dependencies)

    sandbox = Sandbox.connect(sandbox_id)
    times = []
    for _ in range(WARM_UP + count):
        began = time.perf_counter()
        sandbox.commands.run("true")
        times.append((time.perf_counter() - began) * 1e3)
    sys.stdout.write(json.dumps(times[WARM_UP:]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""`GET /metrics`: what the edge and this server count, in the text format of Prometheus.

Owns the text format, the server's own figures (requests, errors, the lag of the event loop, the process), and nothing
of the edge's. Invariants: everything is put into words when it is asked for; a request costs two additions.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dsec.edge.tally import Family, Histogram, Sample, one

MEDIA = b"text/plain; version=0.0.4; charset=utf-8"
LAG_EVERY_S = 1.0
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def installed_version() -> str:
    """Of the package; a checkout that isn't installed has none."""
    try:
        return importlib.metadata.version("dsec")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class ServerMetrics:
    """Figures of one API server."""

    def __init__(self, version: str) -> None:
        self.requests = 0
        self.quick = 0
        self.errors: Counter[str] = Counter()
        self._version = version
        self._lag = Histogram(_LAG_S)
        self._worst_lag_s = 0.0
        self._watcher: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin to measure the event loop's lag, if that hasn't begun."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._measure_lag(), name="dsec loop lag")

    async def _measure_lag(self) -> None:
        """How much later than it asked for a sleeping task runs again."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            lag_s = max(0.0, loop.time() - due)
            self._lag.observe(lag_s)
            self._worst_lag_s = max(self._worst_lag_s, lag_s)

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def families(self) -> list[Family]:
        """All of them; the worst lag is since the last time that somebody asked."""
        worst, self._worst_lag_s = self._worst_lag_s, 0.0
        build = {"version": self._version, "python": platform.python_version()}
        return [
            Family("dsec_build_info", "gauge", "The version that runs; always 1.", [Sample(1, build)]),
            one("dsec_http_requests_total", "counter", "Requests that were taken in.", self.requests),
            one("dsec_http_quick_total", "counter", "Of those, answered by a short way.", self.quick),
            Family(
                "dsec_http_errors_total",
                "counter",
                "Answers that are errors, by code.",
                [Sample(count, {"code": code}) for code, count in sorted(self.errors.items())],
            ),
            Family(
                "dsec_event_loop_lag_seconds",
                "histogram",
                "How late the event loop wakes a task that is due.",
                list(self._lag.samples({})),
            ),
            one("dsec_event_loop_lag_worst_seconds", "gauge", "The longest since the last scrape.", worst),
            *_process(),
        ]


def _process() -> Iterable[Family]:
    """The names that every Prometheus client uses."""
    times = os.times()
    yield one("process_cpu_seconds_total", "counter", "CPU time of the server.", times.user + times.system)
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        started = int(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (thousands of names, no Path for each)
    except (OSError, ValueError, IndexError):
        return
    since_boot_s = started / os.sysconf("SC_CLK_TCK")
    started_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
    yield one(
        "process_resident_memory_bytes", "gauge", "Resident memory of the server.", pages * os.sysconf("SC_PAGE_SIZE")
    )
    yield one("process_start_time_seconds", "gauge", "When the server began, since the epoch.", round(started_at, 2))
    yield one("process_open_fds", "gauge", "Open descriptors of the server.", descriptors)


def exposition(families: Iterable[Family]) -> bytes:
    """The text format, version 0.0.4."""
    lines: list[str] = []
    for family in families:
        lines += [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for sample in family.samples:
            labels = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in sample.labels.items())
            lines.append(f"{family.name}{sample.suffix}{'{' + labels + '}' if labels else ''} {_number(sample.value)}")
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text

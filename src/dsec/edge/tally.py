"""What an edge counts: plain numbers, added up on the hot path, given names and forms only when somebody asks.

Owns `Tally` and the value types of a metric, which follow the conventions of Prometheus (base units, `_total` for
counters, cumulative histogram buckets). Invariants: adding costs well below a microsecond; labels come from closed
lists, so that the number of series is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from dsec.spec.causes import Cause

Labels = dict[str, str]

SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LONG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Sample(Struct, frozen=True):
    """One line: `suffix` is appended to the family's name (`_bucket`, `_sum`, `_count`)."""

    value: float
    labels: Labels = {}
    suffix: str = ""


class Family(Struct, frozen=True):
    """One metric with all of its series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: list[Sample]


class Histogram:
    """Counts of values by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """As Prometheus wants it: each bucket holds the ones below it too."""
        so_far = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            so_far += count
            yield Sample(so_far, {**labels, "le": f"{bound:g}"}, "_bucket")
        so_far += self.counts[-1]
        yield Sample(so_far, {**labels, "le": "+Inf"}, "_bucket")
        yield Sample(self.total, labels, "_sum")
        yield Sample(so_far, labels, "_count")


class Tally:
    """Counters and histograms of one edge since it began."""

    def __init__(self) -> None:
        self.create = Histogram(LONG_S)
        self.queue = Histogram(LONG_S)
        self.removal = Histogram(LONG_S)
        self.first_exec = Histogram(LONG_S)
        self.phases: dict[str, Histogram] = {}
        self.exec = Histogram(SHORT_S)
        self.command_ends: Counter[Cause] = Counter()
        self.commands = 0
        self.refused: Counter[str] = Counter()
        self.ends: Counter[Cause] = Counter()
        self.stdin_bytes = 0
        self.output_bytes = 0
        self.written_bytes = 0
        self.read_bytes = 0

    def phase(self, name: str, seconds: float) -> None:
        """One step of a creation."""
        found = self.phases.get(name)
        if found is None:
            found = self.phases[name] = Histogram(SHORT_S)
        found.observe(seconds)

    def families(self) -> list[Family]:
        """All of them, named."""
        creations = [sample for name, each in self.phases.items() for sample in each.samples({"phase": name})]
        return [
            _histogram("dsec_create_seconds", "From admission to a guest that answers.", self.create),
            Family("dsec_create_phase_seconds", "histogram", "Steps of a creation.", creations),
            _histogram("dsec_queue_seconds", "How long a creation waited for capacity.", self.queue),
            _histogram(
                "dsec_removal_seconds", "From the decision to end a sandbox until nothing is left.", self.removal
            ),
            _histogram(
                "dsec_first_exec_seconds", "From a running sandbox to the result of its first command.", self.first_exec
            ),
            _histogram("dsec_exec_seconds", "From a command's request to its result.", self.exec),
            one("dsec_commands_started_total", "counter", "Commands that were started.", self.commands),
            by_cause("dsec_commands_ended_total", "Commands by how they ended.", self.command_ends),
            by_cause("dsec_sandboxes_ended_total", "Sandboxes by why they ended.", self.ends),
            Family(
                "dsec_creations_failed_total",
                "counter",
                "Creations that came to nothing, by error code.",
                [Sample(count, {"code": code}) for code, count in sorted(self.refused.items())],
            ),
            Family(
                "dsec_bytes_total",
                "counter",
                "Bytes into and out of sandboxes.",
                [
                    Sample(self.stdin_bytes, {"direction": "in", "by": "stdin"}),
                    Sample(self.written_bytes, {"direction": "in", "by": "files"}),
                    Sample(self.output_bytes, {"direction": "out", "by": "output"}),
                    Sample(self.read_bytes, {"direction": "out", "by": "files"}),
                ],
            ),
        ]


def one(name: str, kind: Literal["counter", "gauge"], text: str, value: float) -> Family:
    """A metric with one series."""
    return Family(name, kind, text, [Sample(value)])


def by_cause(name: str, text: str, counts: Mapping[Cause, int]) -> Family:
    """A counter by cause, with the party that is responsible."""
    samples = [
        Sample(count, {"cause": cause.value, "infra": "true" if cause.infra else "false"})
        for cause, count in sorted(counts.items())
    ]
    return Family(name, "counter", text, samples)


def _histogram(name: str, text: str, histogram: Histogram) -> Family:
    return Family(name, "histogram", text, list(histogram.samples({})))

"""How far long work is: one line on a terminal, written again a few times a second.

Of a copy it says bytes, rate and time left.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque

from dsec.cli.output import age, printable, readable

_EVERY_S = 0.2
_QUIET_S = 2.0
"""A step that isn't told of for so long doesn't go on beside others."""
_LINE_S = 15.0
"""The same where it is no terminal."""
_LOOK_BACK_S = 60.0


class _Line:
    """The one that is written again and again, on stderr."""

    def __init__(self) -> None:
        self._width = 0

    def write(self, text: str) -> None:
        """In the place of what stands there."""
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Take it away. Idempotent."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


class Progress:
    """Counts; shows itself on stderr where that is a terminal and `quiet` isn't set."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.files = 0
        self.bytes = 0
        self.total_bytes: int | None = None
        """What is expected, where it is known."""
        self.notes: list[str] = []
        self.live = not quiet and sys.stderr.isatty()
        """Somebody looks on."""
        self._began = time.monotonic()
        self._shown_at = self._began
        self._line = _Line()

    def begin(self) -> None:
        """Time counts from here: there is a connection."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def add(self, size: int) -> None:
        """Bytes went over."""
        self.bytes += size
        if self.live and time.monotonic() - self._shown_at >= _EVERY_S:
            self._show()

    def file(self, _: int = 0) -> None:
        """A file is whole."""
        self.files += 1

    def note(self, text: str) -> None:
        """Something was left out, or is otherwise to be known."""
        self.notes.append(text)
        self._line.clear()
        print(f"dsec: {text}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """All of it in a line."""
        rate = readable(int(self.bytes / max(self.seconds, 1e-6)))
        word = "file" if self.files == 1 else "files"
        return f"{self.files:,} {word}, {readable(self.bytes)} in {self.seconds:.2f} s ({rate}/s)"

    def end(self) -> None:
        """Take the line away."""
        self._line.clear()
        self.live = False

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        rate = self.bytes / max(self.seconds, 1e-6)
        text = f"{self.files:,} files  {readable(self.bytes)}"
        if self.total_bytes:
            text += f" of {readable(self.total_bytes)}  {min(100, 100 * self.bytes // self.total_bytes)} %"
        text += f"  {readable(int(rate))}/s"
        if self.total_bytes and rate and self.bytes < self.total_bytes:
            text += f"  {age((self.total_bytes - self.bytes) / rate)} left"
        self._line.write(text)


class Virtual:
    """How far a simulation is, by its own clock; where stderr is no terminal a line now and then."""

    def __init__(self, label: str, total_s: float) -> None:
        self._label = label
        self._total_s = total_s
        self._live = sys.stderr.isatty()
        self._every_s = _EVERY_S if self._live else _LINE_S
        self._began = self._shown_at = time.monotonic()
        self._marks: deque[tuple[float, float]] = deque([(self._began, 0.0)], maxlen=round(_LOOK_BACK_S / _EVERY_S))
        """(monotonic, virtual): the work of a virtual second grows as the cluster fills, so only the last ones tell
        how long the others will take."""
        self._line = _Line()

    def __enter__(self) -> Virtual:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()

    def at(self, virtual_s: float, live: int) -> None:
        """It is `virtual_s` there; so many sandboxes are live."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= _EVERY_S:
            self._marks.append((now, virtual_s))
        if now - self._shown_at < self._every_s:
            return
        self._shown_at = now
        before, from_s = self._marks[0]
        text = span(self._label, virtual_s, self._total_s, (virtual_s - from_s) / max(now - before, 1e-6), live)
        if self._live:
            self._line.write(text)
        else:
            print(text, file=sys.stderr, flush=True)


def span(label: str, virtual_s: float, total_s: float, rate: float, live: int) -> str:
    """A simulation in words; `rate`: virtual seconds a second."""
    text = f"{label}  {virtual_s:,.0f} of {total_s:,.0f} virtual s  {100 * virtual_s / total_s:.0f} %  {live:,} live"
    text += f"  {rate:.3g} virtual s/s"
    return f"{text}  {age((total_s - virtual_s) / rate)} left" if rate > 0 else text


class Steps:
    """The steps of long work on the server, on one line of stderr where that is a terminal. Several may go on at a
    time."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._running: dict[str, _Running] = {}
        self._shown_at = 0.0
        self._line = _Line()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()

    def show(self, step: str, done: int, total: int) -> None:
        """`done` of `total` bytes; a total of 0 is unknown."""
        if not self._live:
            return
        now = time.monotonic()
        new = step not in self._running
        known = self._running.setdefault(step, _Running(now, done))
        known.done, known.total, known.told_at = done, total, now
        if not new and now - self._shown_at < _EVERY_S:
            return
        self._shown_at = now
        text = printable(self.text(step, now))[: shutil.get_terminal_size().columns - 1]
        self._line.write(text)

    def text(self, latest: str, now: float) -> str:
        """What goes on; what has ended, or wasn't heard of for long, is forgotten unless it is the latest."""
        for step, each in list(self._running.items()):
            if step != latest and (each.done == each.total or now - each.told_at > _QUIET_S):
                del self._running[step]
        return "; ".join(
            line(step, each.done, each.total, each.told_at - each.began, each.done - each.began_at)
            for step, each in self._running.items()
        )


class _Running:
    """A step that was told of."""

    def __init__(self, began: float, began_at: int) -> None:
        self.began = self.told_at = began
        self.began_at = self.done = began_at
        """Bytes."""
        self.total = 0


def line(step: str, done: int, total: int, seconds: float, came: int | None = None) -> str:
    """One step in words: bytes, rate, time left. `came`: bytes in these seconds, where that isn't all of `done`."""
    if not done:
        return step
    rate = (done if came is None else came) / max(seconds, 1e-6)
    text = f"{step}  {readable(done)}"
    if total:
        text += f" of {readable(total)}  {min(100, 100 * done // total)} %"
    if rate:
        text += f"  {readable(int(rate))}/s"
        if total > done:
            text += f"  {age((total - done) / rate)} left"
    return text

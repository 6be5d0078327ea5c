"""How far a copy is, on a terminal: bytes, rate, time left. One line, written again a few times a second."""

from __future__ import annotations

import sys
import time

from dsec.cli.output import age, readable

_EVERY_S = 0.2


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
        self._width = 0

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
        self._clear()
        print(f"dsec: {text}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """All of it in a line."""
        rate = readable(int(self.bytes / max(self.seconds, 1e-6)))
        return f"{self.files:,} files, {readable(self.bytes)} in {self.seconds:.2f} s ({rate}/s)"

    def end(self) -> None:
        """Take the line away."""
        self._clear()
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
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def _clear(self) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


class Steps:
    """The steps of long work on the server, on one line of stderr where that is a terminal."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._step = ""
        self._began = self._shown_at = 0.0
        self._width = 0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()

    def show(self, step: str, done: int, total: int) -> None:
        """`done` of `total` bytes; a total of 0 is unknown."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._began = step, now
        elif not self._live or now - self._shown_at < _EVERY_S:
            return
        if self._live:
            self._shown_at = now
            text = line(step, done, total, now - self._began)
            sys.stderr.write("\r" + text.ljust(self._width))
            sys.stderr.flush()
            self._width = max(self._width, len(text))


def line(step: str, done: int, total: int, seconds: float) -> str:
    """One step in words: bytes, rate, time left."""
    if not done:
        return step
    rate = done / max(seconds, 1e-6)
    text = f"{step}  {readable(done)}"
    if total:
        text += f" of {readable(total)}  {min(100, 100 * done // total)} %"
    text += f"  {readable(int(rate))}/s"
    if total > done:
        text += f"  {age((total - done) / rate)} left"
    return text

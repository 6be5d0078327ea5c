"""SIGTERM and SIGHUP end a verb as Ctrl-C does: `timeout`, a job that is cancelled, a terminal that is closed.

Their default would leave what was to end with the verb, a sandbox for hours. A verb that gives Ctrl-C a meaning of its
own asks `ending`.
"""

from __future__ import annotations

import signal

from dsec.cli.output import EXIT_INTERRUPTED

_came: list[int] = []


def as_interrupts() -> None:
    """From now on. One that is ignored (`nohup`) stays so."""

    def end(number: int, _: object) -> None:
        _came.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's job in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    for name in ("SIGTERM", "SIGHUP"):  # the latter isn't on every platform
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def ending() -> bool:
    """Whether this SIGINT is one of those, and no Ctrl-C."""
    return bool(_came)


def exit_code() -> int:
    """Of a program that was interrupted."""
    return 128 + _came[0] if _came else EXIT_INTERRUPTED

"""SIGTERM and SIGHUP end a verb as Ctrl-C does: `timeout`, a job that is cancelled, a terminal that is closed.

Their default would leave what was to end with the verb, a sandbox for hours. A verb that gives Ctrl-C a meaning of its
own asks `ending`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from dsec.cli.output import EXIT_INTERRUPTED

T = TypeVar("T")

_came: list[int] = []
_verbs: list[asyncio.Task[Any]] = []


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` for a verb: it can be ended, with time to tidy up, also where Ctrl-C is ignored."""

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        _verbs.append(task)
        try:
            return await work
        finally:
            _verbs.remove(task)

    return asyncio.run(main())


def as_interrupts() -> None:
    """From now on. One that is ignored (`nohup`) stays so."""

    def end(number: int, _: object) -> None:
        _came.append(number)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
        elif _verbs:  # a script's job in the background
            _verbs[-1].get_loop().call_soon_threadsafe(_verbs[-1].cancel)
        else:
            raise KeyboardInterrupt

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

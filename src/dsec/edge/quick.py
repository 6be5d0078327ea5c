"""Commands whose callers want the result alone and which most likely end at once: begun in one step and told of by a
call, without a task, a generator or a timer for each.

What makes a command take longer (much output, a guest that is lost, a result that can't be written down) isn't handled
here: whoever holds a `QuickCommand` lets go of it and goes on by `EdgeClient.exec`, which attaches to the same key.
Invariant: a command that was begun here is one of the sandbox's like any other, with the same entries in its log.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from dsec.edge.lives import Lives
from dsec.edge.recorder import Recorder
from dsec.edge.sandbox import Sandbox
from dsec.spec.sandbox import ExecStatus

if TYPE_CHECKING:
    from dsec.edge.command import Command

T = TypeVar("T")

MOST_OUTPUT = 64 << 10
"""With more of it a command isn't a quick one."""


class QuickCommand:
    """A hold on a command that runs. `dsec.edge.client.Quick`."""

    __slots__ = ("_command", "_held", "_lives", "_recorder", "_sandbox")

    def __init__(self, lives: Lives, sandbox: Sandbox, command: Command, told: Callable[[], None]) -> None:
        """`command` has just been started."""
        assert command.recorder is not None
        self._lives = lives
        self._sandbox = sandbox
        self._command = command
        self._recorder: Recorder = command.recorder
        self._recorder.noticed = told
        self._held = True
        command.reads += 1
        lives.use(sandbox)

    @property
    def key(self) -> str:
        return self._command.key

    @property
    def pid(self) -> int | None:
        return self._command.live().pid

    @property
    def status(self) -> ExecStatus | None:
        return self._command.status

    @property
    def quick(self) -> bool:
        return (
            self._command.live().end is None
            and not self._recorder.broken
            and self._recorder.output_bytes <= MOST_OUTPUT
        )

    def output(self) -> tuple[bytes, bytes] | None:
        return self._recorder.whole_output()

    def let_go(self) -> None:
        if self._held:
            self._held = False
            self._recorder.noticed = None
            self._command.reads -= 1
            self._lives.unuse(self._sandbox)


def at_once(step: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that gets to its end without waiting for anything."""
    try:
        step.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    step.close()
    raise RuntimeError("it had to wait")

"""What compilers made of sources, by all that it depends on: projects share it, so nobody may choose what another gets.

Invariants: a result is remembered, and is another's than who had it made, only where the compiler ended by itself, so
that neither a time limit nor a fault of the platform's sticks; who asks for what is being made waits for that; making
it ends when nobody waits any more.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

from dsec.grading.running import Job, Ran
from dsec.grading.tools import TOOLS
from dsec.spec.causes import Cause
from dsec.spec.judging import JudgeLimits, Language
from dsec.spec.sandbox import GIB, MIB

KEPT_BYTES = 256 * MIB
LIMITS = JudgeLimits(cpu_s=3600.0, memory_bytes=2 * GIB, output_bytes=1 * MIB, pids=256)
"""Of a compiler."""
_LEAST_BYTES = 4096
"""What remembering anything counts for."""


Surroundings = tuple[Sequence[str], Mapping[str, str]]
"""An environment's layers, top first, and its variables."""


class Built(Struct, frozen=True, kw_only=True):
    """What came of a source."""

    ran: Ran
    """The compiler's run, without what it made."""
    program: bytes | None
    """None: it refused, or was ended."""
    fresh: bool = False
    """By this call."""


class _Making:
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[Built]) -> None:
        self.task = task
        self.waiters = 0


class Programs:
    """The programs of one node."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Built] = OrderedDict()
        self._bytes = 0
        self._making: dict[str, _Making] = {}

    @staticmethod
    def key(around: Surroundings, language: Language, source: bytes, files: Mapping[bytes, bytes]) -> str:
        """Names what is made of these. Variables are in it too: whoever names an environment chooses them, and with
        them what a compiler makes, or whether it can."""
        layers, env = around
        digest = hashlib.sha256()
        variables = (f"{name}={env[name]}" for name in sorted(env))
        words = (*layers, "", *variables, "", *(TOOLS[language].compile or TOOLS[language].check), "")
        for part in (*(word.encode(errors="surrogateescape") for word in words), source):
            digest.update(b"%d:" % len(part) + part)
        for path in sorted(files):
            digest.update(b"%d:%d:" % (len(path), len(files[path])) + path + files[path])
        return digest.hexdigest()

    async def get(self, key: str, make: Callable[[], Awaitable[Ran]]) -> Built:
        """What `make` makes, once for all who ask. Raises what it raises."""
        while True:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
            making = self._making.get(key)
            fresh = making is None
            if making is None:
                making = self._making[key] = _Making(asyncio.ensure_future(self._make(key, make)))
            making.waiters += 1
            try:
                built = await asyncio.shield(making.task)
            finally:
                making.waiters -= 1
                if not making.waiters and not making.task.done():
                    making.task.cancel()
                    self._making.pop(key, None)
            if fresh or _lasts(built.ran):
                return Built(ran=built.ran, program=built.program, fresh=fresh)

    async def _make(self, key: str, make: Callable[[], Awaitable[Ran]]) -> Built:
        own = asyncio.current_task()
        try:
            ran = await make()
        finally:
            if key in self._making and self._making[key].task is own:
                del self._making[key]
        program = next(iter(ran.fetched.values()), None) if ran.status.exit_code == 0 else None
        built = Built(ran=Ran(status=ran.status, stdout=ran.stdout, stderr=ran.stderr), program=program)
        if _lasts(ran):
            self._keep(key, built)
        return built

    def _keep(self, key: str, built: Built) -> None:
        self._known[key] = built
        self._bytes += _size(built)
        while self._bytes > KEPT_BYTES:
            self._bytes -= _size(self._known.popitem(last=False)[1])


def _lasts(ran: Ran) -> bool:
    """Whether it would come out like that whoever asks."""
    return ran.status.cause is Cause.EXITED


def compile_job(
    project: str, environment: str, language: Language, files: Mapping[bytes, bytes], compile_s: float
) -> Job:
    """The run of the compiler, or of what checks the source, over `files`, the source among them."""
    tool = TOOLS[language]
    return Job(
        project=project,
        environment=environment,
        argv=tool.compile or tool.check,
        files=files,
        limits=JudgeLimits(
            cpu_s=LIMITS.cpu_s,
            wall_s=compile_s,
            memory_bytes=LIMITS.memory_bytes,
            output_bytes=LIMITS.output_bytes,
            pids=LIMITS.pids,
        ),
        fetch=(tool.made,),
    )


def _size(built: Built) -> int:
    return _LEAST_BYTES + len(built.program or b"") + len(built.ran.stdout) + len(built.ran.stderr)

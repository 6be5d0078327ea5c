"""A shell session's protocol, without I/O: what is typed into an interactive bash, and what its output means.

Owns the marks by which the begin and the end of a command are known. A mark is a terminal sequence that shows nothing:
`ESC ] 8888 ; SECRET ; KIND [; RUN [; CODE]] BEL`, KIND `r` (the shell is ready; what follows is the session's name in
hexadecimal), `b` (a command begins) or `e` (it has ended with CODE). SECRET is random for each session, RUN for each
command. Marks are made by `printf` from an escaped
form, so that neither an echo, `set -x`, `set` nor the command's own text holds one. Invariants:

- Output is passed on as it was written, byte by byte, without the marks, however it is cut into pieces.
- The log is the truth: fed from its first byte it gives the same state again (an edge that takes over knows no other).
- A command's text is typed as lines of less than a terminal's 4,096 bytes, of printable ASCII alone.
- The end is reported twice over: after the command, and by PROMPT_COMMAND where bash has dropped the rest of the line
  (an interrupt, an expansion that failed). The first one counts.
"""

from __future__ import annotations

import re
from itertools import islice

from msgspec import Struct

_LEAD = b"\x1b]8888;"
_READY = re.compile(rb"\x1b\]8888;([0-9a-f]{32});r(?:;((?:[0-9a-f]{2}){1,400}))?\x07")
_BODY = re.compile(rb"r(?:;[0-9a-f]{2,800})?|b;([0-9a-f]{16})|e;([0-9a-f]{16});([0-9]{1,3})")
_BODY_MAX = 32
_READY_MAX = 804
_LINE = 3000
_QUIET = " 2>/dev/null"
_KEPT_RUNS = 256
MAX_COMMAND_BYTES = 1 << 20


class Output(Struct, frozen=True):
    """Bytes that came from the shell or its commands."""

    data: bytes
    end: int
    """Offset in the log just after them."""


class Mark(Struct, frozen=True):
    """A mark, complete."""

    kind: str
    run: str
    code: int
    start: int
    """Offset in the log of its first byte."""
    end: int


class Parser:
    """Splits a session's log into output and marks."""

    def __init__(self, secret: str, offset: int = 0) -> None:
        self._lead = _LEAD + secret.encode() + b";"
        self._held = b""
        self._at = offset
        """Offset of the first byte of `_held`."""

    @property
    def held(self) -> bytes:
        """What may be the beginning of a mark."""
        return self._held

    @property
    def passed(self) -> int:
        """Offset up to which all was given out."""
        return self._at

    def feed(self, data: bytes) -> list[Output | Mark]:
        """What the next bytes of the log mean. An unfinished mark is held back until it can't be one."""
        data, start = self._held + data, 0
        found: list[Output | Mark] = []
        search = 0
        lead = self._lead
        while True:
            at = data.find(lead, search)
            if at < 0:
                keep = _overlap(data, lead, start)
                break
            body = at + len(lead)
            longest = _READY_MAX if data.startswith(b"r;", body) else _BODY_MAX
            bell = data.find(b"\x07", body, body + longest)
            if bell < 0:
                if len(data) - body < longest:
                    keep = len(data) - at
                    break
                search = at + 1
                continue
            match = _BODY.fullmatch(data, body, bell)
            if match is None:
                search = at + 1
                continue
            if at > start:
                found.append(Output(data[start:at], self._at + at))
            run = (match[1] or match[2] or b"").decode()
            kind = chr(data[body])
            found.append(Mark(kind, run, int(match[3] or 0), self._at + at, self._at + bell + 1))
            start = search = bell + 1
        if len(data) - keep > start:
            found.append(Output(data[start : len(data) - keep], self._at + len(data) - keep))
        self._at += len(data) - keep
        self._held = data[len(data) - keep :]
        return found


def _overlap(data: bytes, lead: bytes, start: int) -> int:
    """How many bytes at the end of `data` may be the beginning of a mark."""
    for size in range(min(len(lead) - 1, len(data) - start), 0, -1):
        if data.endswith(lead[:size]):
            return size
    return 0


def secret_of(log: bytes) -> str | None:
    """The secret of the session that a log begins; None where the shell isn't ready in it."""
    match = _READY.search(log)
    return match[1].decode() if match else None


def name_of(log: bytes) -> str | None:
    """The name that the session of a log says it has; None where the shell isn't ready in it."""
    match = _READY.search(log)
    return bytes.fromhex((match[2] or b"").decode()).decode("utf-8", "replace") if match else None


def quote(text: bytes) -> list[str]:
    """The text in pieces, as bash reads them inside `$'...'`: printable ASCII, none longer than a line may be."""
    parts = [
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\!" else "\\n" if byte == 10 else f"\\{byte:03o}"
        for byte in text
    ]
    lines: list[str] = []
    line: list[str] = []
    size = 0
    for part in parts:
        if size + len(part) > _LINE:
            lines.append("".join(line))
            line, size = [], 0
        line.append(part)
        size += len(part)
    return [*lines, "".join(line)]


def _mark(secret: str, body: str, value: str = "") -> str:
    """A command that prints a mark on the terminal, wherever the shell's output goes."""
    printf = rf"\builtin printf '\e]8888;{secret};{body}\a' {value}"
    return f"{{ {printf}>/dev/tty || {printf}; }}"


def setup(secret: str, name: str) -> bytes:
    """The first line that a new shell reads: no prompts, no echo, no history, output as it is written."""
    ready = _mark(secret, f"r;{name.encode('utf-8', 'replace').hex()}")
    return (f"PS1= PS2= PS0= PROMPT_COMMAND=; set +H +o history; \\command stty sane -echo -onlcr; {ready}\n").encode()


def lines(secret: str, run: str, command: bytes) -> bytes:
    """What runs a command in a shell that waits for one."""
    first, *more = quote(command)
    typed = [f"__dsec_c=$'{first}'", *(f"__dsec_c+=$'{piece}'" for piece in more)]
    end = _mark(secret, f"e;{run};%s", "$__dsec_e ")
    tidy = "\\command stty sane -echo -onlcr </dev/tty"
    hook = f"{{ __dsec_e=$?; [[ ${{__dsec_d-}} == {run} ]] || {{ __dsec_d={run}; {tidy}; {end}; }}; }}{_QUIET}"
    # In $'...' the hook's own quotes and backslashes are escaped once.
    escaped = hook.replace("\\", "\\\\").replace("'", "\\'")
    typed.append(
        f"{{ PS1= PS2= PS0= PROMPT_COMMAND=$'{escaped}'; {_mark(secret, f'b;{run}')}; }}{_QUIET}; "
        '\\builtin eval -- "$__dsec_c"; '
        f"{{ __dsec_e=$?; __dsec_d={run}; {tidy}; {end}; }}{_QUIET}"
    )
    return ("\n".join(typed) + "\n").encode("ascii")


def probe(secret: str, run: str) -> bytes:
    """What a shell that waits for a line prints the end of `run` for, where neither way did (a command took
    PROMPT_COMMAND away and was interrupted). Empty lines first: what was typed before is no part of it."""
    return f"\n{{ __dsec_e=$?; {_mark(secret, f'e;{run};%s', '$__dsec_e ')}; }}{_QUIET}\n".encode()


class Run:
    """One command of a session."""

    __slots__ = ("code", "dropped", "end", "entry", "output", "room", "run", "size", "start", "stopped")

    def __init__(self, run: str, room: int) -> None:
        self.run = run
        self.start: int | None = None
        """Where its output begins in the log; None until it does."""
        self.end: int | None = None
        self.code: int | None = None
        self.output = bytearray()
        """What of its output nobody took yet."""
        self.room = room
        """So many bytes more are kept."""
        self.dropped = 0
        self.size = 0
        """Bytes of output so far."""
        self.entry = 0
        """The number of its entry in the trajectory, until its result is there too."""
        self.stopped = False
        """Somebody asked for its end."""

    @property
    def done(self) -> bool:
        return self.end is not None

    def add(self, data: bytes) -> None:
        self.size += len(data)
        kept = data[: self.room]
        self.output += kept
        self.room -= len(kept)
        self.dropped += len(data) - len(kept)

    def forget(self) -> None:
        """Keep no output; it is in the log."""
        self.dropped += len(self.output)
        self.output = bytearray()

    def take(self, size: int | None = None) -> bytes:
        """Output that nobody took yet, or its first `size` bytes."""
        size = len(self.output) if size is None else size
        taken = bytes(self.output[:size])
        del self.output[:size]
        self.room += size
        return taken


class Machine:
    """The state of a session: which commands there were, which one runs."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self._parser = Parser(secret)
        self.ready = False
        self.ready_at = 0
        """Where the shell's own greetings end in the log."""
        self.runs: dict[str, Run] = {}
        """The last ones, the oldest first."""
        self.current: Run | None = None
        """The command that was typed and hasn't ended."""
        self.size = 0
        """Bytes of the log that were fed."""

    def begin(self, run: str, room: int) -> Run:
        """A command is typed (`lines`). The caller has seen that none runs."""
        assert self.current is None
        self.current = self._add(Run(run, room))
        return self.current

    def expect(self, run: str) -> None:
        """An earlier edge has typed this command; its mark may not be in the log yet."""
        if self.current is None and run not in self.runs:
            self.begin(run, 0)

    def feed(self, data: bytes) -> None:
        """The next bytes of the log."""
        self.size += len(data)
        for item in self._parser.feed(data):
            if isinstance(item, Output):
                if self.current is not None and self.current.start is not None:
                    self.current.add(item.data)
            elif item.kind == "r":
                self.ready = True
                self.ready_at = self.ready_at or item.end
            elif item.kind == "b":
                self._began(item)
            else:
                self._ended(item)

    def _began(self, mark: Mark) -> None:
        current = self.current
        if current is None or current.run != mark.run:
            if mark.run in self.runs:
                return  # forged: a command begins once
            current = self.current = self._add(Run(mark.run, 0))  # an earlier edge's
        if current.start is None:
            current.start = mark.end

    def _ended(self, mark: Mark) -> None:
        current = self.current
        if current is None and mark.run not in self.runs:
            current = self._add(Run(mark.run, 0))  # an earlier edge's
        if current is None or current.run != mark.run:
            return
        if current.start is None:
            current.start = mark.start  # it was interrupted before it began
        current.end, current.code = mark.start, mark.code
        self.current = None

    def _add(self, run: Run) -> Run:
        self.runs[run.run] = run
        for old in islice(reversed(self.runs.values()), 2, 3):  # the one before may still be asked for again
            old.forget()
        while len(self.runs) > _KEPT_RUNS:
            del self.runs[next(iter(self.runs))]
        return run

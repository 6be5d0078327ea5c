"""The fake guest's terminal: lines, an echo, ^C, ^D, a size. What its commands need and no more."""

from __future__ import annotations

from dsec.wire.frames import MAX_TERMINAL

_DEFAULT = (80, 24)
_INTERRUPT, _END = 3, 4


class Terminal:
    """State of one terminal; typed bytes go in, the program's input and the echo come out."""

    def __init__(self, size: int) -> None:
        self.cols, self.rows = _DEFAULT
        self.resize(size >> 16, size & 0xFFFF)
        self.echo = bytearray()
        """To be shown."""
        self.ready = bytearray()
        """Whole lines, for the program."""
        self.ended = False
        self.interrupted = False
        self._line = bytearray()

    def resize(self, cols: int, rows: int) -> None:
        """0: as it is."""
        self.cols = min(cols, MAX_TERMINAL) or self.cols
        self.rows = min(rows, MAX_TERMINAL) or self.rows

    @property
    def size(self) -> int:
        return self.cols << 16 | self.rows

    def typed(self, data: bytes) -> None:
        for byte in data:
            if byte == _INTERRUPT:
                self.echo += b"^C"
                self.interrupted = True
            elif byte == _END:
                self.end_of_line_or_input()
            else:
                self._line.append(byte)
                self.echo += b"\r\n" if byte == 10 else bytes([byte])
                if byte == 10:
                    self.end_of_line_or_input()

    def end_of_line_or_input(self) -> None:
        """^D: hands over what was typed; in an empty line it is the end."""
        self.ended |= not self._line
        self.ready += self._line
        self._line.clear()

    def close(self) -> None:
        """No more is typed."""
        if self._line:
            self.end_of_line_or_input()
        self.end_of_line_or_input()

"""How a program in each language is compiled and run. All paths are in /tmp, where the submission is at home."""

from __future__ import annotations

from typing import NamedTuple

from dsec.spec.causes import Cause
from dsec.spec.judging import Language
from dsec.spec.sandbox import ExecStatus

PROGRAM = b"/tmp/program"
"""What a compiler makes."""
NOT_FOUND = 127
"""Exit code of a command that isn't there; with `Cause.EXITED` one that a program chose."""


class Tool(NamedTuple):
    """One language."""

    name: str
    """Of the source file."""
    compile: tuple[str, ...]
    """Makes `PROGRAM`; empty: the source itself is run."""
    run: tuple[str, ...]
    toolchain: str
    """The program that an environment needs for it."""
    check: tuple[str, ...] = ()
    """Of a language without a compiler: refuses a source that can't be compiled, and runs nothing of it."""

    @property
    def source(self) -> bytes:
        """Path of the source file."""
        return f"/tmp/{self.name}".encode()

    @property
    def made(self) -> bytes:
        """Path of what is run: what the compiler makes, or the source."""
        return PROGRAM if self.compile else self.source

    def lacking(self, status: ExecStatus) -> bool:
        """Whether its compiler, or its check, ended like this because there is no toolchain."""
        asked = (self.compile or self.check)[:1] == (_SHELL,) and status.cause is Cause.EXITED
        return status.exit_code == NOT_FOUND and (asked or status.cause is Cause.START_FAILED)


_SHELL = "/bin/sh"


def _with(programs: tuple[str, ...], commands: str) -> tuple[str, ...]:
    """What compiles where several programs are needed. 127 means one thing only: see `Tool.lacking`."""
    there = " && ".join(f"command -v {program} >/dev/null" for program in programs)
    return (_SHELL, "-c", f"{there} || exit {NOT_FOUND}; {commands} || exit 1")


_JAR = "javac -d /tmp/classes /tmp/Main.java && jar --create --file /tmp/program -C /tmp/classes ."
_RUSTC = "rustc -O --edition 2021 -C linker=gcc -o /tmp/program /tmp/main.rs"
_NATIVE = ("/tmp/program",)
TOOLS = {
    Language.PYTHON: Tool("main.py", (), ("python3", "/tmp/main.py"), "python3"),
    Language.BASH: Tool("main.sh", (), ("bash", "/tmp/main.sh"), "bash"),
    Language.C: Tool("main.c", ("gcc", "-O2", "-o", "/tmp/program", "/tmp/main.c", "-lm"), _NATIVE, "gcc"),
    Language.CPP: Tool("main.cpp", ("g++", "-O2", "-o", "/tmp/program", "/tmp/main.cpp"), _NATIVE, "g++"),
    Language.RUST: Tool("main.rs", _with(("rustc", "gcc"), _RUSTC), _NATIVE, "rustc, with gcc as its linker"),
    Language.GO: Tool("main.go", ("go", "build", "-o", "/tmp/program", "/tmp/main.go"), _NATIVE, "go"),
    Language.NODE: Tool("main.js", (), ("node", "/tmp/main.js"), "node", ("node", "--check", "/tmp/main.js")),
    Language.JAVA: Tool("Main.java", _with(("javac", "jar"), _JAR), ("java", "-cp", "/tmp/program", "Main"), "javac"),
}

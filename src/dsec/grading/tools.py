"""How a program in each language is compiled and run. All paths are in /tmp, where the submission is at home."""

from __future__ import annotations

from typing import NamedTuple

from dsec.spec.judging import Language

PROGRAM = b"/tmp/program"
"""What a compiler makes."""


class Tool(NamedTuple):
    """One language."""

    name: str
    """Of the source file."""
    compile: tuple[str, ...]
    """Makes `PROGRAM`; empty: the source itself is run."""
    run: tuple[str, ...]
    toolchain: str
    """The program that an environment needs for it."""

    @property
    def source(self) -> bytes:
        """Path of the source file."""
        return f"/tmp/{self.name}".encode()


_JAR = "javac -d /tmp/classes /tmp/Main.java && jar --create --file /tmp/program -C /tmp/classes ."
_RUSTC = ("rustc", "-O", "--edition", "2021", "-C", "linker=gcc", "-o", "/tmp/program", "/tmp/main.rs")
_NATIVE = ("/tmp/program",)
TOOLS = {
    Language.PYTHON: Tool("main.py", (), ("python3", "/tmp/main.py"), "python3"),
    Language.BASH: Tool("main.sh", (), ("bash", "/tmp/main.sh"), "bash"),
    Language.C: Tool("main.c", ("gcc", "-O2", "-o", "/tmp/program", "/tmp/main.c", "-lm"), _NATIVE, "gcc"),
    Language.CPP: Tool("main.cpp", ("g++", "-O2", "-o", "/tmp/program", "/tmp/main.cpp"), _NATIVE, "g++"),
    Language.RUST: Tool("main.rs", _RUSTC, _NATIVE, "rustc"),
    Language.GO: Tool("main.go", ("go", "build", "-o", "/tmp/program", "/tmp/main.go"), _NATIVE, "go"),
    Language.NODE: Tool("main.js", (), ("node", "/tmp/main.js"), "node"),
    Language.JAVA: Tool("Main.java", ("/bin/sh", "-c", _JAR), ("java", "-cp", "/tmp/program", "Main"), "javac"),
}

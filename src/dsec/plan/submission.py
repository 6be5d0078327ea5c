"""Which of an agent's changes a grader gets. Pure.

What is inside of an allowed path is taken, except files that steer interpreters, test runners or git (they would run in
the grader's own processes) and what would be found in the place of a hidden file. Whoever wants one of those allows it
by its very path.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from enum import Enum

from dsec.errors import InvalidRequest
from dsec.spec.grading import Why

STEERING = frozenset(
    b"""
    __pycache__ .pytest_cache .mypy_cache .hypothesis .tox .nox .venv
    conftest.py sitecustomize.py usercustomize.py sitecustomize usercustomize
    pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml .coveragerc pyvenv.cfg
    .git .gitattributes .gitmodules .gitconfig .hg .svn
    package.json .npmrc .babelrc .swcrc .taprc .nycrc .c8rc .rspec phpunit.xml phpunit.xml.dist go.work
    .env .envrc .bashrc .bash_profile .profile .zshenv .inputrc .pythonrc.py .pdbrc .cargo
    """.split()
)
STEERING_ENDS = (b".pyc", b".pyo", b".pth", b".egg-link", b"._pth")
STEERING_STARTS = (
    *(b"jest.config.", b"vitest.config.", b"vitest.workspace.", b"vite.config.", b"babel.config.", b"ava.config."),
    *(b"playwright.config.", b"cypress.config.", b"karma.conf.", b".mocharc.", b".babelrc.", b".nycrc.", b".c8rc."),
)
"""JavaScript's runners and what they transform sources with: each name has several endings."""
NEVER_INHERITED = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONPYCACHEPREFIX", "PYTEST_ADDOPTS"),
    *("PYTEST_PLUGINS", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "BASH_ENV", "ENV", "NODE_OPTIONS", "NODE_PATH"),
    *("PERL5LIB", "PERL5OPT", "RUBYLIB", "RUBYOPT", "JAVA_TOOL_OPTIONS", "GIT_DIR", "GIT_CONFIG_GLOBAL", "GIT_SSH"),
)
"""Of the agent's sandbox's variables: a grader that wants one says so."""


class Place(Enum):
    """Where a path lies, seen from the allowed ones."""

    INSIDE = "inside"
    ABOVE = "above"
    OUTSIDE = "outside"


def normal_path(path: str) -> bytes:
    """An absolute path without `.`, `..` and double slashes. Raises `InvalidRequest`."""
    if any(part in (".", "..") for part in path.split("/")):
        raise InvalidRequest(f"{path[:200]!r}: a path without `.` and `..` is wanted", field="paths")
    normal = posixpath.normpath("/" + path.strip("/"))
    if normal == "/":
        raise InvalidRequest("`/` would take everything, interpreters too: name what counts", field="paths")
    return normal.encode(errors="surrogateescape")


class Allowed:
    """The paths that count, and the hidden files that lie among them."""

    def __init__(self, paths: Iterable[str], hidden: Iterable[str] = ()) -> None:
        """Raises `InvalidRequest`."""
        self.paths = tuple(sorted({normal_path(path) for path in paths}))
        self._exact = frozenset(self.paths)
        self._stems = {(place, _stem(name)) for place, _, name in (normal_path(p).rpartition(b"/") for p in hidden)}

    def place(self, path: bytes) -> Place:
        if any(path == each or path.startswith(each + b"/") for each in self.paths):
            return Place.INSIDE
        return Place.ABOVE if self.below(path) else Place.OUTSIDE

    def below(self, path: bytes) -> list[bytes]:
        """The allowed paths under a directory."""
        return [each for each in self.paths if each.startswith(path + b"/")]

    def refusal(self, path: bytes) -> Why | None:
        """Why an entry inside is not taken, by its name."""
        if path in self._exact:
            return None
        place, _, name = path.rpartition(b"/")
        if steers(name):
            return Why.STEERS
        return Why.SHADOWS if (place, _stem(name)) in self._stems else None


def steers(name: bytes) -> bool:
    """Whether a file of this name is read by a tool that isn't told to."""
    lower = name.lower()
    return lower in STEERING or lower.endswith(STEERING_ENDS) or lower.startswith(STEERING_STARTS)


def _stem(name: bytes) -> bytes:
    """`test_a` of `test_a.py`, `test_a.cpython-311-x86_64-linux-gnu.so` and the directory `test_a`: what an import of
    one could find in the place of another."""
    return name.partition(b".")[0] or name

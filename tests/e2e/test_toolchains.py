"""When a toolchain is missing, and when a compiler refuses: by compilers that are scripts, with ends of their own."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from dsec import Client
from dsec.errors import Unsupported
from dsec.spec.judging import Word
from server_kit import serving
from trees import link_store

pytestmark = pytest.mark.root
CASES = [("1", "fine")]
SCRIPTS = {
    "rustc": "#!/bin/sh\necho refused >&2\nexit 127\n",
    "go": "#!/nonexistent\n",
    "javac": "#!/bin/sh\necho refused >&2\nexit 127\n",
    "node": '#!/bin/sh\nif [ "$1" = --check ]; then grep -q broken "$2" || exit 0; echo SyntaxError >&2; exit 1; fi\n'
    'grep -q early "$1" && exit 127\necho fine\n',
}
MORE = dict.fromkeys(("jar", "gcc"), "#!/bin/sh\n")
"""What two compilers need beside them."""


def layer(scripts: dict[str, str]) -> BytesIO:
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, text in scripts.items():
            info = tarfile.TarInfo(f"usr/local/bin/{name}")
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, BytesIO(text.encode()))
    archive.seek(0)
    return archive


@pytest.fixture(scope="module")
def client(debian_module_state: Path, debian_store: Path) -> Iterator[Client]:
    (debian_module_state / "store").unlink()
    link_store(debian_store, debian_module_state / "store")  # its own names
    with serving(debian_module_state) as server:
        endpoint = server.endpoint()
        with Client(endpoint.url, endpoint.api_key) as client:
            for name, scripts in (("tools", SCRIPTS), ("more", MORE)):
                archive = debian_module_state.parent / f"{name}.tar"
                archive.write_bytes(layer(scripts).getvalue())
                client.catalog.build(archive, f"{name}@1")
            client.catalog.create_environment("tools", ["tools@1", "env:debian"])
            client.catalog.create_environment("whole", ["more@1", "tools@1", "env:debian"])
            yield client


@pytest.mark.parametrize(("language", "environment"), [("rust", "whole"), ("java", "whole")])
def test_a_compiler_that_ends_with_127_refuses(client: Client, language: str, environment: str) -> None:
    for compiled in (True, False):
        judged = client.judge("x", CASES, language=language, environment=environment)
        assert (judged.verdict, judged.compiled) == (Word.COMPILE_ERROR, compiled)
        assert judged.cases[0].stderr == "refused\n"
    result = client.function("x", language=language, environment=environment).run()
    assert (result.ok, result.infra, result.error and result.error.type) == (False, False, "CompileError")


@pytest.mark.parametrize(
    ("language", "environment"),
    [
        ("go", "tools"),
        *((language, where) for language in ("java", "rust") for where in ("tools", "debian")),
        ("node", "debian"),
    ],
)
def test_what_is_not_there_is_told(client: Client, language: str, environment: str) -> None:
    """Also where a part of it is there only, or its own interpreter isn't."""
    with pytest.raises(Unsupported, match=f"the environment {environment} has no"):
        client.judge("x", CASES, language=language, environment=environment)
    with pytest.raises(Unsupported, match=f"the environment {environment} has no"):
        client.function("x", language=language, environment=environment).run()


def test_a_source_that_is_only_checked(client: Client) -> None:
    """Node compiles nothing: what it refuses to read is a compile error of the judge's all the same, told once."""

    def judged(source: str) -> tuple[Word, bool]:
        found = client.judge(source, CASES, language="node", environment="tools")
        return found.verdict, found.compiled

    assert [judged("broken") for _ in range(2)] == [(Word.COMPILE_ERROR, True), (Word.COMPILE_ERROR, False)]
    assert [judged("whole") for _ in range(2)] == [(Word.ACCEPTED, True), (Word.ACCEPTED, False)]
    assert judged("ends early")[0] is Word.RUNTIME_ERROR


@pytest.mark.parametrize(("source", "language"), [("exit 127", "bash"), ("import sys; sys.exit(127)", "python")])
def test_a_program_that_ends_with_127(client: Client, source: str, language: str) -> None:
    result = client.function(source, language=language).run()
    assert (result.ok, result.exit_code, result.infra) == (False, 127, False)
    assert client.judge(source, CASES, language=language).verdict is Word.RUNTIME_ERROR

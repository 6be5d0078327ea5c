"""The judge with compilers, over the problem set in `examples/problems`, whose verdicts are known: all exact. And what
its client and its command line say."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient, Case, Client, JudgeSpec, Problem
from dsec.errors import Unsupported
from dsec.spec.judging import CaseVerdict, JudgeVerdict, Language, Word
from judge_kit import NEEDS, compiling
from server_kit import Server

pytestmark = [pytest.mark.root, NEEDS]
PROBLEMS = sorted((Path(__file__).parents[2] / "examples" / "problems").iterdir())
ADD = '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }\n'
SUM = [("1 2", "3")] * 3


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with compiling(debian_store, tmp_path_factory.mktemp("compiled")) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as client:
        yield client


def test_the_set_has_every_verdict_and_language() -> None:
    problems = [Problem.read(path) for path in PROBLEMS]
    known = [each for problem in problems for each in problem.submissions]
    assert len(problems) >= 10
    assert {each.expected for each in known} == set(Word) - {Word.PLATFORM_ERROR}
    assert {each.path.suffix for each in known} == {".py", ".sh", ".c", ".cpp"}


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.name)
def test_known_verdicts_are_exact(client: Client, path: Path) -> None:
    problem = Problem.read(path)
    specs = [problem.spec(each.path, environment="cc") for each in problem.submissions]
    found = {each.index: each.unwrap() for each in client.judge_many(specs, at_once=4)}
    for index, (known, judged) in enumerate(zip(problem.submissions, specs, strict=True)):
        got = found[index]
        assert got.verdict is known.expected, (known, judged.language, got)
        assert not got.infra
        if known.expected is Word.ACCEPTED:
            assert got.passed == got.total == len(got.cases) == len(problem.cases)


def test_programs_are_compiled_once(client: Client) -> None:
    def judged(source: str) -> tuple[Word, int, bool]:
        found = client.judge(source, SUM, language="c", environment="cc")
        return found.verdict, found.passed, found.compiled

    assert judged(ADD) == (Word.ACCEPTED, 3, True)
    assert judged(ADD) == (Word.ACCEPTED, 3, False)
    assert judged("int main(void) {") == (Word.COMPILE_ERROR, 0, True)
    assert judged("int main(void) {") == (Word.COMPILE_ERROR, 0, False)
    broken = "int main(void) { int *p = 0; return *(volatile int *)p; }"
    assert judged(broken)[:2] == (Word.RUNTIME_ERROR, 0)
    assert judged("int main(void) { return 0; }")[:2] == (Word.WRONG_ANSWER, 0)


def test_nobody_chooses_what_another_gets_compiled(client: Client) -> None:
    """Programs are shared by content, across projects: an environment of the same layers whose variables make its
    compiler fail leaves no verdict on others."""
    bent = {"DEPENDENCIES_OUTPUT": "/nonexistent/file"}
    client.catalog.create_environment("cc-bent", ["cc@1", "env:debian"], env=bent)
    source = f"// another's\n{ADD}"
    for environment, word in (("cc-bent", Word.COMPILE_ERROR), ("cc", Word.ACCEPTED), ("cc-bent", Word.COMPILE_ERROR)):
        assert client.judge(source, SUM, language="c", environment=environment).verdict is word


def test_what_many_ask_for_at_once_is_compiled_once(client: Client) -> None:
    spec = JudgeSpec(environment="cc", language=Language.CPP, source=f"// at once\n{ADD}", cases=[Case(expected="x")])
    found = [each.unwrap() for each in client.judge_many([spec] * 6, at_once=6)]
    assert [each.verdict for each in found] == [Word.WRONG_ANSWER] * 6
    assert sum(each.compiled for each in found) == 1


def test_a_compiler_that_takes_too_long_is_a_compile_error_and_not_remembered(client: Client) -> None:
    slow = '#include "/dev/stdin"\n#include </dev/zero>\nint main(void) {}\n'
    for _ in range(2):
        limits = {"compile_s": 1.0}
        found = client.judge(slow, SUM, language="c", environment="cc", limits=limits)
        assert (found.verdict, found.compiled) == (Word.COMPILE_ERROR, True)
        assert found.cases[0].index == -1


def test_verdicts_come_as_they_are_and_each_once(client: Client) -> None:
    source = "import time\nn = float(input())\ntime.sleep(n)\nprint(n)"
    cases = [(f"{n}", f"{n}") for n in (2.5, 0.0, 0.0, 0.0)]
    seen: list[CaseVerdict] = []
    judged = client.judge(source, cases, on_case=seen.append)
    assert judged.verdict is Word.ACCEPTED
    assert sorted(each.index for each in seen) == [each.index for each in judged.cases] == [0, 1, 2, 3]
    assert seen[-1].index == 0
    *told, last = client.judge_stream(source, cases[1:])
    assert all(isinstance(each, CaseVerdict) and each.verdict is Word.ACCEPTED for each in told)
    assert isinstance(last, JudgeVerdict)
    assert last.passed == 3


async def test_who_goes_away_leaves_no_work_behind(server: Server) -> None:
    endpoint = server.endpoint()
    async with AsyncClient(endpoint.url, endpoint.api_key) as client:
        stream = client.judge_stream(
            "import time\nif input() == '0': print(0)\nelse: time.sleep(300)",
            [("0", "0"), *[("1", "1")] * 50],
            limits={"wall_s": 300},
        )
        async for each in stream:
            assert isinstance(each, CaseVerdict)
            break
        await stream.aclose()
        again = await client.judge(
            "print(3)", SUM, request_timeout_s=100
        )  # sleepers that went on would hold all places
        assert again.verdict is Word.ACCEPTED


def test_long_work_of_one_leaves_room_for_others(server: Server, client: Client) -> None:
    """One fills every place with sleepers; the short cases of another don't wait until they have all ended."""
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as greedy:
        sleeping = [("", "")] * 400
        limits = {"wall_s": 1.0}
        stop = threading.Event()

        def hog() -> None:
            for _ in greedy.judge_stream("import time\ntime.sleep(60)", sleeping, limits=limits):
                if stop.is_set():
                    return

        thread = threading.Thread(target=hog)
        thread.start()
        try:
            time.sleep(1.0)
            began = time.monotonic()
            assert client.judge("print(3)", SUM).verdict is Word.ACCEPTED
            assert time.monotonic() - began < 60  # of the 100 s that the others take at least
        finally:
            stop.set()
            thread.join()


def test_a_missing_toolchain_is_said(client: Client) -> None:
    for language in ("c", "cpp", "rust", "go", "node", "java"):
        with pytest.raises(Unsupported, match="the environment debian has no"):
            client.judge("whatever", SUM, language=language)


def run(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", "judge", *arguments],
        env=server.environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_line(server: Server, tmp_path: Path) -> None:
    problem = PROBLEMS[[path.name for path in PROBLEMS].index("sum")]
    good = problem / "submissions" / "accepted" / "plain.sh"
    done = run(server, str(problem), str(good))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "accepted"
    wrong = tmp_path / "wrong.py"
    wrong.write_text("print(4)")
    done = run(server, str(problem), str(wrong), "--stop-early")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "wrong_answer")
    done = run(server, str(problem), "--environment", "cc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(each["as_known"] for each in json.loads(done.stdout))
    for arguments in ((str(tmp_path),), (str(problem), str(problem / "problem.toml"))):
        done = run(server, *arguments)
        assert (done.returncode, done.stderr.startswith("error: ")) == (2, True), done.stderr

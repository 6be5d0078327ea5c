"""The judge over a small problem set whose verdicts are known, all exact; and submissions that misbehave."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_kit import Server, serving

pytestmark = pytest.mark.root
SUM = [{"stdin": "1 2\n", "expected": "3\n"}, {"stdin": "5 -7\n", "expected": "-2\n"}]
ROOT = [{"stdin": "2\n", "expected": "1.41421356\n"}, {"stdin": "9\n", "expected": "3.0\n"}]
RIGHT = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as made:
        yield made


def judged(server: Server, source: str, cases: list[dict[str, str]], **fields: Any) -> list[dict[str, Any]]:
    """The answer's lines."""
    spec = {"environment": "debian", "language": "python", "source": source, "cases": cases, **fields}
    endpoint = server.endpoint()
    request = urllib.request.Request(
        f"{endpoint.url}/v1/judge", json.dumps(spec).encode(), {"Authorization": f"Bearer {endpoint.api_key}"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [json.loads(line) for line in answer]


def words(lines: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The verdict, and those of the cases in their order."""
    cases = sorted((line["case"] for line in lines if "case" in line), key=lambda case: case["index"])
    return lines[-1]["result"]["verdict"], [case["verdict"] for case in cases]


COUNT = "import sys\nprint(len(sys.stdin.read()))"
FAST = {"limits": {"cpu_s": 1, "wall_s": 3}}
PROBLEMS: list[tuple[str, str, list[dict[str, str]], dict[str, Any], str]] = [
    ("right", RIGHT, SUM, {}, "accepted"),
    ("right, in bash", "read a b; echo $((a + b))", SUM, {"language": "bash"}, "accepted"),
    ("half right", "print(3)", SUM, {}, "wrong_answer"),
    ("white space", "a, b = map(int, input().split())\nprint('', a + b, '')", SUM, {}, "accepted"),
    ("white space, exactly", "print('', 3)", SUM[:1], {"checker": "exact"}, "wrong_answer"),
    ("exactly", "print(3)", SUM[:1], {"checker": "exact"}, "accepted"),
    ("roots", "print(float(input()) ** 0.5)", ROOT, {"checker": "floats"}, "accepted"),
    ("roots, coarse", "print(round(float(input()) ** 0.5, 2))", ROOT, {"checker": "floats"}, "wrong_answer"),
    ("not a number", "print('nan')", ROOT, {"checker": "floats"}, "wrong_answer"),
    ("nothing", "", SUM, {}, "wrong_answer"),
    ("burns", "while True: pass", SUM[:1], FAST, "time_limit"),
    ("sleeps", "import time\ntime.sleep(60)", SUM[:1], {"limits": {"wall_s": 1}}, "time_limit"),
    ("closes its output and hangs", "import os\nos.closerange(0, 9)\nwhile True: pass", SUM[:1], FAST, "time_limit"),
    ("eats", "x = [0]\nwhile True: x += x", SUM[:1], {"limits": {"memory_bytes": 64 << 20}}, "memory_limit"),
    ("floods", "while True: print('x' * 10000)", SUM[:1], {"limits": {"output_bytes": 1 << 20}}, "output_limit"),
    ("raises", "raise ValueError('no')", SUM[:1], {}, "runtime_error"),
    ("right, and fails", RIGHT + "exit(3)", SUM, {}, "runtime_error"),
    ("crashes", "import os\nos.abort()", SUM[:1], {}, "runtime_error"),
    ("no Python", "def (", SUM[:1], {}, "runtime_error"),
    ("nulls", "print('3\\0')", SUM[:1], {}, "wrong_answer"),
    ("forks", "import os, time\nwhile os.fork(): pass\ntime.sleep(60)", SUM[:1], {}, "runtime_error"),
    ("not UTF-8", "import sys\nsys.stdout.buffer.write(b'\\xff3')", SUM[:1], {}, "wrong_answer"),
    ("a null in the input", COUNT, [{"stdin": "\0\0", "expected": "2"}], {}, "accepted"),
    ("no input, no output", "", [{}], {"checker": "exact"}, "accepted"),
    ("16 MB in", COUNT, [{"stdin": "x" * 16_000_000, "expected": "16000000"}], {}, "accepted"),
    ("16 MB in, unread", "print(3)", [{"stdin": "x" * 16_000_000, "expected": "3"}], {}, "accepted"),
    ("closes its output", "import os\nos.close(1)", SUM[:1], {}, "wrong_answer"),
    ("only stderr", "import sys\nsys.stderr.write('3')", SUM[:1], {}, "wrong_answer"),
    ("looks for the answers", "import glob\nprint(*glob.glob('/tmp/*'))", SUM[:1], {}, "wrong_answer"),
]


@pytest.mark.parametrize(
    ("source", "cases", "fields", "verdict"), [each[1:] for each in PROBLEMS], ids=[each[0] for each in PROBLEMS]
)
def test_known_verdicts(
    server: Server, source: str, cases: list[dict[str, str]], fields: dict[str, Any], verdict: str
) -> None:
    lines = judged(server, source, cases, **fields)
    assert words(lines)[0] == verdict, lines
    assert not lines[-1]["result"].get("infra")


def test_a_null_in_the_source_is_the_languages_to_judge(server: Server) -> None:
    lines = judged(server, "print(3)\0", SUM[:1])  # Python 3.11 stops there, 3.12 refuses it
    assert words(lines)[0] in ("accepted", "runtime_error")


def test_a_case_says_what_it_cost(server: Server) -> None:
    lines = judged(server, "x = bytearray(40 << 20)\nfor i in range(3 * 10**6): pass\nprint(3)", SUM)
    assert words(lines) == ("wrong_answer", ["accepted", "wrong_answer"])
    case = lines[0]["case"]
    assert case["cpu_s"] > 0.02
    assert case["memory_bytes"] > 40 << 20
    assert lines[-1]["result"] == {"verdict": "wrong_answer", "passed": 1, "cases": 2}


def test_the_first_failure_ends_it(server: Server) -> None:
    lines = judged(server, "print(4)", SUM * 50, stop_early=True)
    assert len(lines) < 30
    assert words(lines)[0] == "wrong_answer"


CHECKER = """\
import sys
given, output, expected = (open(path).read().split() for path in sys.argv[1:])
sys.exit(42 if sorted(output) == sorted(expected) else 43)
"""


def test_a_checker_of_ones_own(server: Server) -> None:
    cases = [{"stdin": "", "expected": "1 2 3"}]
    fields = {"checker": "program", "checker_source": CHECKER}
    assert words(judged(server, "print(3, 1, 2)", cases, **fields))[0] == "accepted"
    assert words(judged(server, "print(3, 1)", cases, **fields))[0] == "wrong_answer"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ValueError('mine')", "mine"),
        ("def (", "SyntaxError"),
        ("pass", "exit code 0"),
        ("import os; os.abort()", "SIGABRT"),
        ("while True: print('x' * 1000)", "output_bytes"),
        ("x = [0]\nwhile True: x += x", "memory"),
    ],
)
def test_a_checker_that_fails_is_no_verdict(server: Server, source: str, says: str) -> None:
    crashed = judged(server, "print(1)", [{"expected": "1"}], checker="program", checker_source=source)
    assert words(crashed)[0] == "platform_error"
    assert crashed[-1]["result"]["infra"]
    assert says in crashed[0]["case"]["message"]


LEAK = """\
import glob, os, time
seen = os.path.exists('/tmp/seen') or os.path.exists('/dev/shm/seen')
seen = seen or any(b'leftover' in open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/cmdline'))
print('leak' if seen else 'clean', flush=True)
for place in ('/tmp', '/dev/shm'):
    open(place + '/seen', 'w').close()
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 9)
    os.execvp('sh', ['sh', '-c', 'sleep 60', 'leftover'])
"""


def test_nothing_leaks_from_one_case_to_the_next(server: Server) -> None:
    lines = judged(server, LEAK, [{"expected": "clean"}] * 8)
    assert words(lines) == ("accepted", ["accepted"] * 8)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"language": "c"}, 422, "unsupported"),
        ({"language": "cobol"}, 400, "invalid_request"),
        ({"environment": "nowhere"}, 404, "environment_not_found"),
        ({"cases": []}, 400, "invalid_request"),
        ({"checker": "program"}, 400, "invalid_request"),
        ({"source": "\ud800"}, 400, "invalid_request"),
        ({"source": "x" * (4 << 20) + "x"}, 400, "invalid_request"),
        ({"cases": [{}] * 10_001}, 400, "invalid_request"),
        ({"limits": {"cpu_s": 0}}, 400, "invalid_request"),
    ],
)
def test_bad_requests(server: Server, fields: dict[str, Any], status: int, code: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        judged(server, **{"source": "", "cases": SUM, **fields})
    assert refused.value.code == status
    assert json.load(refused.value)["code"] == code

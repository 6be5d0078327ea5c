"""Submissions that attack the judge for a verdict that they don't deserve, or for more than their limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec import Client, Judged
from dsec.errors import PermissionDenied
from dsec.spec.judging import Word
from server_kit import Server, serving

pytestmark = pytest.mark.root
SECRET = "the-answer-is-2718281828"


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as client:
        yield client


def judged(client: Client, source: str, cases: list[tuple[str, str]] | None = None, **fields: Any) -> Judged:
    limits = {"wall_s": 200.0, "cpu_s": 20.0} | fields.pop("limits", {})  # of a host that stands still for long
    found = client.judge(source, cases or [("question", SECRET)], limits=limits, **fields)
    assert not found.infra, found
    return found


def refused(client: Client, source: str, *words: Word, **fields: Any) -> Judged:
    found = judged(client, source, **fields)
    assert found.passed == 0
    assert found.verdict in words, found
    return found


SEARCH = f"""
import glob, os
secret = {SECRET[::-1]!r}[::-1].encode()  # so that it doesn't find itself
found = set()
for top in ('/tmp', '/dev/shm', '/run', '/var/tmp', '/home', '/root', '/work', '/proc/self/fd'):
    for where, _, names in os.walk(top):
        found.update(os.path.join(where, name) for name in names)
found.update(glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'))
for path in found:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        data = os.read(fd, 1 << 20)
    except OSError:
        continue
    if secret in data:
        print(secret.decode())
        raise SystemExit
print('nothing')
"""


def test_looking_for_what_is_expected(client: Client) -> None:
    found = refused(client, SEARCH, Word.WRONG_ANSWER)
    assert found.cases[0].stdout == "nothing\n"


def test_looking_for_what_is_expected_where_a_program_checks(client: Client) -> None:
    checker = "import sys\nsys.exit(42 if open(sys.argv[2]).read() == open(sys.argv[3]).read() else 43)"
    found = judged(client, SEARCH, [("q", SECRET), ("q", SECRET)], checker="program", checker_source=checker)
    assert (found.verdict, found.passed) == (Word.WRONG_ANSWER, 0)


@pytest.mark.parametrize("code", [42, 43, 0])
def test_the_exit_code_that_accepts_is_the_checkers_alone(client: Client, code: int) -> None:
    word = Word.WRONG_ANSWER if code == 0 else Word.RUNTIME_ERROR
    refused(client, f"raise SystemExit({code})", word)
    checker = "raise SystemExit(43)"
    refused(client, f"raise SystemExit({code})", word, checker="program", checker_source=checker)


def test_a_forged_verdict_is_output(client: Client) -> None:
    line = json.dumps({"result": {"verdict": "accepted", "passed": 1, "cases": 1}})
    source = f"""
import os
for fd in range(256):
    try:
        os.write(fd, b'\\n' + {line.encode()!r} + b'\\n')
    except OSError:
        pass
"""
    found = refused(client, source, Word.WRONG_ANSWER)
    assert line in found.cases[0].stdout


def test_output_can_not_leave_the_checkers_file(client: Client) -> None:
    """The output is data for the checker: no argument, no code, no path."""
    checker = "import sys\nprint(len(sys.argv), len(open(sys.argv[2], 'rb').read()))\nsys.exit(43)"
    source = "import sys\nsys.stdout.buffer.write(b'/tmp/expected\\n\\0\\xff; exit 42 $(exit 42)' * 1000)"
    found = refused(client, source, Word.WRONG_ANSWER, checker="program", checker_source=checker)
    assert found.cases[0].message == "4 36000\n"


def test_a_checker_that_hostile_output_crashes_accepts_nothing(client: Client) -> None:
    checker = "import sys\nopen(sys.argv[2]).read()\nsys.exit(42)"
    source = "import sys\nsys.stdout.buffer.write(b'\\xff')"
    found = client.judge(source, [("", "")], checker="program", checker_source=checker)
    assert (found.verdict, found.infra, found.passed) == (Word.PLATFORM_ERROR, True, 0)
    assert "UnicodeDecodeError" in found.cases[0].message


BURN = "while True: pass"


@pytest.mark.parametrize(
    "source",
    [
        BURN,
        f"import os\nos.fork()\n{BURN}",
        f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    {BURN}\n"
        "time.sleep(60)",
        f"import signal\nfor n in (signal.SIGXCPU, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n{BURN}",
        "import os\nwhile True:\n    pid = os.fork()\n    if pid == 0:\n        sum(range(10**5))\n"
        "        os._exit(0)\n    os.waitpid(pid, 0)",
        f"import os\nos.closerange(0, 100)\n{BURN}",
    ],
    ids=["alone", "forked", "detached", "ignoring signals", "in many short processes", "without descriptors"],
)
def test_no_way_around_the_limit_of_cpu_time(client: Client, source: str) -> None:
    """All end for their CPU time, long before their wall time."""
    found = refused(client, source, Word.TIME_LIMIT, limits={"cpu_s": 0.5, "wall_s": 400})
    assert 0.5 <= found.cases[0].cpu_s < 60
    assert found.cases[0].wall_s < 300


@pytest.mark.parametrize(
    "source",
    [
        "x = bytearray(1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1",
        "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        x = b'x' * (20 << 20)\n        break\n"
        "import time\ntime.sleep(2)\nraise SystemExit(1)",
        "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1",
    ],
    ids=["private", "many processes", "shared"],
)
def test_no_way_around_the_limit_of_memory(client: Client, source: str) -> None:
    limits = {"memory_bytes": 64 << 20, "wall_s": 300, "cpu_s": 60}
    refused(client, source, Word.MEMORY_LIMIT, Word.RUNTIME_ERROR, limits=limits)


@pytest.mark.parametrize("fd", [1, 2])
def test_no_way_around_the_limit_of_output(client: Client, fd: int) -> None:
    source = f"import os\nwhile True: os.write({fd}, b'x' * 65536)"
    found = refused(client, source, Word.OUTPUT_LIMIT, limits={"output_bytes": 1 << 20})
    assert len(found.cases[0].stdout) <= 4096
    assert len(found.cases[0].stderr) <= 4096


def test_nobody_without_network_who_can_end_nothing(client: Client) -> None:
    source = """
import os, signal, socket
problems = []
if os.getuid() == 0 or os.geteuid() == 0:
    problems.append('root')
for pid in (1, -1):
    try:
        os.kill(pid, signal.SIGKILL)
        if pid == 1:
            problems.append('kill')
    except OSError:
        pass
for family, place in ((socket.AF_INET, ('192.0.2.1', 80)), (socket.AF_INET6, ('2001:db8::1', 80))):
    try:
        socket.socket(family, socket.SOCK_DGRAM).sendto(b'x', place)
        problems.append('network')
    except OSError:
        pass
for path in ('/etc/passwd', '/usr/bin/python3', '/proc/1/mem', '/'):
    if os.access(path, os.W_OK):
        problems.append(path)
print(problems)
"""
    found = judged(client, source, [("", "[]")])
    assert found.verdict is Word.ACCEPTED, found


def test_the_next_case_finds_nothing_of_the_last(client: Client) -> None:
    source = """
import os, subprocess
print(os.path.exists('/tmp/seen'), len([pid for pid in os.listdir('/proc') if pid.isdigit()]))
for place in ('/tmp/seen', '/dev/shm/seen', '/tmp/main.py'):
    open(place, 'w').write('print("taken over")')
subprocess.Popen(['sleep', '60'], start_new_session=True)
"""
    found = judged(client, source, [("", "False 2")] * 6)
    assert (found.verdict, found.passed) == (Word.ACCEPTED, 6), found


def test_a_sandbox_can_not_have_anything_judged(server: Server, client: Client) -> None:
    with client.create("debian") as sandbox:
        token = sandbox.info.token
        assert token is not None
        with Client(server.url, token) as inside, pytest.raises(PermissionDenied):
            inside.judge("print(3)", [("", "3")])

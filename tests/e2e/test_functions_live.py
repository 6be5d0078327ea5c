"""Function calls on a real server: values, programs, batches, limits, bad input."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calls_kit import call, client_of
from dsec import Client, FunctionCall, FunctionFailed, FunctionLimits
from dsec.errors import EnvironmentNotFound, InvalidRequest, Unsupported
from dsec.spec.causes import Cause
from server_kit import Server, serving, until

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with client_of(server) as client:
        yield client


# --- values ---


def test_values_come_back_as_they_are(client: Client) -> None:
    echo = client.function("def f(*args, **kwargs):\n    return [list(args), kwargs]", "f")
    values = [
        None,
        True,
        -1,
        1 << 63,
        -(1 << 63),
        1.5,
        "ü\n",
        b"\x00\xff",
        [],
        [[1], {"a": {}}],
        {"k": b"", 3: "x"},
        "x" * 70000,
    ]
    assert echo.remote(*values, key=[1]) == [values, {"key": [1]}]
    (found,) = echo.remote(float("nan"))[0]
    assert math.isnan(found)


def test_a_function_by_its_source(client: Client) -> None:
    def area(width: float, height: float = 2.0) -> float:
        """Of a rectangle."""
        print("computing")  # noqa: T201 (it is what the call prints)
        return width * height

    function = client.function(area)
    assert function.remote(3.0) == 6.0
    assert function.run(FunctionCall(args=[1.0], kwargs={"height": 5.0})).stdout == b"computing\n"
    with pytest.raises(InvalidRequest, match="def"):
        client.function(lambda: 1)


def test_a_function_by_its_name_and_a_coroutine(client: Client) -> None:
    assert client.function("math:hypot", imports=["math"]).remote(3, 4) == 5.0
    assert client.function("os.path:join").remote("a", "b") == "a/b"
    assert client.function("async def f():\n    return 7", "f").remote() == 7


def test_an_exception_with_its_traceback(client: Client) -> None:
    source = "def g(x):\n    return 1 / x\n\ndef f(x):\n    return g(x)\n"
    result = call(client, source, 0)
    assert (result.ok, result.error and result.error.type) == (False, "ZeroDivisionError")
    assert result.error is not None
    assert "return 1 / x" in result.error.traceback
    assert "parent.py" not in result.error.traceback
    with pytest.raises(FunctionFailed, match="ZeroDivisionError"):
        client.function(source, "f").remote(0)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("return object()", "ResultRefused"),
        ("x = []; x.append(x); return x", "ResultRefused"),
        ("return {(1, 2): 3}", "ResultRefused"),
        ("return ['\\ud800']", "ResultRefused"),
        ("return 1 << 64", "ResultRefused"),
        ("return b'x' * (1 << 30)", "ResultRefused"),
        ("return 'x' * (20 << 20)", "ResultRefused"),
        ("return [[0] * 1000] * 100000", "ResultRefused"),
        ("class E(Exception):\n        def __str__(self): raise E\n    raise E", "f.<locals>.E"),
        ("raise SystemExit(3)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def g(): return g()\n    return g()", "RecursionError"),
        ("import os; os._exit(3)", "NoResult"),
        ("import os; os.kill(os.getpid(), 11)", "NoResult"),
        ("import ctypes; ctypes.string_at(0)", "NoResult"),
        ("import os; os.closerange(0, 100)", "NoResult"),
        ("import sys; sys.stdout.close(); sys.stdout = None; return 1", ""),
        ("import sys\n    class S:\n        def flush(self): raise SystemExit\n    sys.stdout = S(); return 1", ""),
        ("return missing", "NameError"),
    ],
)
def test_what_goes_wrong_is_the_calls_own(client: Client, body: str, kind: str) -> None:
    limits = FunctionLimits(memory_bytes=2048 * MIB)
    result = call(client, f"def f():\n    {body}\n", limits=limits)
    assert not result.infra
    assert (result.error.type if result.error else "") == kind, result
    assert call(client, "def f(): return 1").value == 1


def test_syntax_errors_and_nulls(client: Client) -> None:
    assert call(client, "def f(:\n").error is not None
    result = client.function("print('x\n").run()
    assert (result.ok, result.exit_code) == (False, 1)
    assert b"SyntaxError" in result.stderr
    for source in ("def f(): return '\0'", ""):
        with pytest.raises(InvalidRequest):
            call(client, source)
    assert call(client, "def f(x): return x", "\0").value == "\0"


def test_files_that_have_no_place(client: Client) -> None:
    """What can be seen before is refused; what the call's own place has no room for is told by the call."""
    for files in ({"a": b"", "a/b": b""}, {"x" * 256: b""}, {"d/" + "x" * 256 + "/y": b""}):
        for language in ("python", "bash"):
            with pytest.raises(InvalidRequest, match="the file"):
                client.function("x", language=language, files=files).run()
    with pytest.raises(InvalidRequest, match="lies below"):
        client.function("def f(): pass", "f", files={"a": b""}).run(files={"a/b": b""})
    with pytest.raises(InvalidRequest, match="lies below"):
        client.function("x", language="bash", files={"main.sh/x": b""}).run()
    function = client.function("def f(): pass", "f", files={".shm": b""})  # a directory of the cell's
    result = function.run()
    assert (result.ok, result.infra, result.error and result.error.type) == (False, False, "IsADirectoryError")
    result = client.function("print(1)", files={".shm": b""}).run()
    assert (result.ok, result.exit_code, b".shm" in result.stderr) == (False, 126, True)


def test_too_much_output_is_told_however_fast(client: Client) -> None:
    limits = FunctionLimits(output_bytes=10)
    for wait in (0.0, 0.05):
        source = f"import time\ndef f():\n    print('x' * 11); time.sleep({wait}); return 1"
        result = call(client, source, limits=limits)
        assert (result.ok, result.cause, result.truncated) == (False, Cause.OUTPUT_LIMIT, True)
        assert result.stdout == b"x" * 10


def test_bad_requests(client: Client) -> None:
    with pytest.raises(EnvironmentNotFound):
        call(client, "def f(): pass", environment="nowhere")
    with pytest.raises(Unsupported, match="no_such_module"):
        client.function("def f(): pass", "f", imports=["no_such_module"]).remote()
    for language, toolchain in (("c", "gcc"), ("rust", "rustc"), ("go", "go"), ("java", "javac"), ("node", "node")):
        with pytest.raises(Unsupported, match=f"no {toolchain}"):
            client.function("x", language=language).run()
    for fields in (
        {"language": "bash", "name": "f"},
        {"files": {"../x": b""}},
        {"take": ["/etc/passwd"]},
        {"env": {"A=B": "x"}},
    ):
        with pytest.raises(InvalidRequest):
            client.function("x", **fields).run()
    with pytest.raises(InvalidRequest):
        client.function("f = 1", "f").remote(object())


# --- programs, files ---


def test_programs(client: Client) -> None:
    program = client.function(
        "import sys\nprint(sys.stdin.read()[::-1], __name__)\nprint('e', file=sys.stderr)\nsys.exit(3)"
    )
    result = program.run(stdin=b"abc")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == (b"cba __main__\n", b"e\n", 3, False)
    result = client.function('read x; echo "$x $V"; pwd; cat in; exit 4', language="bash", env={"V": "7"}).run(
        stdin=b"line\n", files={"in": b"file"}
    )
    assert (result.stdout, result.exit_code) == (b"line 7\n/tmp\nfile", 4)


@pytest.mark.parametrize("language", ["python", "bash"])
def test_files_in_and_out(client: Client, language: str) -> None:
    sources = {
        "python": "import os\nos.makedirs('d')\nopen('d/out','w').write(open('sub/in').read()*2)\n",
        "bash": "mkdir d; cat sub/in sub/in >d/out; ln -s /etc/passwd link",
    }
    take = ["d/out", "none", "link"]
    function = client.function(sources[language], language=language, files={"sub/in": b"ab"}, take=take)
    if language == "python":
        function = client.function(
            "def f():\n" + "\n".join("    " + line for line in sources["python"].split("\n")),
            "f",
            files={"sub/in": b"ab"},
            take=["d/out", "none"],
        )
        assert function.run(FunctionCall()).files == {"d/out": b"abab"}
    else:
        assert function.run().files == {"d/out": b"abab"}


# --- limits ---


@pytest.mark.parametrize(
    ("language", "source", "limits", "cause"),
    [
        ("python", "while True: pass", {"cpu_s": 0.3}, Cause.COMMAND_TIMEOUT),
        ("python", "import time; time.sleep(60)", {"wall_s": 0.3}, Cause.COMMAND_TIMEOUT),
        ("python", "import os, time; os.closerange(0, 99); time.sleep(60)", {"wall_s": 0.5}, Cause.COMMAND_TIMEOUT),
        ("python", "x = b'x' * (1 << 30)", {"memory_bytes": 64 * MIB}, Cause.MEMORY_LIMIT),
        ("python", "open('/tmp/x','wb').write(b'x' * (200 << 20))", {"memory_bytes": 64 * MIB}, Cause.MEMORY_LIMIT),
        ("python", "while True: print('x' * 1000)", {}, Cause.OUTPUT_LIMIT),
        ("bash", "while :; do :; done", {"cpu_s": 0.3}, Cause.COMMAND_TIMEOUT),
        ("bash", "sleep 60 & sleep 60", {"wall_s": 0.3}, Cause.COMMAND_TIMEOUT),
        ("bash", "yes", {}, Cause.OUTPUT_LIMIT),
    ],
)
def test_limits(client: Client, language: str, source: str, limits: dict[str, Any], cause: Cause) -> None:
    function = client.function(source, language=language, limits=FunctionLimits(**({"wall_s": 30.0} | limits)))
    began = time.monotonic()
    result = function.run()
    assert (result.cause, result.infra, result.ok) == (cause, False, False), result
    assert result.wall_s < 29
    assert time.monotonic() - began < 60
    assert len(result.stdout) <= MIB
    assert call(client, "def f(): return 1").value == 1


def test_a_fork_bomb(client: Client) -> None:
    source = "import os\ndef f():\n    while True:\n        try:\n            os.fork()\n"
    source += "        except OSError:\n            pass\n"
    result = call(client, source, limits=FunctionLimits(wall_s=1.0, cpu_s=30.0, pids=32))
    assert result.cause is Cause.COMMAND_TIMEOUT
    result = client.function(":(){ :|:& };:; wait", language="bash", limits=FunctionLimits(wall_s=1.0, pids=32)).run()
    assert not result.infra
    assert call(client, "def f(): return 1").value == 1


# --- batches ---


def test_map_is_in_order_and_many_come_as_they_do(client: Client) -> None:
    source = "import time\ndef f(x, y):\n    time.sleep(0.05 if x % 7 == 0 else 0)\n    return x + y"
    function = client.function(source, "f")
    assert list(function.map(range(100), range(100))) == [2 * n for n in range(100)]
    found = {result.index: result.value for result in function.run_many(FunctionCall(args=[n, 1]) for n in range(100))}
    assert found == {n: n + 1 for n in range(100)}


def test_stopping_early(client: Client) -> None:
    function = client.function("def f(x):\n    assert x != 3", "f")
    calls = [FunctionCall(args=[n]) for n in range(500)]
    results = list(function.run_many(calls, ordered=True, stop=True))
    assert [result.index for result in results[:4]] == [0, 1, 2, 3]
    assert len(results) < 50
    taken = []
    with pytest.raises(FunctionFailed, match="call 3"):
        taken.extend(function.map(range(10)))


def test_leaving_a_batch_frees_its_workers_at_once(client: Client, server: Server) -> None:
    marker = "86397.5"
    source = "import os, time\ndef f(n):\n    if n:\n        os.execvp('sleep', ['sleep', n])\n"
    calls = [FunctionCall(args=["" if n == 0 else marker]) for n in range(40)]
    for _ in client.function(source, "f", limits=FunctionLimits(wall_s=600.0)).run_many(calls):
        until(lambda: _running(marker) > 0)
        break
    until(lambda: _running(marker) == 0)
    assert call(client, "def f(): return 1").value == 1
    assert "never retrieved" not in server.log()


def _running(marker: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += marker.encode() in path.read_bytes().split(b"\0")
        except OSError:
            continue
    return found


def test_callers_share(client: Client) -> None:
    """Who asks for much doesn't keep others waiting till the end of it."""
    slow = client.function("import time\ndef f(n): time.sleep(0.05)", "f")
    enough, done = threading.Event(), threading.Event()

    def ask() -> None:
        for _ in slow.map(range(20_000)):
            if enough.is_set():
                return
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(3):
            assert client.function("def f(): return 1", "f").remote() == 1
        assert not done.is_set()
    finally:
        enough.set()
        thread.join()


def test_the_command_line(server: Server, tmp_path: Path) -> None:
    program, function = tmp_path / "program.py", tmp_path / "function.py"
    program.write_text("import sys\nprint(input()[::-1])\nsys.exit(3)\n")
    function.write_text("def f(x, y):\n    return {'sum': x + y}\n")

    def dsec(*arguments: str, stdin: str = "") -> tuple[int, Any]:
        command = [sys.executable, "-m", "dsec.cli.main", "call", "--json", *arguments]
        done = subprocess.run(
            command, env=server.environment(), input=stdin, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr

    code, said = dsec(str(program), stdin="abc\n")
    assert (code, base64.b64decode(said["stdout"])) == (3, b"cba\n")
    code, said = dsec(str(function), "--name", "f", "1", "2")
    assert (code, said["value"]) == (0, {"sum": 3})
    code, said = dsec("math:sqrt", "--", "-1")
    assert (code, said["error"]["type"]) == (1, "ValueError")
    code, said = dsec(str(program), "1")
    assert code == 2, said


def test_json_over_http(server: Server) -> None:
    endpoint = server.endpoint()

    def ask(source: str, *args: Any) -> dict[str, Any]:
        body = {"function": {"environment": "debian", "source": source, "name": "f"}, "calls": [{"args": list(args)}]}
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint.url}/v1/functions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            (line,) = answer.read().splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    assert ask("def f(x): return {'x': x, 'n': float('nan'), 'b': b'abc', 5: 6}", [1])["value"] == {
        "x": [1],
        "n": "nan",
        "b": "YWJj",
        "5": 6,
    }
    assert ask("def f(): return 'x' * (2 << 20)")["error"]["type"] == "ResultRefused"


def test_memory_of_calls_counts_where_sandboxes_are_let_in(client: Client) -> None:
    limits = FunctionLimits(memory_bytes=333 * MIB)
    function = client.function("import time\ndef f(): time.sleep(300)", "f", limits=limits)
    before = client.node()["memory_committed_bytes"]
    for _ in function.run_many([FunctionCall()] * 2 + [FunctionCall(args=[1])]):  # the last one fails at once
        until(lambda: client.node()["memory_committed_bytes"] == before + 2 * 333 * MIB)
        break
    until(lambda: client.node()["memory_committed_bytes"] == before)


def test_what_goes_on_writing_keeps_nobody(client: Client) -> None:
    source = """
import os
def f():
    if not os.fork():
        while True:
            os.write(1, b"x" * 4096)
    return "done"
"""
    result = call(client, source, limits=FunctionLimits(output_bytes=64 * MIB))
    assert result.value == "done"
    assert len(result.stdout) <= MIB


def test_random_numbers_and_forks_are_a_calls_own(client: Client) -> None:
    """What threading and random do at a fork is left out where workers are forked, not where calls fork."""
    source = """
import os, random, threading
def f():
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    read, write = os.pipe()
    if not os.fork():
        os.write(write, f"{threading.active_count()} {random.random()}".encode())
        os._exit(0)
    threads, number = os.read(read, 100).split()
    done.set()
    return [int(threads), float(number), random.random(), random.gauss(0, 1)]
"""
    function = client.function(source, "f", imports=["random", "threading"])
    found = [function.remote() for _ in range(6)]
    assert [each[0] for each in found] == [1] * 6
    assert len({number for each in found for number in each[1:]}) == 18


def test_environments_are_made_again_and_ended(client: Client, server: Server) -> None:
    """A warm parent that dies takes the calls of the moment with it, and no later one."""
    assert client.function("math:sqrt").remote(4.0) == 2.0
    (parent, *_) = [path.parent for path in Path("/proc").glob("[0-9]*/comm") if _is_ours(path, server)]
    import os
    import signal

    os.kill(int(parent.name), signal.SIGKILL)
    until(lambda: not parent.exists())

    def later() -> bool:
        """The server hears of the end a moment after it: until then a call is one of the moment, and told as such."""
        result = client.function("math:sqrt").run(FunctionCall(args=[9.0]))
        assert result.ok or (result.infra and result.cause is Cause.OUTCOME_UNKNOWN), result
        return result.ok

    until(later)
    assert [client.function("math:sqrt").remote(n * n) for n in (3.0, 4.0, 5.0)] == [3.0, 4.0, 5.0]


def _is_ours(comm: Path, server: Server) -> bool:
    try:
        ours = f"/dsec-{server.config.instance}/" in (comm.parent / "cgroup").read_text()
        spaces = (comm.parent / "status").read_text().partition("NSpid:")[2].partition("\n")[0].split()
        return comm.read_text() == "dsec-warm\n" and ours and len(spaces) == 2
    except OSError:
        return False

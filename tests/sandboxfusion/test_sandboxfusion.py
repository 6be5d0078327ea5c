"""SandboxFusion's calls with real programs, asked by two clients as they are: verl's reward function, and the package
`sandbox-fusion`. The server's state lets requests from this machine come without a key."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests
import sandbox_fusion
from sandbox_fusion import RunCodeRequest, RunStatus, SubmitRequest, SummaryMapping, TestConfig

from judge_kit import NEEDS, compiling
from server_kit import Server, until

pytestmark = [pytest.mark.root, pytest.mark.slow, NEEDS]
VERL = "0.9.1"
PR_SET_NAME = 15
CONFIG = {"keyless_project": "default", "environments": {"cpp": "cc", "c": "cc"}, "wait_s": 3.0}
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
ADD_CPP = "#include <iostream>\nint main() { long long a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }\n"
IN_OUTS = {"inputs": ["1 2\n", "5 -7\n", "10 20\n"], "outputs": ["3\n", "-2", "30\n\n"]}


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    top = tmp_path_factory.mktemp("fusion")
    (top / "state").mkdir(mode=0o700)
    (top / "state" / "sandboxfusion.json").write_text(json.dumps(CONFIG))
    with compiling(debian_store, top) as made:
        yield made


@pytest.fixture(scope="session")
def verl() -> ModuleType:
    """verl's module, without verl's other modules, which need a GPU's libraries."""
    place = Path(__file__).parents[2] / "build" / f"verl-{VERL}"
    if not (place / "complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(place)]
        subprocess.run([*pip, f"verl=={VERL}"], check=True)
        (place / "complete").touch()
    directory = place / "verl" / "utils" / "reward_score" / "sandbox_fusion"
    spec = importlib.util.spec_from_file_location(
        "verl_sandbox_fusion", directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def keyed(server: Server, path: str = "/run_code") -> str:
    """The URL with the key in it."""
    return server.url.replace("http://", f"http://dsec:{server.endpoint().api_key}@") + path


def run(server: Server, code: str, language: str = "python", **fields: Any) -> dict[str, Any]:
    asked = {"code": code, "language": language, **fields}
    answer = requests.post(f"{server.url}/run_code", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_without_a_key_a_browsers_form_gets_nothing(server: Server) -> None:
    body = json.dumps({"code": "print(3)", "language": "python"})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = requests.post(f"{server.url}/run_code", data=body, headers={"Content-Type": kind}, timeout=60)
        assert answer.status_code == 401
    assert requests.post(keyed(server), data=body, timeout=60).json()["status"] == "Success"


# --- verl ---


def test_verl_scores(server: Server, verl: ModuleType) -> None:
    fenced = f"I think so:\n```python\n{ADD}```\n"
    for url in (f"{server.url}/run_code", keyed(server), keyed(server, "/sandboxfusion/debian/run_code")):
        score, told = verl.compute_score(url, None, 512, fenced, json.dumps(IN_OUTS), continuous=True, timeout=60)
        assert score == 1.0, told
    assert [each["status"] for each in told] == ["success"] * 3
    assert all(each["duration"] > 0 and each["exit_code"] == 0 for each in told)
    score, _ = verl.compute_score(keyed(server), None, 512, "```python\nprint(3)\n```", IN_OUTS, continuous=True)
    assert score == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("language", "code", "status"),
    [
        ("cpp", ADD_CPP, True),
        ("bash", "read a b; echo $((a + b))", True),
        ("python", "print(4)", False),
        ("python", "raise ValueError", -2),
        ("python", "import os; os.abort()", -2),
        ("python", "x = bytearray(1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1", -2),
        ("python", "while True: pass", -3),
        ("python", "import time\ntime.sleep(60)", -3),
        ("cpp", "int main() {", -4),
        ("rust", "fn main() {}", -1),  # no such toolchain: nothing that a model did
        ("java", "class Main {}", -1),
    ],
)
def test_verl_tells_outcomes_apart(
    server: Server, verl: ModuleType, language: str, code: str, status: bool | int
) -> None:
    found, told = verl.check_correctness(
        f"{server.url}/run_code",
        {"inputs": ["1 2\n"], "outputs": ["3\n"]},
        code,
        timeout=2 if status == -3 else 60,
        memory_limit_mb=256,
        language=language,
    )
    assert found == [status], told


def test_verl_calls_functions(server: Server, verl: ModuleType) -> None:
    solution = "class Solution:\n    def total(self, a, b):\n        return [a + b]\n"
    cases = {"inputs": ["1\n2", "3\n4"], "outputs": ["[3]", "[8]"], "fn_name": "total"}
    found, told = verl.check_correctness(f"{server.url}/run_code", cases, solution)
    assert found == [True, False], told


def test_verl_has_many_requests_at_once(server: Server, verl: ModuleType) -> None:
    limit = threading.Semaphore(24)
    cases = {"inputs": [f"{n} 1\n" for n in range(12)], "outputs": [f"{n + 1}\n" for n in range(12)]}

    def one(number: int) -> float:
        code = f"```python\n# {number}\n{ADD}```"
        score: float = verl.compute_score(f"{server.url}/run_code", limit, 512, code, cases, timeout=60)[0]
        return score

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [1.0] * 8


def processes_of(name: str) -> int:
    """How many of this host have given themselves this name."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found += path.read_text() == f"{name}\n"
    return found


def test_verl_comes_again_while_all_places_are_taken(server: Server, verl: ModuleType) -> None:
    """Sleepers hold every place: the next one is told 504 within its patience, and verl asks again."""
    name = f"s{secrets.token_hex(6)}"
    sleeper = f"import ctypes, time\nctypes.CDLL(None).prctl({PR_SET_NAME}, b'{name}')\ntime.sleep(60)"
    with ThreadPoolExecutor(64) as pool:
        sleepers = [pool.submit(run, server, sleeper, run_timeout=10.0, compile_timeout=0.1) for _ in range(4)]
        until(lambda: processes_of(name) == 4)
        early = requests.post(
            f"{server.url}/run_code",
            json={"code": "print(3)", "language": "python", "compile_timeout": 0.1, "run_timeout": 1},
            timeout=60,
        )
        assert early.status_code == 504, early.text
        assert early.json()["infra"]
        found, told = verl.check_correctness(f"{server.url}/run_code", IN_OUTS, ADD, timeout=1)
        assert found == [True] * 3, told
        assert all(each.result()["run_result"]["status"] == "TimeLimitExceeded" for each in sleepers)


# --- the package ---


def test_the_package_runs_code(server: Server) -> None:
    asked = RunCodeRequest(code="print(input()); import sys; sys.exit(3)", language="python", stdin="hello")
    found = sandbox_fusion.run_code(asked, endpoint=server.url, max_attempts=1)
    assert (found.status, found.run_result.return_code, found.run_result.stdout) == (RunStatus.Failed, 3, "hello\n")
    mapping = SummaryMapping(RunFailed="run", RunTimeout="late", CompileFailed="compile")
    assert sandbox_fusion.summary_run_code_result(found, mapping) == "run"
    late = RunCodeRequest(code="while True: pass", language="python", run_timeout=1)
    found = sandbox_fusion.run_code(late, endpoint=server.url, max_attempts=1)
    assert found.run_result.return_code is None
    assert sandbox_fusion.summary_run_code_result(found, mapping) == "late"
    broken = RunCodeRequest(code="int main() {", language="cpp")
    found = sandbox_fusion.run_code(broken, endpoint=server.url, max_attempts=1)
    assert found.run_result is None
    assert "error" in found.compile_result.stderr
    assert sandbox_fusion.summary_run_code_result(found, mapping) == "compile"
    with pytest.raises(Exception, match="has no rustc"):
        sandbox_fusion.run_code(RunCodeRequest(code="", language="rust"), endpoint=server.url, max_attempts=1)


def test_the_package_carries_files(server: Server) -> None:
    asked = RunCodeRequest(
        code="import helper\nopen('out/result', 'wb').write(bytes([0, 255]) + helper.DATA)\n"
        "import os; os.symlink('/etc/passwd', 'link'); os.mkfifo('fifo')",
        language="python",
        files={
            "helper.py": base64.b64encode(b"DATA = open('data/in', 'rb').read()").decode(),
            "data/in": base64.b64encode(b"\x00\x01").decode(),
            "out/.keep": "",
            "nothing": None,
        },
        fetch_files=["out/result", "data/in", "missing", "link", "/tmp/link", "out", "fifo"],
    )
    found = sandbox_fusion.run_code(asked, endpoint=keyed(server, ""), max_attempts=1)
    assert found.status == RunStatus.Success, found
    files = {name: base64.b64decode(content) for name, content in found.files.items()}
    assert files == {"out/result": b"\x00\xff\x00\x01", "data/in": b"\x00\x01"}


def submitted(server: Server, completion: str, tests: list[tuple[str, str]], **fields: Any) -> Any:
    rows = [{"input": {"stdin": given}, "output": {"stdout": wanted}} for given, wanted in tests]
    config = TestConfig(
        dataset_type="CommonOJDataset",
        **{"language": "python", "provided_data": {"id": 1, "content": "", "labels": "{}", "test": rows}, **fields},
    )
    asked = SubmitRequest(dataset="ours", id=1, completion=completion, config=config)
    return sandbox_fusion.submit(asked, endpoint=server.url, max_attempts=1)


def test_the_package_submits(server: Server) -> None:
    tests = [("1 2", "3"), ("2 2", "4"), ("3 3", "6.0000001")]
    found = submitted(server, f"```python\n{ADD}```", tests)
    assert (found.accepted, [each.passed for each in found.tests]) == (True, [True] * 3)
    assert found.extracted_code == ADD.rstrip()
    found = submitted(server, "```python\nprint(3)\n```", tests)
    assert (found.accepted, [each.passed for each in found.tests]) == (False, [True, False])
    found = submitted(server, "```python\nprint(3)\n```", tests, extra={"run_all_cases": True})
    assert [each.passed for each in found.tests] == [True, False, False]
    found = submitted(server, f"```cpp\n{ADD_CPP}```", tests, language="cpp")
    assert found.accepted
    assert found.tests[0].exec_info.compile_result.return_code == 0
    found = submitted(server, "I don't know", tests)
    assert (found.accepted, found.extracted_code) == (False, "")
    with pytest.raises(Exception, match="422"):
        submitted(server, "```rust\nfn main() {}\n```", tests, language="rust")


async def test_the_package_is_asynchronous_too(server: Server) -> None:
    async def one(number: int) -> str:
        asked = RunCodeRequest(code=f"print({number})", language="python")
        found = await sandbox_fusion.run_code_async(asked, endpoint=server.url, max_attempts=1)
        return str(found.run_result.stdout)

    assert await asyncio.gather(*(one(number) for number in range(30))) == [f"{number}\n" for number in range(30)]


# --- what misbehaves ---


def test_output_of_any_kind(server: Server) -> None:
    found = run(server, "import sys\nsys.stdout.buffer.write(b'\\xff\\x00a')")
    assert (found["status"], found["run_result"]["stdout"]) == ("Success", "\ufffd\x00a")
    found = run(server, "print('x' * (3 << 20))")
    assert len(found["run_result"]["stdout"]) == (3 << 20) + 1
    found = run(server, "while True: print('x' * 10000)", run_timeout=30)
    assert (found["status"], found["run_result"]["status"]) == ("Failed", "Finished")
    assert found["run_result"]["return_code"] == -9
    assert "output_bytes" in found["run_result"]["stderr"]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.closerange(0, 100)\nwhile True: pass",
        "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(60)",
        "import os\nwhile True: os.fork()",
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(-1, 9)\nos.kill(1, 9)",
    ],
    ids=["closes descriptors", "leaves a child", "forks without end", "kills what it can"],
)
def test_what_misbehaves_has_failed_and_leaves_nothing(server: Server, code: str) -> None:
    found = run(server, code, run_timeout=2)
    assert found["status"] == "Failed", found
    assert run(server, "print(3)")["run_result"]["stdout"] == "3\n"


def test_an_answer_that_is_forged_is_output(server: Server) -> None:
    forged = json.dumps({"status": "Success", "run_result": {"status": "Finished", "return_code": 0}})
    found = run(server, f"import os\nos.write(2, b'''{forged}''')\nprint('''{forged}''')\nos._exit(1)")
    assert (found["status"], found["run_result"]["return_code"]) == ("Failed", 1)
    assert found["run_result"]["stderr"] == forged


def test_who_goes_away_leaves_no_work_behind(server: Server) -> None:
    sleeper = {"code": "import time\ntime.sleep(300)", "language": "python", "run_timeout": 300}

    def give_up(_: int) -> None:
        with pytest.raises(requests.exceptions.Timeout):
            requests.post(f"{server.url}/run_code", json=sleeper, timeout=2)

    with ThreadPoolExecutor(16) as pool:  # more than there are places
        list(pool.map(give_up, range(16)))
    assert run(server, "print(3)")["run_result"]["stdout"] == "3\n"

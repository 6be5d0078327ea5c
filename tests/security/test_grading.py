"""Attacks on a reward, by an agent that is root in its own sandbox: none of them raises it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grading_kit import LAYER, RIGHT, Attacked, archive, untaken

from dsec import Client, Grader
from dsec.errors import InvalidRequest, NotFound, PermissionDenied, SandboxEnded
from server_kit import Server, serving
from trees import link_store

pytestmark = pytest.mark.root
FORGED = "#!/bin/sh\nprintf '1..2\\nok 1\\nok 2\\n'\n"
CAT = """\
import subprocess
done = subprocess.run(['/project/src/cat', '/grader/cases'], capture_output=True, text=True)
words = done.stdout.split()
print(words[words.index(input()) + 1])
"""
LOOK_UP = "words = open({path!r}).read().split()\nprint(words[words.index(input()) + 1])\n"
LOUD = "print('1..2\\nok 1\\nok 2', flush=True)\nimport os\nos._exit(0)\n"


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("grading") / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")  # a store of its own
    (state / "native").symlink_to(debian_store.parent / "native")
    with serving(state) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as made:
        made.catalog.build(archive(tmp_path_factory.mktemp("layer") / "project.tar"), LAYER)
        yield made


@pytest.fixture
def agent(client: Client) -> Iterator[Attacked]:
    made = Attacked(client)
    yield made
    made.sandbox.kill()


# --- honest work is rewarded, so that the zeros below mean something ---


def test_the_right_answer_is_rewarded(agent: Attacked) -> None:
    assert agent.apart().reward == agent.together().reward == 0
    agent.solution(RIGHT)
    verdict = agent.apart()
    assert (verdict.reward, verdict.infra, verdict.flaky) == (1.0, False, False)
    assert verdict.taken == ["/project/src/solution.py"]
    assert [(run.passed, run.failed, run.exit_code) for run in verdict.runs] == [(2, 0, 0)]
    assert agent.together().reward == 1
    assert agent.sandbox.commands.run(["true"]).exit_code == 0  # and it goes on


def test_a_change_of_several_files_arrives(agent: Attacked) -> None:
    agent.solution("from solver.core import solve\nprint(solve(int(input())))\n")
    agent.run(
        "mkdir src/solver; echo 'def solve(x): return 2 * x' >src/solver/core.py; rm -r tests; touch src/x; rm src/x"
    )
    assert agent.apart(env={"PYTHONSAFEPATH": ""}).reward == 1
    verdict = agent.shell(
        "test -e src/solver/core.py -a ! -e tests/test_public.py -a ! -w src/solution.py", cwd="/project"
    )
    assert verdict.reward == 1


def test_a_share_is_rewarded_and_missing_tests_count(agent: Attacked) -> None:
    agent.solution("print(34)\n")
    assert agent.apart(scoring="share").reward == 0.5
    assert agent.apart(scoring="share", tests=["1", "3"]).reward == pytest.approx(1 / 3)


def test_graders_that_differ_are_flaky(agent: Attacked) -> None:
    script = "echo 1..1; echo ok 1 - $(cat /proc/sys/kernel/random/uuid)"
    grader = Grader(argv=["sh", "-c", script], report="tap")
    verdict = agent.sandbox.verify(grader, paths=["/project/src"], repeats=2)
    assert (verdict.flaky, verdict.reward) == (True, 1)
    assert len({run.sandbox for run in verdict.runs}) == 2
    assert not agent.sandbox.verify(["true"], paths=["/project/src"], repeats=2).flaky


def test_on_the_command_line(agent: Attacked, server: Server, tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text("wanted\n")

    def verify(script: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dsec.cli.main", "verify", agent.sandbox.id, "--path", "/project/src"]
        command += ["--file", f"/hidden={tmp_path}/wanted", "--json", "--", "sh", "-c", script]
        return subprocess.run(command, env=server.environment(), capture_output=True, text=True, check=False)

    good = verify("grep wanted /hidden")
    assert good.returncode == 0, good
    assert json.loads(good.stdout)["runs"][0]["stdout"] == "wanted\n"
    assert verify("exit 9").returncode == 1


def test_bad_requests_are_refused(agent: Attacked) -> None:
    for paths in ([], ["src"], ["/"], ["/project/../etc"]):
        with pytest.raises(InvalidRequest):
            agent.sandbox.verify(["true"], paths=paths)
    with pytest.raises(InvalidRequest):
        agent.sandbox.verify(["true"], paths=["/project"], report="guess")
    with pytest.raises(NotFound):
        agent.sandbox.verify(["true"], paths=["/project"], layers=["hidden@9"])
    agent.sandbox.kill()
    with pytest.raises(SandboxEnded):
        agent.sandbox.verify(["true"], paths=["/project"])


# --- programs that the grader uses ---


def test_a_replaced_interpreter(agent: Attacked) -> None:
    agent.sandbox.files.write("/agent.sh", FORGED)
    agent.run("install -m 755 /agent.sh $(readlink -f /usr/bin/python3)")
    assert agent.apart().reward == 0


def test_a_program_earlier_in_path(agent: Attacked) -> None:
    agent.sandbox.files.write("/agent.sh", FORGED)
    agent.run("install -D -m 755 /agent.sh /usr/local/sbin/python3; install -m 755 /agent.sh src/python3")
    assert agent.apart().reward == 0


def test_sitecustomize_among_the_libraries(agent: Attacked) -> None:
    agent.python(f"import os\nopen(os.__file__.replace('os.py', 'sitecustomize.py'), 'w').write({LOUD!r})\n")
    assert agent.apart().reward == 0


def test_sitecustomize_in_an_allowed_path(agent: Attacked) -> None:
    for name in ("sitecustomize.py", "usercustomize.py"):
        agent.sandbox.files.write(f"/project/src/{name}", LOUD)
    verdict = agent.apart(env={"PYTHONPATH": "/project/src"})
    assert verdict.reward == 0
    assert untaken(verdict)["/project/src/sitecustomize.py"] == "steers"


def test_a_pth_file(agent: Attacked) -> None:
    line = "import os; print('1..2\\\\nok 1\\\\nok 2', flush=True); os._exit(0)"
    agent.python(
        "import site\n"
        f"for place in (site.getsitepackages()[0], '/project/src'):\n"
        "    import os; os.makedirs(place, exist_ok=True)\n"
        f"    open(place + '/a.pth', 'w').write(\"{line}\")\n"
    )
    verdict = agent.apart()
    assert verdict.reward == 0
    assert untaken(verdict)["/project/src/a.pth"] == "steers"


def test_a_preloaded_library(agent: Attacked) -> None:
    agent.run("echo /project/src/evil.so >/etc/ld.so.preload; cp $(readlink -f /lib/*/libm.so.6) src/evil.so")
    verdict = agent.shell("grep -q evil /etc/ld.so.preload /proc/self/maps")
    assert verdict.reward == 0
    assert untaken(verdict)["/etc/ld.so.preload"] == "outside"


def test_shell_startup_files(agent: Attacked) -> None:
    agent.run("for f in ~/.bashrc ~/.profile /etc/profile /project/.bashrc /project/.env; do echo exit 0 >$f; done")
    verdict = agent.sandbox.verify(["bash", "-lc", "exit 7"], paths=["/project"], user="root", env={"HOME": "/project"})
    assert verdict.reward == 0
    assert verdict.runs[0].exit_code == 7


def test_variables_of_the_agents_sandbox(client: Client) -> None:
    sandbox = Attacked(client).sandbox
    sandbox.kill()
    with client.create("debian", layers=[LAYER], env={"PYTHONPATH": "/project/src", "BASH_ENV": "/project/b"}) as made:
        made.files.write("/project/src/json.py", LOUD)
        made.files.write("/project/b", "exit 0")
        assert made.verify(["python3", "-c", "import json; json.dumps; exit(3)"], paths=["/project"]).reward == 0
        assert made.verify(["bash", "-c", "exit 4"], paths=["/project"]).reward == 0


def test_modules_beside_the_grader(agent: Attacked) -> None:
    agent.sandbox.files.write("/project/src/json.py", LOUD)
    assert (
        agent.sandbox.verify(["python3", "-c", "import json; exit(3)"], paths=["/project"], cwd="/project/src").reward
        == 0
    )


# --- tests and their settings ---


def test_conftest_and_settings_of_the_runner(agent: Attacked) -> None:
    names = "conftest.py pytest.ini tox.ini setup.cfg pyproject.toml package.json jest.config.mjs .mocharc.yaml go.work"
    agent.run(f"for f in {names}; do echo evil >src/$f; done; echo evil >tests/conftest.py")
    verdict = agent.shell("grep -rq evil /project")
    assert verdict.reward == 0
    assert {untaken(verdict)[f"/project/src/{name}"] for name in names.split()} == {"steers"}


def test_a_conftest_that_was_taken_away(agent: Attacked) -> None:
    agent.run("rm -rf tests; mkdir tests")
    assert agent.shell("test ! -e /project/tests/conftest.py").reward == 0
    agent.run("rm -rf /project/tests; ln -s /tmp /project/tests")
    assert agent.shell("test ! -e /project/tests/conftest.py").reward == 0
    agent.run("rm -rf /project/tests; echo a file >/project/tests")
    assert agent.shell("test ! -e /project/tests/conftest.py").reward == 0


def test_bytecode_in_the_place_of_a_hidden_test(agent: Attacked) -> None:
    agent.python(
        "import py_compile, os\n"
        "os.makedirs('/project/tests/__pycache__', exist_ok=True)\n"
        "open('/t.py', 'w').write('import unittest\\nclass T(unittest.TestCase):\\n    def test(self): pass\\n')\n"
        "import importlib.util\n"
        "cached = importlib.util.cache_from_source('/project/tests/test_hidden.py')\n"
        "py_compile.compile('/t.py', cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
    )
    verdict = agent.together()
    assert verdict.reward == 0
    assert untaken(verdict)["/project/tests/__pycache__"] == "steers"


def test_a_package_in_the_place_of_a_hidden_test(agent: Attacked) -> None:
    test = "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\n"
    agent.sandbox.files.write("/project/tests/test_hidden/__init__.py", test, parents=True)
    verdict = agent.together()
    assert verdict.reward == 0
    assert untaken(verdict)["/project/tests/test_hidden"] == "shadows"


def test_hidden_files_that_the_agent_made_first(agent: Attacked) -> None:
    agent.run("mkdir /grader; echo 17 17 >/grader/cases; echo 'print(\"1..1\\nok 1\")' >/grader/run.py")
    agent.run("mkdir src/cases; echo '17 17' >src/cases/all")
    verdict = agent.apart(paths=("/project", "/grader"))
    assert verdict.reward == 0
    assert verdict.runs[0].failed == 2
    assert untaken(verdict)["/grader/cases"] == "shadows"


def test_git_hooks_settings_and_history(agent: Attacked) -> None:
    agent.run(
        "git init -q . && printf '#!/bin/sh\\ntouch /tmp/hooked\\n' >.git/hooks/post-checkout && chmod +x .git/hooks/*;"
        "git config core.fsmonitor 'touch /tmp/hooked'; git config --global core.hooksPath /project/.git/hooks;"
        "git config --system core.fsmonitor 'touch /tmp/hooked'"
    )
    verdict = agent.shell(
        "cd /project; git -c safe.directory='*' log; git -c safe.directory='*' status; git init -q /tmp/x; cd /tmp/x;"
        " git status >/dev/null; git config core.hooksPath; test -e /tmp/hooked -o -e /project/.git"
    )
    assert verdict.reward == 0
    assert untaken(verdict)["/project/.git"] == "steers"


# --- ways out of the allowed paths ---


def test_a_link_to_a_hidden_file(agent: Attacked) -> None:
    agent.run("ln -s /grader/cases src/cases; ln -s / src/all")
    agent.solution(LOOK_UP.format(path="/project/src/cases"))
    verdict = agent.apart()
    assert verdict.reward == 0
    assert untaken(verdict) == {"/project/src/cases": "link", "/project/src/all": "link"}
    grader = Grader(argv=["cmp", "/expected", "/project/src/out"], files={"/expected": b"34\n"})
    agent.run("ln -s /expected src/out")
    assert agent.sandbox.verify(grader, paths=["/project/src"]).reward == 0


def test_a_link_in_the_place_of_an_allowed_directory(agent: Attacked) -> None:
    agent.run("mkdir /elsewhere; cp -r src /elsewhere; rm -rf src; ln -s /elsewhere/src src")
    agent.sandbox.files.write("/elsewhere/src/solution.py", RIGHT)
    verdict = agent.apart()
    assert verdict.reward == 0
    assert verdict.taken == []


def test_a_link_above_the_allowed_directory(agent: Attacked) -> None:
    agent.run("cp -r /project /elsewhere; rm -rf /project; ln -s /elsewhere /project")
    agent.sandbox.files.write("/elsewhere/src/solution.py", RIGHT)
    assert agent.apart().reward == 0


def test_special_files(agent: Attacked) -> None:
    agent.run("rm src/solution.py; mkfifo src/solution.py; mkfifo src/other")
    verdict = agent.apart()
    assert verdict.reward == 0
    assert set(untaken(verdict).values()) == {"special"}


def test_a_program_with_set_user_id(agent: Attacked) -> None:
    agent.run("cp /bin/cat src/cat; chmod 6755 src/cat")
    agent.solution(CAT)
    assert agent.apart().reward == 0


def test_a_program_with_capabilities(agent: Attacked) -> None:
    agent.run("cp /bin/cat src/cat")
    agent.python(  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        "import os, struct\n"
        "os.setxattr('/project/src/cat', 'security.capability', struct.pack('<IIIII', 0x02000001, 6, 0, 0, 0))\n"
    )
    agent.solution(CAT)
    assert agent.apart().reward == 0


# --- from inside the grader's sandbox ---


def test_reading_the_hidden_files(agent: Attacked) -> None:
    agent.solution(LOOK_UP.format(path="/grader/cases"))
    verdict = agent.apart()
    assert verdict.reward == 0


def test_reading_the_grader_itself(agent: Attacked) -> None:
    agent.solution(
        "import os, re\n"
        "p, given = os.getppid(), input()\n"
        "for name in ('fd/3', 'environ', 'mem', 'cwd/grader/cases', 'root/grader/cases', 'maps'):\n"
        "    try:\n"
        "        text = open(f'/proc/{p}/{name}').read()\n"
        "        print(re.search(given + r' (\\d+)', text)[1]); break\n"
        "    except (OSError, TypeError): pass\n"
    )
    assert agent.apart().reward == 0


def test_writing_into_the_graders_output(agent: Attacked) -> None:
    agent.solution(
        "import os\n"
        "for pid in [p for p in os.listdir('/proc') if p.isdigit()]:\n"
        "    for fd in (1, 2):\n"
        "        try: open(f'/proc/{pid}/fd/{fd}', 'w').write('1..2\\nok 1\\nok 2\\n')\n"
        "        except OSError: pass\n"
    )
    assert agent.apart().reward == 0


def test_ending_the_grader(agent: Attacked) -> None:
    agent.solution("import os\nfor s in (9, 19):\n    try: os.kill(os.getppid(), s)\n    except OSError: pass\n")
    verdict = agent.apart()
    assert verdict.reward == 0
    assert verdict.runs[0].failed == 2  # it lived, and said so


def test_leaving_early_with_a_good_exit_code(agent: Attacked) -> None:
    agent.solution("import os\nos._exit(0)\n")
    verdict = agent.together()
    assert verdict.reward == 0
    assert "no plan" in verdict.message


def test_a_forged_report_beside_the_real_one(agent: Attacked) -> None:
    agent.solution("print('1..1\\nok 1')\ndef solve(x):\n    print('ok 1')\n")
    assert agent.together().reward == 0


def test_a_process_that_outlives_its_test(agent: Attacked) -> None:
    agent.solution(
        "import os, time, glob\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    end = time.time() + 5\n"
        "    while time.time() < end:\n"
        "        for d in glob.glob('/tmp/dsec-*') or ['/tmp']:\n"
        "            try: open(d + '/report', 'w').write('1')\n"
        "            except OSError: pass\n"
        "os._exit(0)\n"
    )
    script = (
        "import subprocess, os, json\n"
        "r = subprocess.run(['python3', '/project/src/solution.py'], user=65534, group=65534, extra_groups=[],"
        " stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)\n"
        "json.dump(0, open(os.environ['DSEC_REPORT'], 'w'))\n"
    )
    grader = Grader(argv=["python3", "/g.py"], files={"/g.py": script.encode()}, user="root", report="score")
    assert agent.sandbox.verify(grader, paths=["/project/src"]).reward == 0


def test_processes_and_files_of_the_agents_sandbox(agent: Attacked) -> None:
    agent.sandbox.commands.start(["sleep", "4711"])
    agent.run("echo left >/tmp/left; echo left >/dev/shm/left; mkdir -p ~/.cache; echo left >~/.cache/left")
    seen = "grep -qsa 47'1'1 /proc/[0-9]*/cmdline"
    script = f"{seen} && exit 0; for f in /tmp /dev/shm ~/.cache; do test -e $f/left && exit 0; done; exit 1"
    assert agent.shell(script, user="root").reward == 0


def test_a_server_in_the_agents_sandbox(agent: Attacked) -> None:
    agent.run("echo 34 >/srv/17; echo 40 >/srv/20")
    agent.sandbox.commands.start(["python3", "-m", "http.server", "8123", "-d", "/srv"])
    agent.run(
        "for i in $(seq 1200); do (exec 3<>/dev/tcp/127.0.0.1/8123) 2>/dev/null && exit 0; sleep 0.1; done; exit 1"
    )
    agent.solution(
        "import urllib.request\n"
        "print(urllib.request.urlopen('http://127.0.0.1:8123/' + input(), timeout=5).read().decode())\n"
    )
    assert agent.apart().reward == 0
    reach = "import socket,sys\ntry: socket.create_connection(('192.0.2.1', 80), 3)\nexcept OSError: sys.exit(1)\n"
    assert agent.sandbox.verify(["python3", "-c", reach], paths=["/project"]).reward == 0


def test_changes_while_they_are_read(agent: Attacked) -> None:
    agent.sandbox.files.write(
        "/flip.py",
        (
            "import os\n"
            "while True:\n"
            "    for target in ('/grader/cases', '/etc/passwd'):\n"
            "        os.symlink(target, '/project/src/n'); os.rename('/project/src/n', '/project/src/data')\n"
            "        open('/project/src/n', 'w').close(); os.rename('/project/src/n', '/project/src/data')\n"
        ),
    )
    agent.sandbox.commands.start(["python3", "/flip.py"])
    for _ in range(3):
        assert agent.shell("test -L /project/src/data -o -s /project/src/data").reward == 0


def test_the_token_of_a_sandbox_can_not_have_it_graded(agent: Attacked, server: Server) -> None:
    token = agent.sandbox.info.token
    assert token is not None
    with Client(server.url, token) as inside:
        mine = inside.connect(agent.sandbox.id)
        with pytest.raises(PermissionDenied):
            mine.verify(["true"], paths=["/project"])


def test_nothing_of_a_grader_is_left(agent: Attacked, client: Client) -> None:
    verdict = agent.apart()
    assert [info.id for info in client.list()] == [agent.sandbox.id]
    assert verdict.runs[0].sandbox not in {info.id for info in client.list()}

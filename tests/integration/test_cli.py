"""The command line, as a process of its own against a real server: streams, exit codes, tables and JSON."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from api_kit import Served, served_in_thread

from dsec.cli.output import age, readable, size
from server_kit import until

Call = Callable[[Coroutine[Any, Any, Any]], Any]


class Cli:
    """Runs `dsec`."""

    def __init__(self, server: Served, call: Call) -> None:
        self.server = server
        self.call = call
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": ":".join(sys.path),
            "DSEC_URL": server.url,
            "DSEC_API_KEY": server.key,
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "dsec.cli.main", *arguments]

    def __call__(self, *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> tuple[int, str, str]:
        done = subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            env={**self.env, **(env or {})},
            timeout=180,
            check=False,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def on_a_terminal(self, *arguments: str) -> str:
        """Its output when stdout is a terminal."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            self.command(*arguments), stdin=subprocess.DEVNULL, stdout=theirs, env={**self.env, "COLUMNS": "200"}
        )
        os.close(theirs)
        output = b""
        try:
            while data := os.read(ours, 65536):
                output += data
        except OSError:  # how Linux says that the other side of a terminal is closed
            pass
        os.close(ours)
        assert process.wait(120) == 0
        return output.decode()

    def sandbox(self) -> str:
        async def work() -> str:
            async with self.server.client() as client:
                return (await client.create("base", labels={"made": "by-test"})).id

        made: str = self.call(work())
        return made


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with served_in_thread(tmp_path_factory.mktemp("server")) as (server, call):
        yield Cli(server, call)


def test_run_passes_streams_and_exit_code(cli: Cli) -> None:
    assert cli("run", "base", "--", "sh", "-c", "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")
    assert json.loads(cli("ls", "--json")[1]) == []  # it ended its sandbox


def test_run_with_stdin_env_and_limits(cli: Cli) -> None:
    assert cli("run", "base", "--", "cat", stdin=b"through" * 100_000) == (0, "through" * 100_000, "")
    code, out, _ = cli(
        "run", "-e", "A=1", "--cwd", "/tmp", "--user", "nobody", "base", "--", "sh", "-c", "echo $A; pwd; id -u"
    )
    assert (code, out) == (0, "1\n/tmp\n65534\n")
    code, _, err = cli("run", "--command-timeout-s", "0.2", "base", "--", "sleep", "60")
    assert code != 0
    assert "command_timeout" in err


def test_run_that_keeps_its_sandbox(cli: Cli) -> None:
    code, _, err = cli("run", "--keep", "--memory", "64M", "--label", "kept=yes", "base", "--", "true")
    assert code == 0
    box = err.split()[-1]
    listed = json.loads(cli("ls", "--label", "kept=yes")[1])
    assert [each["id"] for each in listed] == [box], err
    info = listed[0]
    assert info["spec"]["memory_bytes"] == 64 << 20
    assert cli("exec", box, "--", "echo", "--not-an-option")[1] == "--not-an-option\n"
    assert cli("kill", box)[0] == 0
    assert json.loads(cli("ls", "--label", "kept=yes")[1]) == []
    ended = json.loads(cli("ls", "--all", "--label", "kept=yes")[1])
    assert [each["cause"] for each in ended] == ["deleted"]


def test_exec_passes_the_exit_code(cli: Cli) -> None:
    box = cli.sandbox()
    assert cli("exec", box, "--", "false")[0] == 1
    assert cli("exec", box, "--", "/no/such")[0] == 127
    assert cli("exec", box, "--", "sh", "-c", "kill -15 $$")[0] == 143


def test_a_command_that_was_read_is_not_kept(cli: Cli) -> None:
    box = cli.sandbox()
    assert cli("exec", box, "--", "head", "-c", "300000", "/dev/zero")[0] == 0
    until(lambda: not cli.server.kit.host.guests[box].operations)  # it hears of it after the verb has
    spool = cli.server.kit.host.spool_root / box
    until(lambda: not spool.exists() or not list(spool.iterdir()))


def test_output_is_passed_on_byte_for_byte(cli: Cli) -> None:
    box = cli.sandbox()
    done = subprocess.run(
        cli.command("exec", box, "--", "printf", "a\\377\\000b"),
        capture_output=True,
        env=cli.env,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout == b"a\xff\x00b"


def test_a_reader_that_has_enough(cli: Cli) -> None:
    box = cli.sandbox()
    processes = [  # several, because the thread that passes stdin on may be anywhere when the rest ends
        subprocess.Popen(
            cli.command("exec", box, "--", "yes"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=cli.env,
        )
        for _ in range(6)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.read(10) == b"y\n" * 5
        process.stdout.close()
    for process in processes:
        assert process.wait(120) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()


def test_an_interrupt_ends_the_command(cli: Cli) -> None:
    box = cli.sandbox()
    process = subprocess.Popen(
        cli.command("exec", box, "--", "sh", "-c", "echo begun; sleep 60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=cli.env,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    guest = cli.server.kit.host.guests[box]
    assert all(operation.finished is not None for operation in guest.operations.values())


def test_tables_and_json(cli: Cli) -> None:
    box = cli.sandbox()
    table = cli.on_a_terminal("ls")
    assert box in table
    assert "environment" in table
    assert not table.lstrip().startswith("[")
    assert box in {each["id"] for each in json.loads(cli("ls")[1])}
    assert json.loads(cli.on_a_terminal("ls", "--json", "--label", "made=never")) == []
    assert "no sandboxes" in cli.on_a_terminal("ls", "--label", "made=never")
    assert json.loads(cli("env", "ls")[1]) == [{"name": "base", "layers": ["0123456789abcdef"]}]
    assert "0123456789ab" in cli.on_a_terminal("env", "ls")


def test_colours_can_be_turned_off(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.sandbox()
    monkeypatch.setitem(cli.env, "TERM", "xterm-256color")
    assert "\x1b[" in cli.on_a_terminal("ls")
    monkeypatch.setitem(cli.env, "NO_COLOR", "1")
    assert "\x1b[3" not in cli.on_a_terminal("ls")


def test_kill(cli: Cli) -> None:
    boxes = [cli.sandbox() for _ in range(2)]
    code, out, err = cli("kill", "--json", *boxes, "0" * 24)
    assert code == 2
    assert [each["error"] is None for each in json.loads(out)] == [True, True, False]
    assert "[sandbox_not_found]" in err
    assert cli("run", "--keep", "--run", "r", "--name", "n", "base", "--", "true")[0] == 0
    assert cli("kill", "--run", "r")[0] == 0
    assert json.loads(cli("ls", "--run", "r")[1]) == []
    for wrong in ((), ("--all", "--run", "r"), ("x", "--all")):
        assert cli("kill", *wrong)[0] == 2


def test_keys(cli: Cli) -> None:
    made = cli("key", "create", "for a friend")[1].strip()
    assert made.startswith("dsk_")
    assert cli("ls", env={"DSEC_API_KEY": made})[0] == 0
    listed = json.loads(cli("key", "ls")[1])
    mine = next(each for each in listed if each.get("label") == "for a friend")
    assert made not in json.dumps(listed)
    assert "for a friend" in cli.on_a_terminal("key", "ls")
    assert cli("key", "revoke", mine["id"])[0] == 0
    code, _, err = cli("ls", env={"DSEC_API_KEY": made})
    assert code == 2
    assert "[unauthenticated]" in err
    assert cli("key", "revoke", "nothing")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "env", "code", "says"),
    [
        (("run", "nope", "--", "true"), {}, 2, "[environment_not_found]"),
        (("run", "--cpus", "-1", "base", "--", "true"), {}, 2, "cpus"),
        (("run", "--memory", "much", "base", "--", "true"), {}, 2, "not a size"),
        (("run", "-e", "novalue", "base", "--", "true"), {}, 2, "K=V"),
        (("run", "base"), {}, 2, "COMMAND"),
        (("run", "--unknown", "5", "base", "--", "true"), {}, 2, "No such option '--unknown'"),
        (("run", "base", "--unknown", "5", "--", "true"), {}, 2, "No such option '--unknown'"),
        (("exec", "0" * 24, "--unknown", "--", "true"), {}, 2, "No such option '--unknown'"),
        (("shell", "--unknown", "base"), {}, 2, "No such option '--unknown'"),
        (("exec", "0" * 24, "--", "true"), {}, 2, "[sandbox_not_found]"),
        (("nothing",), {}, 2, "No such command"),
        (("ls",), {"DSEC_URL": "http://127.0.0.1:9"}, 3, "dsec serve"),
        (("ls",), {"DSEC_URL": "ftp://x"}, 2, "not a URL"),
    ],
)
def test_errors(cli: Cli, arguments: tuple[str, ...], env: dict[str, str], code: int, says: str) -> None:
    found, out, err = cli(*arguments, env=env)
    assert (found, out) == (code, "")
    assert says in err
    assert "Traceback" not in err


@pytest.mark.root
@pytest.mark.parametrize("state", ["/dev/null", "/proc/none"])
def test_a_state_directory_that_can_not_be(cli: Cli, state: str) -> None:
    code, _, err = cli("serve", "--port", "0", "--state", state)
    assert code == 2
    assert "[invalid_request]" in err
    assert "--state" in err
    assert "Traceback" not in err
    assert "nothing to take back" in cli("host", "undo", "--state", "/proc/none")[1]


def test_help_and_version(cli: Cli) -> None:
    assert "Exit codes" in cli("--help")[1]
    assert cli("run", "--help")[0] == 0
    assert cli("version")[0] == 0
    assert set(json.loads(cli("version", "--json")[1])) == {"dsec", "python"}


def test_quickness_of_help() -> None:
    """`dsec --help` imports neither the transport nor the server."""
    program = "import sys, dsec.cli.main; print('\\n'.join(sys.modules))"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert not {"aiohttp", "litestar", "uvicorn", "rich.table", "dsec.app"} & set(modules.stdout.split())


def test_numbers_for_people() -> None:
    assert [size(text) for text in ("512", "1k", "2GiB", "1.5G", "3mb")] == [512, 1024, 2 << 30, 3 << 29, 3 << 20]
    with pytest.raises(click.BadParameter):
        size("lots")
    assert [readable(n) for n in (5, 2048, 1 << 30)] == ["5 B", "2 KiB", "1 GiB"]
    assert [age(n) for n in (5, 90, 7200, 200_000)] == ["5 s", "1.5 min", "2.0 h", "2.3 d"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("hello", "command_timeout"), ("burst", "16 sandboxes, mean reward 1.00 over 16"), ("resume", "worked")],
)
def test_the_examples_run(cli: Cli, name: str, says: str) -> None:
    outputs = [
        subprocess.run(
            [sys.executable, str(Path(__file__).parents[2] / "examples" / f"{name}.py"), "base"],
            capture_output=True,
            text=True,
            check=True,
            timeout=180,
            env=cli.env,
        ).stdout
        for _ in range(2)
    ]
    assert says in outputs[0]
    assert outputs[0] == outputs[1]
    cli("kill", "--all")


def test_events(cli: Cli) -> None:
    box = cli.sandbox()
    assert cli("exec", box, "--", "sh", "-c", "exit 3")[0] == 3
    following = subprocess.Popen(
        cli.command("events", "-f", box), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=cli.env
    )
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["type"] == "created"
    assert cli("kill", box)[0] == 0
    rest = [json.loads(line) for line in following.stdout.read().splitlines()]
    following.stdout.close()
    assert following.wait(120) == 0
    types = [each["type"] for each in rest]
    assert types == ["command_started", "first_exec", "command_ended", "ending", "ended"]
    assert [json.loads(line) for line in cli("events", "--after", "1", box)[1].splitlines()] == rest
    shown = cli.on_a_terminal("events", box)
    assert "create_ms=" in shown
    assert "exit_code=3" in shown
    assert cli("events", "0" * 24)[0] == 2


def test_logs_and_attach(cli: Cli) -> None:
    box = cli.sandbox()

    async def start() -> None:
        async with cli.server.client() as client:
            sandbox = await client.connect(box)
            command = await sandbox.commands.start(
                ["sh", "-c", "echo begun; cat; echo bad >&2; exit 5"], key="job", stdin=True
            )
            await command.detach()

    cli.call(start())
    code, out, err = cli("logs", box, "job")
    assert (code, out) == (0, "begun\n")
    assert "runs on" in err
    listed = json.loads(cli("logs", box)[1])
    assert [(each["key"], each["argv0"], "pid" in each) for each in listed] == [("job", "sh", True)]
    assert "running" in cli.on_a_terminal("logs", box)
    assert [each["key"] for each in json.loads(cli("inspect", box)[1])[0]["commands"]] == ["job"]
    assert cli("attach", box, "job", stdin=b"typed\n") == (5, "begun\ntyped\n", "bad\n")
    assert cli("logs", "--follow", box, "job") == (5, "begun\ntyped\n", "bad\n")
    listed = json.loads(cli("logs", box)[1])
    assert [(each["exit_code"], each["output_bytes"]) for each in listed] == [(5, 16)]
    assert cli("attach", box, "nothing")[0] == 2


def test_an_interrupt_leaves_an_attached_command_running(cli: Cli) -> None:
    box = cli.sandbox()

    async def start() -> None:
        async with cli.server.client() as client:
            sandbox = await client.connect(box)
            await (await sandbox.commands.start(["sh", "-c", "echo begun; sleep 60"], key="job")).detach()

    cli.call(start())
    process = subprocess.Popen(
        cli.command("attach", "--no-stdin", box, "job"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=cli.env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"left running" in err
    assert [each["key"] for each in json.loads(cli("inspect", box)[1])[0]["commands"]] == ["job"]


def test_inspect(cli: Cli) -> None:
    box = cli.sandbox()
    (found,) = json.loads(cli("inspect", box)[1])
    assert (found["id"], found["spec"]["labels"], found["commands"]) == (box, {"made": "by-test"}, [])
    assert found["usage"]["memory_bytes"] > 0
    assert "spec.labels.made" in cli.on_a_terminal("inspect", box)
    cli("kill", box)
    (found,) = json.loads(cli("inspect", box)[1])
    assert (found["state"], found["cause"]) == ("ended", "deleted")
    assert "usage" not in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(cli: Cli, shell: str) -> None:
    code, out, _ = cli("completion", shell)
    assert code == 0
    assert "_DSEC_COMPLETE" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [("dsec ", "events"), ("dsec events ", "ID"), ("dsec shell ", "base"), ("dsec run ba", "base")],
)
def test_completion_knows_verbs_ids_and_environments(cli: Cli, words: str, expected: str) -> None:
    box = cli.sandbox()
    env = {"_DSEC_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    code, out, _ = cli(env=env | {"DSEC_COMPLETE_S": "60"})
    assert code == 0
    assert (box if expected == "ID" else expected) in {line.partition(",")[2] for line in out.splitlines()}


def test_completion_waits_for_nobody(cli: Cli) -> None:
    env = {"_DSEC_COMPLETE": "bash_complete", "COMP_WORDS": "dsec events ", "COMP_CWORD": "2"}
    code, out, err = cli(env={**env, "DSEC_URL": "http://127.0.0.1:9"})
    assert (code, out.strip(), err) == (0, "", "")


def test_errors_say_where_to_read_on(cli: Cli) -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    err = cli("exec", "0" * 24, "--", "true")[2]
    assert "docs/errors.md#sandbox_not_found" in err
    assert "## `sandbox_not_found`" in text

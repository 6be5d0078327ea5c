"""What the stock SWE-ReX client does against a server: cases are run by name in that client's own virtual environment,
`python cases.py CASE HOST TOKEN ...`, each with its own host or token. A case fails by an exception; for each there is
a JSON line of its name, and what went wrong with it."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from swerex.deployment.remote import RemoteDeployment
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

Case = Callable[[RemoteRuntime], Awaitable[None]]
CASES: dict[str, Case] = {}
PATIENCE_S = 300.0
ANSWER_S = 120.0


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


async def opened(runtime: RemoteRuntime, name: str = "default") -> None:
    response = await runtime.create_session(CreateBashSessionRequest(session=name))
    assert response.session_type == "bash"


@case
async def alive(runtime: RemoteRuntime) -> None:
    assert await runtime.is_alive(timeout=ANSWER_S)
    await runtime.wait_until_alive(timeout=ANSWER_S)
    wrong = RemoteRuntime(auth_token="wrong", host=runtime._config.host, timeout=ANSWER_S)
    answer = await wrong.is_alive()
    assert not answer
    assert "401" in answer.message


@case
async def state_is_kept(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    assert (await runtime.run_in_session(BashAction(command="cd /tmp; export A='x y'; b() { echo f; }"))).exit_code == 0
    result = await runtime.run_in_session(BashAction(command='pwd; echo "$A"; b'))
    assert result.output == "/tmp\nx y\nf\n"
    assert result.exit_code == 0
    assert result.expect_string == "SHELLPS1PREFIX"


@case
async def several_sessions(runtime: RemoteRuntime) -> None:
    await opened(runtime, "one")
    await opened(runtime, "two")
    await runtime.run_in_session(BashAction(command="V=1", session="one"))
    for name, expected in (("one", "1\n"), ("two", "\n")):
        assert (await runtime.run_in_session(BashAction(command="echo $V", session=name))).output == expected


@case
async def session_errors(runtime: RemoteRuntime) -> None:
    with pytest.raises(SessionDoesNotExistError):
        await runtime.run_in_session(BashAction(command="true", session="nope"))
    with pytest.raises(SessionDoesNotExistError):
        await runtime.close_session(CloseBashSessionRequest(session="nope"))
    await opened(runtime)
    with pytest.raises(SessionExistsError):
        await opened(runtime)
    await runtime.close_session(CloseBashSessionRequest())
    with pytest.raises(SessionDoesNotExistError):
        await runtime.run_in_session(BashAction(command="true"))
    await opened(runtime)


@case
async def exit_codes(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    with pytest.raises(NonZeroExitCodeError, match=r"told: .*exit code 3"):
        await runtime.run_in_session(BashAction(command="(exit 3)", error_msg="told"))
    assert (await runtime.run_in_session(BashAction(command="(exit 4)", check="silent"))).exit_code == 4
    assert (await runtime.run_in_session(BashAction(command="(exit 5)", check="ignore"))).exit_code is None
    assert (await runtime.run_in_session(BashAction(command="nosuchprogram", check="silent"))).exit_code == 127


@case
async def output_is_whole(runtime: RemoteRuntime) -> None:
    await opened(runtime)

    async def out(command: str) -> str:
        return (await runtime.run_in_session(BashAction(command=command))).output

    assert await out("printf 'no newline'") == "no newline"
    assert await out("echo a\necho b") == "a\nb\n"
    assert await out("cat <<'EOF'\n$x `y` \"z\" '\nEOF") == '$x `y` "z" \'\n'
    assert await out("# only a comment\n") == ""
    assert await out("echo é; echo '!!'") == "é\n!!\n"
    assert await out("echo EXITCODESTART7EXITCODEEND SHELLPS1PREFIX") == "EXITCODESTART7EXITCODEEND SHELLPS1PREFIX\n"
    assert await out("PS1='mine> ' PS2='more> '; echo x") == "x\n"
    assert await out("for i in 1 2; do\n  echo $i\ndone") == "1\n2\n"
    assert len(await out("head -c 3000000 /dev/zero | tr '\\0' x")) == 3_000_000
    assert await out("printf '\\377'") == "\\xff"
    assert await out("echo err >&2") == "err\n"


@case
async def syntax_errors(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    with pytest.raises(BashIncorrectSyntaxError) as caught:
        await runtime.run_in_session(BashAction(command="echo 'unfinished"))
    assert "unexpected EOF" in caught.value.extra_info["bash_stderr"]
    assert (await runtime.run_in_session(BashAction(command="echo on"))).output == "on\n"


async def appears(runtime: RemoteRuntime, path: str) -> None:
    deadline = time.monotonic() + ANSWER_S
    while (await runtime.execute(Command(command=["test", "-e", path]))).exit_code:
        assert time.monotonic() < deadline, path
        await asyncio.sleep(0.05)


@case
async def timeout_and_interrupt(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    with pytest.raises(CommandTimeoutError):
        await runtime.run_in_session(
            BashAction(command="echo begun; touch /tmp/begun; sleep 1000; echo next", timeout=0.5)
        )
    await appears(runtime, "/tmp/begun")
    with pytest.raises(SwerexException, match="interrupt it first"):
        await runtime.run_in_session(BashAction(command="echo no"))
    result = await runtime.run_in_session(BashInterruptAction(timeout=30))
    assert "begun" in result.output
    assert "next" not in result.output
    assert (await runtime.run_in_session(BashAction(command="echo on"))).output == "on\n"


async def ends_late(runtime: RemoteRuntime, last: str) -> None:
    """A command of the session ends after its timeout: when this returns its shell waits for the next."""
    command = f"until test -e /tmp/go; do sleep 0.05; done; rm /tmp/go; {last}; touch /tmp/over"
    with pytest.raises(CommandTimeoutError):
        await runtime.run_in_session(BashAction(command=command, timeout=0.2))
    await runtime.execute(Command(command=["touch", "/tmp/go"]))
    await appears(runtime, "/tmp/over")
    for _ in range(10):  # what the shell has to say after it comes while these come and go
        await runtime.execute(Command(command=["rm", "-f", "/tmp/over"]))


@case
async def a_command_that_ends_after_its_timeout(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    for action in (BashAction(command="echo on"), BashAction(command="echo on", is_interactive_command=True)):
        await ends_late(runtime, "echo late")
        assert (await runtime.run_in_session(action)).output.strip() == "on"
    await ends_late(runtime, "true")
    assert (await runtime.run_in_session(BashInterruptAction())).output == ""


@case
async def interrupt_of_a_stubborn_one(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    with pytest.raises(CommandTimeoutError):
        await runtime.run_in_session(BashAction(command="bash -c 'trap \"\" INT TSTP; sleep 1000'", timeout=0.5))
    await runtime.run_in_session(BashInterruptAction(timeout=0.2, n_retry=2))
    assert (await runtime.run_in_session(BashAction(command="echo on"))).output == "on\n"


@case
async def interactive_program(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    program = "bash --norc --noediting -i"
    ask = {"is_interactive_command": True, "timeout": ANSWER_S}
    await runtime.run_in_session(BashAction(command="export PS1='ask> '", timeout=ANSWER_S))
    started = await runtime.run_in_session(BashAction(command=f"PS1='ask> ' {program}", expect=["ask> "], **ask))
    assert started.expect_string == "ask> "
    answer = await runtime.run_in_session(BashAction(command="echo $((6 * 7))", expect=["ask> "], **ask))
    assert answer.output == "42"
    assert answer.exit_code == 0
    await runtime.run_in_session(BashAction(command="exit", is_interactive_quit=True, timeout=ANSWER_S))
    assert (await runtime.run_in_session(BashAction(command="echo on", timeout=ANSWER_S))).output == "on\n"


@case
async def shell_that_exits(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    with pytest.raises(SwerexException, match="exit code 7"):
        await runtime.run_in_session(BashAction(command="echo bye; exit 7"))
    with pytest.raises(SwerexException, match="has ended"):
        await runtime.run_in_session(BashAction(command="echo no"))
    await opened(runtime)
    assert (await runtime.run_in_session(BashAction(command="echo on"))).output == "on\n"


@case
async def startup_source(runtime: RemoteRuntime) -> None:
    await runtime.write_file(WriteFileRequest(path="/tmp/rc", content="PS1='mine> '\nexport FROM_RC=1\necho sourced\n"))
    response = await runtime.create_session(
        CreateBashSessionRequest(startup_source=["/tmp/rc"], startup_timeout=ANSWER_S)
    )
    assert "sourced" in response.output
    assert (await runtime.run_in_session(BashAction(command="echo $FROM_RC"))).output == "1\n"


@case
async def execute(runtime: RemoteRuntime) -> None:
    result = await runtime.execute(Command(command=["echo", "a b"]))
    assert (result.stdout, result.stderr, result.exit_code) == ("a b\n", "", 0)
    result = await runtime.execute(Command(command="echo o; echo e >&2; exit 3", shell=True))
    assert (result.stdout, result.stderr, result.exit_code) == ("o\n", "e\n", 3)
    merged = await runtime.execute(Command(command="echo o; echo e >&2", shell=True, merge_output_streams=True))
    assert (merged.stdout, merged.stderr) == ("o\ne\n", "")
    assert (await runtime.execute(Command(command="pwd", shell=True, cwd="/tmp"))).stdout == "/tmp\n"
    assert (await runtime.execute(Command(command="echo $X", shell=True, env={"X": "1"}))).stdout == "1\n"
    with pytest.raises(NonZeroExitCodeError, match="told"):
        await runtime.execute(Command(command="false", check=True, error_msg="told"))
    with pytest.raises(CommandTimeoutError):
        await runtime.execute(Command(command=["sleep", "1000"], timeout=0.3))
    with pytest.raises(FileNotFoundError):
        await runtime.execute(Command(command="no such program"))


@case
async def files(runtime: RemoteRuntime) -> None:
    await runtime.write_file(WriteFileRequest(path="/tmp/new/dir/f", content="é\n"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/new/dir/f"))).content == "é\n"
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/new/dir/f", encoding="latin-1"))).content == "Ã©\n"
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/tmp/nope"))
    with pytest.raises(LookupError):
        await runtime.read_file(ReadFileRequest(path="/tmp/new/dir/f", encoding="nope"))
    with pytest.raises(IsADirectoryError):
        await runtime.read_file(ReadFileRequest(path="/tmp"))
    await runtime.execute(Command(command="printf '\\377' > /tmp/bytes", shell=True))
    with pytest.raises(ValueError, match="utf-8"):
        await runtime.read_file(ReadFileRequest(path="/tmp/bytes"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/bytes", errors="replace"))).content == "\ufffd"


@case
async def uploads(runtime: RemoteRuntime) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "tree" / "sub").mkdir(parents=True)
        (root / "tree" / "empty").mkdir()
        (root / "tree" / "a").write_bytes(bytes(range(256)) * 4096)
        (root / "tree" / "sub" / "b").write_text("b")
        await runtime.upload(UploadRequest(source_path=str(root / "tree"), target_path="/up/tree"))
        await runtime.upload(UploadRequest(source_path=str(root / "tree" / "a"), target_path="/up/one/a"))
    listed = await runtime.execute(
        Command(command="cd /up && find . -type f | sort && ls tree && cmp tree/a one/a", shell=True)
    )
    assert listed.stdout == "./one/a\n./tree/a\n./tree/sub/b\na\nempty\nsub\n"
    assert listed.exit_code == 0
    with pytest.raises(ValueError, match="not a file"):
        await runtime.upload(UploadRequest(source_path="/no/such/source", target_path="/up/x"))


@case
async def close(runtime: RemoteRuntime) -> None:
    await opened(runtime)
    await runtime.close()
    with pytest.raises(SessionDoesNotExistError):
        await runtime.run_in_session(BashAction(command="true"))
    await opened(runtime)


async def run(name: str, host: str, token: str) -> None:
    address, _, port = host.rpartition(":")
    if "/" in port:
        deployment = RemoteDeployment(host=host, auth_token=token, timeout=ANSWER_S)
    else:
        deployment = RemoteDeployment(host=address, port=int(port), auth_token=token, timeout=ANSWER_S)
    await deployment.start()
    assert await deployment.is_alive()
    await CASES[name](deployment.runtime)
    await deployment.stop()


def main(words: list[str]) -> None:
    for name, host, token in zip(words[::3], words[1::3], words[2::3], strict=True):
        wrong = None
        try:
            asyncio.run(asyncio.wait_for(run(name, host, token), PATIENCE_S))
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  the test says it
            wrong = traceback.format_exc()
        sys.stdout.write(json.dumps({"case": name, "wrong": wrong}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

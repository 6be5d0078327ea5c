"""Commands, by E2B's client."""

from __future__ import annotations

import threading
import time

from case_kit import raises, run, until

from e2b import (
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxException,
    TimeoutException,
)


def case_run(box):
    result = box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    assert result.error is None


def case_exit_codes(box):
    error = raises(CommandExitException, lambda: box.commands.run("echo before; echo why >&2; exit 7"))
    assert (error.exit_code, error.stdout, error.stderr) == (7, "before\n", "why\n")
    assert raises(CommandExitException, lambda: box.commands.run("no-such-program")).exit_code == 127
    assert raises(CommandExitException, lambda: box.commands.run("kill -TERM $$")).exit_code == 143


def case_callbacks_stream(box):
    """Each line is seen before the next is written."""
    out, err = [], []

    def on_stderr(text):
        err.append(text)
        box.files.write(f"/tmp/seen-{len(err)}", "")

    box.commands.run(
        "for i in 1 2 3; do echo $i; echo e$i >&2; until test -e /tmp/seen-$i; do sleep 0.02; done; done",
        on_stdout=out.append,
        on_stderr=on_stderr,
    )
    assert out == ["1\n", "2\n", "3\n"]
    assert err == ["e1\n", "e2\n", "e3\n"]


def case_large_and_odd_output(box):
    assert len(box.commands.run("head -c 5000000 /dev/zero | tr '\\0' x").stdout) == 5_000_000
    assert box.commands.run("printf '\\xff\\xfeok'").stdout == "��ok"
    assert box.commands.run("for i in $(seq 500); do printf 'é€😀'; done").stdout == "é€😀" * 500


def case_background(box):
    handle = box.commands.run("echo started; sleep 0.5; echo done; exit 3", background=True)
    assert handle.pid > 0
    error = raises(CommandExitException, handle.wait)
    assert error.stdout == "started\ndone\n"
    assert error.exit_code == 3


def case_iterate(box):
    handle = box.commands.run("echo a; sleep 0.2; echo b >&2", background=True)
    assert [(out, err) for out, err, _ in handle] == [("a\n", None), (None, "b\n")]


def case_stdin(box):
    handle = box.commands.run("read -r a; echo $a; read -r b; echo got $b", background=True, stdin=True)
    box.commands.send_stdin(handle.pid, "one\n")
    handle.send_stdin(b"two\n") if hasattr(handle, "send_stdin") else box.commands.send_stdin(handle.pid, "two\n")
    assert handle.wait().stdout == "one\ngot two\n"


def case_close_stdin(box):
    handle = box.commands.run("cat; echo end", background=True, stdin=True)
    box.commands.send_stdin(handle.pid, "text\n")
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "text\nend\n"


def case_stdin_is_closed_by_default(box):
    assert box.commands.run("cat; echo end").stdout == "end\n"


def case_stream_input(box):
    if not hasattr(box.commands, "stream_input"):
        return
    handle = box.commands.run("head -c 300001 | wc -c", background=True, stdin=True)
    box.commands.stream_input(handle.pid, [b"x" * 100_000, "y" * 100_000, b"z" * 100_000, "!"])
    assert handle.wait().stdout.strip() == "300001"
    raises(NotFoundException, lambda: box.commands.stream_input(999_999, [b"x"]))


def case_users(box):
    assert box.commands.run("id -un; pwd; echo $HOME $USER").stdout == "root\n/root\n/root root\n"
    assert box.commands.run("id -un", user="nobody").stdout == "nobody\n"
    assert box.commands.run("id -un", user="user").stdout == "root\n"  # nobody of that name inside yet
    box.commands.run("echo user:x:1234:1234::/srv/user:/bin/bash >> /etc/passwd; echo user:x:1234: >> /etc/group")
    box.commands.run("install -d -o 1234 -g 1234 /srv/user")
    time.sleep(1.1)  # users inside are looked up again after a second
    assert box.commands.run("id -un; pwd", user="user").stdout == "user\n/srv/user\n"
    box.files.write("mine.txt", "x", user="user")
    assert box.files.get_info("/srv/user/mine.txt").owner == "user"
    raises(SandboxException, lambda: box.commands.run("true", user="ghost"), "ghost")


def case_cwd(box):
    assert box.commands.run("pwd", cwd="/usr/share").stdout == "/usr/share\n"
    box.commands.run("mkdir -p /root/below")
    assert box.commands.run("pwd", cwd="~/below").stdout == "/root/below\n"
    assert box.commands.run("pwd", cwd="below").stdout == "/root/below\n"
    raises(SandboxException, lambda: box.commands.run("pwd", cwd="/no/such/place"), "/no/such/place")


def case_login_shell(box):
    assert box.commands.run("shopt -q login_shell && echo login").stdout == "login\n"
    assert box.commands.run("echo $PATH").stdout.count(":") >= 3


def case_timeout_ends_everything(box):
    raises(TimeoutException, lambda: box.commands.run("sleep 1000 & sleep 1000", timeout=1))
    until(lambda: nothing_sleeps(box), "the end of both")


def nothing_sleeps(box):
    """A process may end while it is looked at."""
    return "sleep" not in box.commands.run("cat /proc/[0-9]*/comm 2>/dev/null; true").stdout


def case_no_timeout(box):
    assert box.commands.run("sleep 1.2; echo ok", timeout=0).stdout == "ok\n"


def case_kill(box):
    handle = box.commands.run("sleep 1000 & sleep 1000", background=True)
    assert handle.kill() is True
    assert raises(CommandExitException, handle.wait).exit_code == 137
    assert handle.kill() is False
    assert box.commands.kill(999_999) is False
    until(lambda: nothing_sleeps(box), "the end of both")


def case_list_and_connect(box):
    handle = box.commands.run("echo first; read -r x; echo $x", background=True, stdin=True)
    listed = {process.pid: process for process in box.commands.list()}
    assert listed[handle.pid].cmd == "/bin/bash"
    assert listed[handle.pid].args[:2] == ["-l", "-c"]
    handle.disconnect()
    again = Sandbox.connect(box.sandbox_id).commands.connect(handle.pid)
    box.commands.send_stdin(handle.pid, "second\n")
    assert again.wait().stdout == "first\nsecond\n"
    assert handle.pid not in [process.pid for process in box.commands.list()]
    raises(NotFoundException, lambda: box.commands.connect(handle.pid))


def case_connect_after_much_output(box):
    handle = box.commands.run(
        "head -c 400000 /dev/zero | tr '\\0' x; touch /tmp/mark; "
        "until test -e /tmp/go; do sleep 0.1; done; echo; echo last",
        background=True,
    )
    handle.disconnect()
    until(lambda: box.files.exists("/tmp/mark"), "the output")
    again = box.commands.connect(handle.pid)
    box.files.write("/tmp/go", "")
    assert again.wait().stdout.endswith("last\n")


def case_two_readers(box):
    handle = box.commands.run("read -r x; echo $x; exit 5", background=True, stdin=True)
    other = box.commands.connect(handle.pid)
    box.commands.send_stdin(handle.pid, "both\n")
    assert raises(CommandExitException, handle.wait).stdout == "both\n"
    assert raises(CommandExitException, other.wait).exit_code == 5


def case_sandbox_ends_under_a_command(_):
    box = Sandbox.create()
    handle = box.commands.run("sleep 1000", background=True)
    threading.Timer(0.3, lambda: Sandbox.kill(box.sandbox_id)).start()
    raises(SandboxException, handle.wait, "not found")


def case_no_bash(box):
    box.commands.run("mv /bin/bash /bin/bash.away")
    raises(SandboxException, lambda: box.commands.run("true"), "no /bin/bash")


if __name__ == "__main__":
    run(globals())

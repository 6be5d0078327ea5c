"""Function calls: nothing leaks from one call to the next or to one beside it, neither warm parent nor warden can be
reached from a worker, and what a hostile library can do in the warm parent is next to nothing."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from functions_kit import FORGER, HOSTILE, LATE, LINKED, NEW_NAMESPACES, SHARER, TRY, module_layer

from dsec import Client, FunctionCall, FunctionResult
from dsec.errors import Unsupported
from server_kit import Server, serving, until
from trees import link_store

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    top = tmp_path_factory.mktemp("functions")
    (top / "state").mkdir(mode=0o700)
    link_store(debian_store, top / "state" / "store")  # a store of its own
    (top / "state" / "native").symlink_to(debian_store.parent / "native")
    hostile = HOSTILE.replace("FLAGS", repr(NEW_NAMESPACES))
    (top / "layer.tar").write_bytes(module_layer(hostile=hostile, forger=FORGER, sharer=SHARER, late=LATE).getvalue())
    with serving(top / "state") as made:
        endpoint = made.endpoint()
        with Client(endpoint.url, endpoint.api_key) as client:
            client.catalog.build(top / "layer.tar", "hostile@1")
            client.catalog.create_environment("hostile", ["hostile@1", "env:debian"])
            (top / "linked.tar").write_bytes(module_layer("/etc", linked=LINKED).getvalue())
            client.catalog.build(top / "linked.tar", "linked@1")
            client.catalog.create_environment("linked", ["linked@1", "env:debian"])
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as client:
        yield client


def ran(client: Client, source: str, *args: Any, **fields: Any) -> Any:
    """What the function `attack` of a source returns."""
    return client.function(TRY + source, "attack", **fields).remote(*args)


def shell(client: Client, source: str) -> FunctionResult:
    """A script of its own, in a worker that executes it."""
    return client.function(source, language="bash").run()


# --- from one call to the next ---


def test_globals_modules_and_environment_are_fresh(client: Client) -> None:
    source = """
import builtins, math, sys, random
def attack(write):
    seen = [hasattr(builtins, "leak"), hasattr(math, "leak"), "leak" in sys.modules, "LEAK" in os.environ]
    seen.append(os.getcwd() != "/tmp" or os.umask(0o22) == 0)
    if write:
        builtins.leak = math.leak = sys.modules["leak"] = os.environ["LEAK"] = "x"
        os.chdir("/"), os.umask(0)
        math.sqrt = None
    return seen
"""
    for _ in range(6):
        assert not any(ran(client, source, True))


def test_files_are_gone(client: Client) -> None:
    source = """
def attack():
    seen = [os.listdir(top) for top in ("/tmp", "/var/tmp", "/dev/shm")]
    for top in ("/tmp", "/var/tmp/deep", "/dev/shm"):
        os.makedirs(top, exist_ok=True)
        open(top + "/leak", "w").write("x")
    return seen
"""
    for _ in range(6):
        assert ran(client, source) == [[".shm"], [".shm"], []]
    for _ in range(6):
        result = shell(client, "ls -A /tmp /dev/shm; touch /tmp/leak /dev/shm/leak")
        assert b"leak" not in result.stdout, result.stdout


def test_nothing_else_can_be_written(client: Client) -> None:
    source = """
def attack():
    tops = [top for top, names, files in os.walk("/") if not top.startswith(("/proc", "/tmp"))]
    return [top for top in tops if os.access(top, os.W_OK)] + [attempt(open, "/usr/bin/python3", "r+b")]
"""
    assert ran(client, source) == ["EACCES"]
    assert shell(client, "touch /x /etc/x /run/x /dev/x /root/x 2>&1; ls /x /etc/x").exit_code != 0


def test_shared_memory_and_queues_are_gone(client: Client) -> None:
    source = """
def attack():
    seen = []
    for get, arguments in ((29, (4096,)), (64, (1,)), (68, ())):
        for flags in (0, 0o1666):
            rest = (flags,)
            seen.append(syscall(get, 4711, *arguments, *rest))
    name = ctypes.create_string_buffer(b"leak")
    seen.append(syscall(240, ctypes.addressof(name), 0, 0, 0))
    seen.append(syscall(240, ctypes.addressof(name), 0o102, 0o666, 0))
    return seen
"""
    for _ in range(4):
        found = ran(client, source)
        assert found == ["ENOENT", "done", "ENOENT", "done", "ENOENT", "done", "ENOENT", "done"], found


def test_what_all_calls_begin_from_can_not_be_written(client: Client) -> None:
    """The warm parent's memory lies in a file, which every worker has mapped privately."""
    source = """
import string
def attack():
    maps = [line.split(None, 5) for line in open("/proc/self/maps")]
    ours = [(place, kind) for place, kind, _, _, _, *name in maps if name and "memfd:warm" in name[0]]
    seen = [string.digits[:5] + string.digits[5:], sorted({kind for _, kind in ours})]
    for place, kind in ours:
        start, end = (int(word, 16) for word in place.split("-"))
        if kind == "rw-p":
            seen.append(syscall(28, start, 4096, 9))  # MADV_REMOVE: a hole in the file
            seen.append(syscall(25, start, 0, 4096, 1, 0))  # mremap of nothing: a second, shared mapping
        seen.append(attempt(os.open, "/proc/self/map_files/" + place, os.O_RDWR))
    text = id(string.digits)
    for at in range(text, text + 80):  # also what was read ahead of being written
        if ctypes.string_at(at, 10) == b"0123456789":
            ctypes.memmove(at, b"leaked....", 10)
    return [*seen, string.digits]
"""
    for _ in range(6):
        before, kinds, *tried, after = ran(client, source, imports=["string"])
        assert (before, after, kinds) == ("0123456789", "leaked....", ["r--p", "rw-p"])
        assert len(tried) > 20
        assert "done" not in tried


def test_processes_end_with_their_call(client: Client) -> None:
    source = """
import sys, time
def attack(marker):
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", marker])
            os._exit(0)
    time.sleep(0.05)
    return others
"""
    marker = "86398.25"
    for _ in range(4):
        assert ran(client, source, marker) == []
    shell(client, f"setsid sleep {marker} & setsid nohup sleep {marker} >/dev/null 2>&1 & disown -a")
    until(lambda: not host_processes(marker))


def host_processes(marker: str) -> list[str]:
    """Processes of this host with a word in their command line, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_worker_has_only_its_own_descriptors(client: Client) -> None:
    source = """
def attack():
    return sorted(os.readlink("/proc/self/fd/" + name).partition(":")[0] for name in os.listdir("/proc/self/fd")
                  if os.path.exists("/proc/self/fd/" + name))
"""
    assert ran(client, source) == ["/dev/null", "pipe", "pipe", "socket"]
    result = shell(client, "exec ls -l /proc/self/fd")
    assert b"socket" not in result.stdout, result.stdout


# --- upwards ---


def test_a_worker_holds_no_privilege(client: Client) -> None:
    source = """
def attack():
    status = dict(line.rstrip().split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line.rstrip())
    names = ("CapEff", "CapPrm", "CapInh", "CapAmb", "NoNewPrivs")
    return [status[name] for name in names] + [os.getuid(), os.getgid()]
"""
    nothing = "0" * 16
    assert ran(client, source) == [nothing] * 4 + ["1", 65534, 65534]
    said = shell(client, "cat /proc/self/status").stdout.decode()
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert f"{name}:\t{nothing}\n" in said


def test_neither_parent_nor_warden_can_be_reached(client: Client) -> None:
    source = """
import signal
def attack():
    seen = {"ppid": os.getppid(), "pids": sorted(int(n) for n in os.listdir("/proc") if n.isdigit())}
    seen["kill all"] = attempt(os.kill, -1, signal.SIGKILL)
    for pid in range(1, 400):
        if pid != os.getpid():
            seen[attempt(os.kill, pid, signal.SIGKILL)] = True
    seen["trace"] = syscall(101, 16, 1, 0, 0)
    seen["memory"] = attempt(open, "/proc/1/mem", "r+b")
    seen["files"] = attempt(os.listdir, "/proc/1/fd")
    seen["namespaces"] = attempt(os.open, "/proc/1/ns/mnt", 0)
    return seen, os.getpid()
"""
    for _ in range(3):
        seen, pid = ran(client, source)
        assert seen.pop("ppid") == 0
        assert seen.pop("pids") == [1, pid]
        assert seen == {
            "kill all": "ESRCH",
            "EPERM": True,
            "ESRCH": True,
            "trace": "EPERM",
            "memory": "EACCES",
            "files": "EACCES",
            "namespaces": "EACCES",
        }


def test_a_worker_makes_and_enters_no_namespace(client: Client) -> None:
    source = """
def attack(flags):
    own = [os.open("/proc/self/ns/" + name, os.O_RDONLY) for name in ("mnt", "pid", "ipc", "uts", "user", "net")]
    seen = {syscall(308, fd, 0) for fd in own}
    seen |= {syscall(272, flag) for flag in flags} | {syscall(56, flag | 17, 0, 0, 0, 0) for flag in flags}
    return sorted(seen), syscall(435, ctypes.addressof(ctypes.create_string_buffer(88)), 88)
"""
    seen, clone3 = ran(client, source, list(NEW_NAMESPACES))
    assert set(seen) <= {"EPERM", "EINVAL"}, seen
    assert clone3 == "ENOSYS"


def test_there_is_no_network(client: Client) -> None:
    source = """
def attack():
    return [attempt(socket.socket, family, socket.SOCK_STREAM) for family in (socket.AF_INET, socket.AF_INET6, 16, 40)]
"""
    assert set(ran(client, source)) == {"EAFNOSUPPORT"}


def test_calls_side_by_side_do_not_meet(client: Client) -> None:
    source = """
import time
def attack(role):
    until = time.monotonic() + 3
    if role == "serve":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\\0meeting"), listener.listen()
        open("/tmp/here", "w").close(), open("/dev/shm/here", "w").close()
        listener.settimeout(3)
        return attempt(listener.accept)
    seen = set()
    while time.monotonic() < until:
        other = socket.socket(socket.AF_UNIX)
        seen.add(attempt(other.connect, "\\0meeting"))
        other.close()
        seen |= {"file" for top in ("/tmp", "/dev/shm") if os.path.exists(top + "/here")}
        time.sleep(0.02)
    return sorted(seen)
"""
    answers: dict[str, Any] = {}

    def play(role: str) -> None:
        try:
            answers[role] = ran(client, source, role)
        except Exception as error:  # noqa: BLE001 (shown by the assertion)
            answers[role] = error

    threads = [threading.Thread(target=play, args=[role]) for role in ("serve", "visit")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "TimeoutError" in str(answers["serve"]), answers
    assert set(answers["visit"]) <= {"ECONNREFUSED", "EPERM"}, answers


# --- the result channel ---


@pytest.mark.parametrize(
    "forged",
    [
        "struct.pack('<I', 4) + b'\\xff\\xff\\xff\\xff'",
        "struct.pack('<I', 0xffffffff)",
        "struct.pack('<I', 7) + b'\\x81\\xa5value'",
        "struct.pack('<I', 12) + b'\\x81\\xa5value\\xdd\\xff\\xff\\xff\\xff\\x01'",
        "struct.pack('<I', 100007) + b'\\x81\\xa5value' + b'\\x91' * 100000",
        "struct.pack('<I', 1) + b'\\x01'",
        "struct.pack('<I', 0)",
    ],
)
def test_a_forged_answer_is_refused(client: Client, forged: str) -> None:
    source = f"def attack():\n    os.write(3, {forged})\n    os._exit(0)\n"
    result = client.function(TRY + source, "attack").run(FunctionCall())
    assert (result.ok, result.infra) == (False, False), result
    assert result.error is not None
    assert result.error.type in ("ResultRefused", "NoResult")
    assert client.function("math:sqrt").remote(4.0) == 2.0


def test_a_forged_answer_is_its_own_and_no_more(client: Client) -> None:
    """Code may say of itself what it likes, but nothing besides: no files that weren't asked for, no second answer."""
    source = """
def attack():
    answer = b"\\x82\\xa5value\\x07\\xa5files\\x81\\xa3bad\\xc4\\x01x"
    for _ in range(3):
        os.write(3, struct.pack("<I", len(answer)) + answer)
    return 8
"""
    result = client.function(TRY + source, "attack").run(FunctionCall())
    assert result.ok
    assert result.value == 7
    assert result.files == {}
    assert client.function("math:sqrt").remote(9.0) == 3.0


# --- a hostile library in the warm parent ---


def test_what_a_library_can_do_when_it_is_imported(client: Client) -> None:
    source = "import hostile\ndef attack():\n    return hostile.found"
    found = client.function(source, "attack", environment="hostile", imports=["hostile"]).remote()
    assert found.pop("uid") == 65534
    assert found.pop("NoNewPrivs") == "1"
    assert found.pop("Seccomp") == "2"
    joining = 1 << 21 | 1 << 18  # SYS_ADMIN and SYS_CHROOT of its own user namespace: what joining a cell takes
    assert int(found.pop("CapEff"), 16) == joining
    assert int(found.pop("CapBnd"), 16) & ~joining == 1 << 6 | 1 << 7 | 1 << 8  # set-uid programs gain nothing of them
    assert found.pop("proc") == ["self", "thread-self"]
    assert "done" not in found.values(), found


def test_a_library_that_forges_messages_gains_nothing(client: Client) -> None:
    echo = "def attack(x):\n    return x"
    with pytest.raises(Unsupported, match="ended"):  # its warden talks to it no more
        client.function(echo, "attack", environment="hostile", imports=["forger"]).remote(1)
    late = client.function(echo, "attack", environment="hostile", imports=["late"])
    for number in range(8):
        result = late.run(FunctionCall(args=[number]))
        assert result.infra or result.value == number, result
    assert client.function("math:sqrt").remote(16.0) == 4.0  # others don't notice


def test_an_image_whose_tmp_is_a_link(client: Client) -> None:
    """What is fetched comes from the cell's own /tmp, seen from outside, not from where the image's link leads."""
    function = client.function("import linked\ndef attack(): return linked.found", "attack", environment="linked")
    assert function.remote() == ""
    script = "cat /tmp/passwd 2>/dev/null; echo mine > /tmp/group; ls /tmp"
    result = client.function(script, language="bash", environment="linked", take=["passwd", "group"]).run()
    assert result.files == {"group": b"mine\n"}
    assert b"root" not in result.stdout


def test_memory_that_calls_would_share_is_refused(client: Client) -> None:
    with pytest.raises(Unsupported, match="share"):
        client.function("math:sqrt", environment="hostile", imports=["sharer"]).remote(1.0)


# --- the server that answers ---


def asked(server: Server, source: str, calls: int = 1, name: str = "attack") -> Iterator[dict[str, Any]]:
    """Results as JSON, each when it is asked for."""
    endpoint = server.endpoint()
    function = {"environment": "debian", "source": source, "name": name}
    body = json.dumps({"function": function, "calls": [{}] * calls, "ordered": True}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.url}/v1/functions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            yield json.loads(line)


@pytest.mark.parametrize(
    "value",
    ["b'\\xc7\\x01\\x05x'", "b'\\xde\\x00\\x50' + b''.join(b'\\x92\\x01%c\\x01' % n for n in range(80))"],
    ids=["an extension", "keys that may collide"],
)
def test_a_value_that_json_can_not_say_is_its_calls_own_matter(server: Server, client: Client, value: str) -> None:
    """Neither is building it the server's trouble, nor does it end the calls beside it."""
    source = f"""
import os, struct
def attack():
    answer = b"\\x81\\xa5value" + {value}
    os.write(3, struct.pack("<I", len(answer)) + answer)
    os._exit(0)
"""
    found = list(asked(server, source, calls=3))
    assert [each["error"]["type"] for each in found] == ["ResultRefused"] * 3
    if "join" in value:
        error = client.function(source, "attack").run(FunctionCall()).error
        assert error is not None
        assert error.type == "ResultRefused"


def test_results_that_nobody_reads_do_not_pile_up(server: Server) -> None:
    """Calls wait until their caller takes what has come: else a batch's results would fill the server's memory."""
    source = "import time\nprint(time.time())\nprint('x' * 1_000_000)"
    results = asked(server, source, calls=150, name="")
    begun = [float(base64.b64decode(next(results)["stdout"]).split(b"\n")[0])]
    time.sleep(4)
    resumed = time.time()
    begun += [float(base64.b64decode(each["stdout"]).split(b"\n")[0]) for each in results]
    assert len(begun) == 150
    assert sum(each > resumed for each in begun) > 50

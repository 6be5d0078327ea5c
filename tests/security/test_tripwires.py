"""Tripwires in real sandboxes: what an agent does is seen, and honest work isn't."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import io
import os
import select
import struct
import tarfile
import threading
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsec.app import Config, open_edge, read_config
from dsec.edge import post, sentry
from dsec.edge.node import Edge
from dsec.edge.tripwires import AGAIN_S
from dsec.errors import Conflict, SandboxEnded, Unsupported
from dsec.kernel.fanotify import Group, Mask, open_inside
from dsec.plan import tripwires as decisions
from dsec.plan.tripwires import rule_sets
from dsec.ports import WatchedHost
from dsec.spec.causes import Cause
from dsec.spec.events import EventType
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, SandboxSpec, State
from dsec.spec.tripwires import Action, DecoyRule, MaskedRule, PathRule, ProcessRule, Severity

pytestmark = pytest.mark.root
PATIENCE_S = 120.0


class Box:
    """A watched sandbox."""

    def __init__(self, edge: Edge, sandbox_id: str) -> None:
        self.edge = edge
        self.id = sandbox_id

    async def sh(self, script: str, user: str | None = None) -> str:
        command = await self.edge.exec(self.id, ExecSpec(argv=["bash", "-c", script], user=user, merge_stderr=True))
        pieces = [piece.data async for piece in command.events() if isinstance(piece, Chunk)]
        return b"".join(pieces).decode(errors="replace")

    @asynccontextmanager
    async def running(self, *argv: str) -> AsyncIterator[None]:
        """A program that is there to be looked at, however late that is."""
        command = await self.edge.exec(self.id, ExecSpec(argv=list(argv)))
        try:
            yield
        finally:
            await self.edge.signal(self.id, command.key, 9, "all")

    async def write(self, path: str, data: bytes) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield data

        await self.edge.write_file(self.id, path.encode(), chunks(), parents=True)

    def hits(self, rule: str | None = None) -> list[dict[str, Any]]:
        return [
            event.data
            for event in self.edge.events(self.id)
            if event.type == "tripwire" and rule in {None, event.data["rule"]}
        ]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def hit(self, rule: str, **fields: object) -> dict[str, Any]:
        """Wait for a hit with these fields."""

        def found() -> list[dict[str, Any]]:
            return [hit for hit in self.hits(rule) if all(hit[name] == value for name, value in fields.items())]

        await self.until(found)
        return found()[0]

    async def settle(self) -> None:
        """Wait until everything that happened was looked at: a sign of our own comes through every queue last."""
        before = self.edge.tripwires(self.id).hits.get("sign", 0)
        await self.sh("mkdir -p /sign; echo > /sign/written; mv /sign/written /sign/moved; rm /sign/moved")
        await self.until(lambda: self.edge.tripwires(self.id).hits.get("sign", 0) > before)
        await asyncio.sleep(4 * sentry.PAUSE_S)


SIGN = PathRule(id="sign", paths=["/sign/**"], severity=Severity.INFO)


@pytest.fixture
def config(debian_state: Path) -> Config:
    return read_config(debian_state)


@asynccontextmanager
async def watched(config: Config, *tripwires: Any, keep: bool = False, **fields: Any) -> AsyncIterator[Box]:
    async with open_edge(config, keep=keep) as edge:
        spec = SandboxSpec(environment="debian", tripwires=list(tripwires), **fields)
        yield Box(edge, (await edge.create(spec, project="p")).sandbox.id)


async def test_what_is_seen(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "FIRST", 1000)  # every hit is an event
    rules = (
        "default",
        "swe",
        DecoyRule(id="own-decoy", path="/srv/answers.txt", content="{canary}", mode="644"),
        PathRule(id="reading", paths=["/srv/secret/**"], on=["read"]),
        ProcessRule(id="argv", exe=["**/sleep"], argv=["sleep 13*"]),
        SIGN,
    )
    async with watched(config, *rules) as box:
        armed = next(event.data for event in box.edge.events(box.id) if event.type == "tripwires_armed")
        assert armed["canary"] in await box.sh("cat /srv/answers.txt")
        await box.hit("own-decoy", act="read", path="/srv/answers.txt")

        # evidence: a process that lives on is known with all that it is
        async with box.running("bash", "-c", "exec 3< ~/.ssh/id_rsa; sleep 1000; true"):
            seen = await box.hit("decoy-ssh-key", severity="high", action="flag")
        assert seen["process"]["exe"] == "/usr/bin/bash"
        assert seen["process"]["uid"] == 0
        assert seen["process"]["argv"][:2] == ["bash", "-c"]
        assert seen["process"]["parents"][-1]["pid"] == 1
        await box.sh("ln ~/.aws/credentials /tmp/other; cat /tmp/other")
        await box.hit("decoy-cloud-credentials", path="/tmp/other")

        # files, by name, by other names, by renaming and by removing
        await box.sh("echo x >> /usr/bin/env")
        await box.hit("shell-or-interpreter-replaced", act="write", path="/usr/bin/env")
        await box.sh("cp /usr/bin/true /usr/bin/x; mv /usr/bin/x /usr/bin/git")
        await box.hit("shell-or-interpreter-replaced", path="/usr/bin/git")
        await box.sh("ln /usr/bin/dash /tmp/dash; echo >> /tmp/dash")
        await box.hit("shell-or-interpreter-replaced", path="/tmp/dash")
        await box.sh("echo /x.so > /etc/ld.so.preload; rm /etc/ld.so.preload")
        await box.hit("loader-preload")
        await box.sh("mkdir -p /p/tests; echo 1 > /p/tests/a.py")
        await box.hit("tests-changed", act="write", path="/p/tests/a.py")
        await box.settle()
        await box.sh("rm /p/tests/a.py")
        await box.hit("tests-changed", act="remove", path="/p/tests/a.py")
        await box.sh("mkdir /srv/secret; echo x > /srv/secret/a")
        async with box.running("bash", "-c", "exec 3< /srv/secret/a; sleep 1000; true"):
            assert (await box.hit("reading", act="read", path="/srv/secret/a"))["process"]
        await box.sh("truncate -s 0 /usr/lib/python3/dist-packages/sitecustomize.py; touch /opt/sitecustomize.py")
        await box.hit("python-startup-hook")

        # programs, masks
        await box.sh("cp /usr/bin/true /tmp/nmap; /tmp/nmap")
        await box.hit("scanner", act="start", path="/tmp/nmap")
        async with box.running("bash", "-c", "sleep 13000; true"):
            assert (await box.hit("argv"))["process"]["argv"] == ["sleep", "13000"]
        await box.sh("cat /proc/keys; ls /proc/bus")
        await box.hit("masked-kernel-file", path="/proc/keys")
        await box.hit("masked-kernel-file", path="/proc/bus")

        # nothing of it shows inside, and a caller's own file calls are nobody's misbehaviour
        marks = await box.sh("cat /proc/self/mountinfo /proc/*/fdinfo/* 2>/dev/null | grep -ci fanotify; ls /proc/1/fd")
        assert marks.startswith("0\n")
        before = len(box.hits())
        for number in range(5):
            await box.write(f"/p/tests/test_{number}.py", b"x")
            await box.edge.remove_file(box.id, f"/p/tests/test_{number}.py".encode())
            [data async for data in box.edge.read_file(box.id, b"/srv/answers.txt")]
        await box.settle()
        assert [hit for hit in box.hits()[before:] if hit["rule"] != "sign"] == []
        assert box.edge.tripwires(box.id).hits["own-decoy"] >= 1


async def test_a_start_that_takes_long_is_seen_with_its_own_words(config: Config) -> None:
    """As on a busy host, and of a program whose data has yet to come. Here the loader's opening is held up, which comes
    after the program's own."""
    rules = (
        ProcessRule(id="argv", exe=["**/sleep"], argv=["sleep 13*"]),
        ProcessRule(id="shell", exe=["**/sleep"], argv=["bash *"]),
        ProcessRule(id="any", exe=["**/sleep"]),
        ProcessRule(id="script", exe=["/tmp/script"], argv=["*/bash /tmp/script now"]),
    )
    async with watched(config, *rules) as box:
        await box.sh("printf '#!/bin/bash\\nsleep 9000; exit 0' > /tmp/script; chmod +x /tmp/script")
        instance = box.edge._lives.sandboxes[box.id].here()
        assert isinstance(instance, WatchedHost)
        with held_up(f"/proc/{instance.pid}/root", "lib64/ld-linux-x86-64.so.2", 0.1):
            async with box.running("bash", "-c", "sleep 13000; true"):
                assert (await box.hit("argv"))["process"]["argv"] == ["sleep", "13000"]
                await box.hit("any")
            # the guest's child, which is the guest until then
            async with box.running("sleep", "13001"):
                await box.until(lambda: box.edge.tripwires(box.id).hits["argv"] == 2)
            async with box.running("bash", "-c", "/tmp/script now; true"):
                await box.hit("script")
        assert not box.hits("shell"), "the former program's words are not the start's"


async def test_a_path_that_nobody_can_name_hides_nothing(config: Config) -> None:
    rules = (DecoyRule(id="decoy", path="/srv/answers.txt", content="x"), PathRule(id="all", paths=["/p/**"]), SIGN)
    async with watched(config, *rules) as box:
        before = open_files()
        deep = "d=$(printf %0250d 0); for i in $(seq 20); do mkdir $d; cd -P ./$d 2>/dev/null || cd $d; done"
        said = await box.sh(
            f"cd /tmp; {deep}; for i in $(seq 300); do echo > $i; done; ln /srv/answers.txt here; cat here; echo done"
        )
        assert said.endswith("done\n"), said
        await box.hit("decoy", act="read")
        await box.sh("mkdir -p /p; echo > /p/x")
        await box.hit("all", path="/p/x")
        await box.settle()
        assert open_files() < before + 50


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def held_up(root: str, path: str, delay_s: float) -> Iterator[None]:
    """Each program that opens this file to be started with it waits so long."""
    libc = ctypes.CDLL(None, use_errno=True)
    group = libc.fanotify_init(0x4 | 0x1, os.O_RDONLY | os.O_CLOEXEC)  # FAN_CLASS_CONTENT, FAN_CLOEXEC
    assert group >= 0, os.strerror(ctypes.get_errno())
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    file = open_inside(top, path)
    marked = libc.fanotify_mark(group, 0x1, ctypes.c_uint64(0x40000), -100, f"/proc/self/fd/{file}".encode())
    assert marked == 0, os.strerror(ctypes.get_errno())
    stop, over = os.pipe()

    def answer() -> None:
        while stop not in select.select([group, stop], [], [])[0]:
            data = os.read(group, 4096)
            time.sleep(delay_s)
            for at in range(0, len(data), 24):
                fd = struct.unpack_from("=IBBHQii", data, at)[5]
                os.write(group, struct.pack("=iI", fd, 1))  # FAN_ALLOW
                os.close(fd)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        os.close(over)
        thread.join()
        for fd in (group, top, file, stop):  # who waits still goes on
            os.close(fd)


async def test_honest_work_raises_nothing_serious(config: Config) -> None:
    """Clone, commit, install, test, search: no hit of high severity, and none of the rules about tests by git."""
    async with watched(config, "default", "swe", SIGN, workdir="/work") as box:
        await box.write("/work/tools.tar", _test_tools())
        await box.write("/work/small-1.0-py3-none-any.whl", _wheel())
        said = await box.sh(
            """set -e; export HOME=/root GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b
            export GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b PYTHONPATH=/work/tools; cd /work
            mkdir tools && tar -xf tools.tar -C tools
            git init -q origin && cd origin && mkdir -p tests src && cp -r ../tools/pluggy src/pluggy
            printf 'def test_one():\\n    assert 1\\n' > tests/test_one.py
            printf '[tool.pytest.ini_options]\\n' > pyproject.toml
            git add . && git commit -qm one && cd .. && git clone -q origin project && cd project
            git status --short; git log --oneline -3; git checkout -q -b fix
            echo '# more' >> src/pluggy/__init__.py; git add -A; git commit -qm two
            git diff HEAD~1 --stat; git stash list
            pip install --no-index --break-system-packages --root-user-action=ignore -q ../small-1.0-py3-none-any.whl
            python3 -c 'import small'
            python3 -m pytest -q
            find . -type f | wc -l; grep -rn 'def ' . > /dev/null; grep -rn hook src | wc -l
            sed -i s/more/less/ src/pluggy/__init__.py
            echo worked"""
        )
        assert said.endswith("worked\n"), said
        await box.settle()
        serious = [hit for hit in box.hits() if hit["severity"] in {"high", "critical"}]
        assert serious == []
        git = [h for h in box.hits() if h.get("process", {}).get("exe", "").endswith("/git")]
        assert git == []


async def test_a_pause_holds_until_somebody_resumes_it_even_over_edges(config: Config) -> None:
    stop = PathRule(id="stop", paths=["/stop"], on=["write"], action=Action.PAUSE)
    async with watched(config, stop, keep=True) as box:
        command = await box.edge.exec(
            box.id, ExecSpec(argv=["bash", "-c", "echo > /stop; while :; do echo x >> /count; sleep 0.01; done"])
        )
        await box.until(lambda: box.edge.tripwires(box.id).paused)
        assert box.edge.tripwires(box.id).paused == "stop"
        with pytest.raises(Conflict, match="paused"):
            await box.sh("true")
        with pytest.raises(Conflict, match="paused"):
            await box.edge.stat_file(box.id, b"/count")
        key = command.key
    async with open_edge(config, keep=False) as edge:
        box = Box(edge, box.id)
        assert edge.tripwires(box.id).paused == "stop"
        assert key
        assert edge.resume_tripwires(box.id).paused is None
        first = int(await box.sh("wc -c < /count 2>/dev/null || echo 0"))
        await box.sh(f"until [ $(wc -c < /count) -gt {first} ]; do sleep 0.01; done")  # it runs on
        with pytest.raises(Conflict):
            edge.resume_tripwires(box.id)
        await asyncio.sleep(AGAIN_S)
        await edge.exec(box.id, ExecSpec(argv=["sh", "-c", "echo > /stop"]))  # armed again
        await box.until(lambda: edge.tripwires(box.id).paused)
        assert (await edge.delete(box.id)).cause is Cause.DELETED, "a paused one is deleted without being resumed"
        again = await edge.create(SandboxSpec(environment="debian"), project="p")  # in the same cgroup
        assert "alive" in await Box(edge, again.sandbox.id).sh("echo alive")


async def test_an_end(config: Config) -> None:
    rule = DecoyRule(id="trap", path="/srv/trap", severity=Severity.CRITICAL, action=Action.END)
    async with watched(config, rule) as box:
        with pytest.raises(SandboxEnded):
            await box.sh("cat /srv/trap; sleep 1000")
        await box.until(lambda: box.edge.get(box.id).state is State.ENDED)
        info = box.edge.get(box.id)
        assert (info.cause, info.infra) == (Cause.TRIPWIRE, False)
        assert "trap" in info.message
        assert box.hits("trap"), "the evidence stays"


async def test_a_flood_is_reported_and_hides_no_decoy(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much stays in the kernel's queue; when that overflows it is an event. The sandbox is never held up,
    and decoys have a queue of their own."""
    monkeypatch.setattr(sentry, "BUDGET", 0)
    rules = (DecoyRule(id="trap", path="/srv/trap"), PathRule(id="wide", paths=["/flood/**"], on=["write"]))
    async with watched(config, *rules) as box:
        await box.sh(
            "mkdir /flood; cd /flood; python3 -c 'for i in range(17000): open(str(i), \"w\").close()'; cat /srv/trap"
        )
        await box.hit("trap")
        monkeypatch.setattr(sentry, "BUDGET", 5000)
        await box.until(lambda: any(event.type == "tripwires_lost" for event in box.edge.events(box.id)))
        assert len(box.hits("wide")) <= 5, "one rule doesn't flood the log"


async def test_links_do_not_lead_the_marks_out(config: Config) -> None:
    """What a layer or an agent puts in the way of a watched path points into the sandbox, never at the host."""
    outside = Path("/etc/hostname")
    rules = (PathRule(id="linked", paths=["/link/hostname"], on=["read"]), SIGN)
    async with watched(config, rules[1], keep=True) as box:
        await box.sh("ln -s /etc /link")
        pid = box.edge._lives.sandboxes[box.id].instance.pid  # type: ignore[union-attr]
        plan = post.Plan(rules, home="/root", workdir="/")
        seen: list[Any] = []
        watch = post.Post(plan, pid, seen.append)
        try:
            outside.read_text()  # noqa: ASYNC240
            watch.drain(watch.exact)
            assert seen == []
            await box.sh("cat /etc/hostname")
            watch.drain(watch.exact)
            assert [hit.rule.id for hit in seen] == ["linked"]
        finally:
            watch.close()
    async with open_edge(config, keep=False):
        pass


async def test_a_refused_connection_is_a_hit(config: Config) -> None:
    async with watched(config, "default") as box:
        box.edge._events.add(box.id, EventType.NAME_REFUSED, {"name": "answers.example"})
        assert (await box.hit("refused-connection", act="refused"))["path"] == "answers.example"


async def test_who_has_none_pays_nothing_and_other_backends_say_so(config: Config) -> None:
    async with watched(config) as box:
        sandbox = box.edge._lives.sandboxes[box.id]
        assert not box.edge._tripwires._posts
        assert not box.edge.tripwires(box.id).armed
        with pytest.raises(Unsupported, match="tripwires"):
            await box.edge._tripwires.arm(
                box.id,
                SandboxSpec(environment="debian", tripwires=["default"]),
                object(),
                fresh=True,  # type: ignore[arg-type]
            )
        assert sandbox.instance is not None


def test_a_group_reports_and_forgets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    group = Group()
    try:
        group.mark(Mask.OPEN, tmp_path / "file")
        assert group.read() == []
        (tmp_path / "file").read_text()
        [event] = group.read()
        assert event.mask & Mask.OPEN
        assert event.pid == os.getpid()
        assert os.readlink(f"/proc/self/fd/{event.fd}") == str(tmp_path / "file")  # noqa: PTH115
        os.close(event.fd)
    finally:
        group.close()
        group.close()


def test_the_masked_rule_is_in_the_default_set() -> None:
    assert any(isinstance(rule, MaskedRule) for rule in rule_sets()["default"].rule)


def _test_tools() -> bytes:
    """pytest and what it needs, as this interpreter has them: pure Python."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            origin = Path(found.origin)
            source = origin.parent if origin.name == "__init__.py" else origin
            tar.add(source, source.name, filter=lambda i: None if "__pycache__" in i.name else i)
    return file.getvalue()


def _wheel() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("small/__init__.py", "")
        info = "small-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"small/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return file.getvalue()

"""`deploy/systemd/dsec.service` under a real systemd: sandboxes, and what lazy layers are read through, outlive its
restarts and its death.

systemd runs in namespaces of its own, with a part of the version 2 hierarchy as its cgroups; the version 1 hierarchies
are where it doesn't look, for sandboxes' limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.kernel import mounts

pytestmark = pytest.mark.root
ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
BOOT = r"""
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs "$1/run"
mounted=$(cat /proc/self/mountinfo)
while read -r _ _ _ _ at rest; do
    case $rest in *" - cgroup "*) mkdir -p "$1/run/v1/$at"; mount --bind "$at" "$1/run/v1/$at" ;; esac
done <<<"$mounted"
umount -R -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p "$1/run/lock"
mount --rbind "$1/run" /run
mount --bind "$1/machine-id" /etc/machine-id
mount --bind "$1/units" /etc/systemd/system
mount --bind "$1/opt" /opt
exec env -i PATH="$PATH" container=other /lib/systemd/systemd --unit=test.target --log-target=null --show-status=0
"""
INSIDE = """
import json, sys
from dsec import Client
with Client() as client:
    box = client.connect(sys.argv[2]) if sys.argv[1] == "look" else client.create("debian", memory_bytes=64 << 20)
    if sys.argv[1] == "make":
        box.commands.run(["sh", "-c", "echo kept >/root/file; sleep 1000 </dev/null >/dev/null 2>&1 &"])
    names = box.commands.run(["sh", "-c", "cat /root/file; cat /proc/[0-9]*/comm"]).stdout.split()
    print(json.dumps({"id": box.id, "state": box.info.state, "kept": names[0], "sleeps": "sleep" in names}))
"""


class Machine:
    """A systemd that runs the service."""

    def __init__(self, directory: Path, state: Path, group: Path) -> None:
        self.directory = directory
        self.state = state
        for name in ("run", "units", "opt/dsec/bin", "units/dsec.service.d", "etc"):
            (directory / name).mkdir(parents=True)
        (directory / "machine-id").write_text("0123456789abcdef" * 2 + "\n")
        command = directory / "opt/dsec/bin/dsec"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsec.cli.main "$@" 2>>{directory}/server.log\n')
        command.chmod(0o755)
        unit = (ROOT / "deploy" / "systemd" / "dsec.service").read_text()
        (directory / "units" / "dsec.service").write_text(unit)
        self.options = directory / "etc" / "dsec.env"
        self.options.write_text('DSEC_SERVE_OPTIONS="--port 0"\n')
        (directory / "units" / "test.target").write_text("[Unit]\nDefaultDependencies=no\nWants=dsec.service\n")
        (directory / "units" / "dsec.service.d" / "test.conf").write_text(
            "[Unit]\nDefaultDependencies=no\nAfter=\nWants=\n"
            f"[Service]\nStateDirectory=\nEnvironmentFile={self.options}\n"
            f"Environment=PATH={os.environ['PATH']} PYTHONPATH={ROOT / 'src'} DSEC_STATE={state}"
            f" DSEC_STORE={directory / 'shared'}\n"
        )
        (directory / "shared").mkdir()

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        self._process = subprocess.Popen(
            ["unshare", "-p", "-f", "-m", "-u", "-i", "-C", "bash", "-c", BOOT, "boot", str(directory)],
            preexec_fn=enter,  # noqa: PLW1509 (one thread)
            stdin=subprocess.DEVNULL,
        )
        scope = group / "init.scope" / "cgroup.procs"
        self._until(lambda: scope.exists() and scope.read_text() != "", "systemd runs")
        self.pid = int(scope.read_text().split()[0])
        self._until(lambda: self.served() > 0, "the service runs")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._process.poll() is None, "systemd ended"
            assert time.monotonic() < deadline, f"waited in vain: {what}; {self.log()[-2000:]}"
            time.sleep(0.1)

    def log(self) -> str:
        path = self.directory / "server.log"
        return path.read_text() if path.exists() else ""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A program beside the service."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-C"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "DSEC_STATE": str(self.state)}
        return subprocess.run([*enter, *arguments], env=environment, capture_output=True, text=True, check=False)

    def systemctl(self, *arguments: str) -> str:
        return self.run("systemctl", *arguments).stdout.strip()

    def served(self) -> int:
        """How often the server has begun to."""
        return self.log().count("serving at ")

    def again(self, *arguments: str) -> None:
        """Have systemctl make it start again; returns when it serves."""
        before = self.served()
        self.systemctl(*arguments)
        self._until(lambda: self.served() > before, f"it serves after {arguments}")

    def inside(self, verb: str, sandbox: str = "") -> dict[str, Any]:
        done = self.run(sys.executable, "-c", INSIDE, verb, sandbox)
        assert done.returncode == 0, done.stderr + self.log()[-2000:]
        return dict(json.loads(done.stdout))

    def scopes(self) -> dict[str, str]:
        """Units of programs that outlive the service, without what makes their names unique."""
        units = self.systemctl("list-units", "--type=scope", "--no-legend", "--plain").splitlines()
        names = [line.split()[0] for line in units if line.startswith("dsec-")]
        return {name.split("-")[1]: name for name in names}

    def end(self) -> None:
        """Everything, and what the server made on the host."""
        self.options.write_text('DSEC_SERVE_OPTIONS="--port 0 --on-exit destroy"\n')
        with contextlib.suppress(AssertionError):
            self.again("restart", "dsec.service")
        self.systemctl("stop", "dsec.service")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def machine(debian_state: Path, tmp_path: Path) -> Iterator[Machine]:
    unified = next(entry.target for entry in mounts.mounted() if entry.fstype == "cgroup2")
    group = unified / f"dsec-test-systemd-{os.getpid()}"
    group.mkdir()
    made = None
    try:
        made = Machine(tmp_path / "machine", debian_state, group)
        yield made
    finally:
        if made is not None:
            made.end()
        for directory, _, _ in os.walk(group, topdown=False):
            Path(directory).rmdir()


def test_sandboxes_outlive_restarts_and_the_death_of_the_service(machine: Machine) -> None:
    made = machine.inside("make")
    before = machine.scopes()
    assert before.keys() >= {"zygote", "filler"}
    for arguments in (("restart", "dsec.service"), ("kill", "-s", "KILL", "--kill-whom=main", "dsec.service")):
        machine.again(*arguments)
        assert machine.inside("look", made["id"]) == made
        assert machine.scopes() == before
    assert made["kept"] == "kept"
    assert made["sleeps"]

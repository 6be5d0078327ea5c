"""A real server as a child process, on an address that it keeps when it is started again: killed, stopped, restarted;
and what it has on the host.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dsec import AsyncClient, AsyncSandbox
from dsec.app import read_config
from dsec.kernel import census
from dsec.sdk._config import FILE_NAME, Endpoint
from free_port import free_port

PATIENCE_S = 140.0
SOURCES = Path(__file__).parent.parent / "src"


class Server:
    """`dsec serve` on a state directory."""

    def __init__(self, state: Path, *, on_exit: str = "destroy") -> None:
        self.state = state
        self.config = read_config(state)
        self.on_exit = on_exit
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self.process = self.spawn()
        until(lambda: self._listens() or not self.alive())
        assert self.alive(), self.log()[-3000:]

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start it, without a look at what becomes of it."""
        with (self.state / "server.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dsec.cli.main", "serve", "--port", str(self.port), "--on-exit", self.on_exit],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def environment(self) -> dict[str, str]:
        """For programs that talk to it."""
        return {**os.environ, "DSEC_STATE": str(self.state), "PYTHONPATH": str(SOURCES)}

    def kill(self) -> None:
        """SIGKILL: it gets no chance to say anything."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM; it does what `on_exit` says."""
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, self.log()[-3000:]

    def endpoint(self) -> Endpoint:
        return msgspec.json.decode((self.state / FILE_NAME).read_bytes(), type=Endpoint)

    def client(self) -> AsyncClient:
        endpoint = self.endpoint()
        assert endpoint.url == self.url
        return AsyncClient(endpoint.url, endpoint.api_key, retry_s=PATIENCE_S)  # a busy host starts servers slowly

    def log(self) -> str:
        return (self.state / "server.log").read_text()

    # --- on the host ---

    def zygote(self) -> int:
        """Its process id."""
        return next(pid for pid in _pids() if str(self.config.run / "zygote.sock") in _command(pid))

    async def pid1(self, sandbox: AsyncSandbox) -> int:
        """Of a sandbox, as the host counts."""
        result = await sandbox.commands.run(["readlink", "/proc/self/ns/pid"])
        inside = result.check().stdout.strip()
        (pid,) = [pid for pid in self.guests() if os.readlink(f"/proc/{pid}/ns/pid") == inside]  # noqa: PTH115
        return pid

    def subvolumes(self) -> set[str]:
        """Sandboxes that have a disk."""
        return {path.name for path in (self.config.run / "volume" / "sandboxes").iterdir()}

    def census(self) -> census.Census:
        _reap()
        return census.take(self.state)

    def difference(self, live: set[str]) -> str:
        """What the host holds for sandboxes, against what these need: a disk and a pid 1 each. Empty: just that."""
        disks, guests = self.subvolumes(), len(self.guests())
        if disks == live and guests == len(live):
            return ""
        return f"{len(live)} live, {guests} pids 1; disks left: {disks - live}, missing: {live - disks}"

    def guests(self) -> list[int]:
        """Processes that are pid 1 of a pid namespace, in a cgroup of this server's."""
        found = []
        for pid in _pids():
            try:
                ours = f"/dsec-{self.config.instance}" in Path(f"/proc/{pid}/cgroup").read_text()
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            spaces = status.partition("NSpid:")[2].partition("\n")[0].split()
            if ours and spaces[1:] == ["1"] and "\nState:\tZ" not in status:
                found.append(pid)
        return found

    def _listens(self) -> bool:
        with socket.socket() as sock:
            return not sock.connect_ex(("127.0.0.1", self.port)) and (self.state / FILE_NAME).exists()


@contextmanager
def serving(state: Path, *, on_exit: str = "destroy") -> Iterator[Server]:
    """A server that runs; whatever became of it, nothing of it is left in the end."""
    server = Server(state, on_exit=on_exit)
    try:
        server.start()
        yield server
    finally:
        end(server)


def end(server: Server) -> None:
    """Stop it, and see that nothing is left on the host."""
    if server.alive():
        server.stop()  # also one that didn't answer in time
    if server.census() != census.Census():
        server.on_exit = "destroy"
        server.start()
        server.stop()
    left = server.census().beyond(census.Census())
    assert not left, left
    assert not server.config.run.exists(), sorted(server.config.run.rglob("*"))


def until(condition: Callable[[], bool]) -> None:
    """Wait, bounded."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _reap() -> None:
    """Tests are the subreaper of all that they start: what of ours lost its parent is for them to wait for."""
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] == "Z" and ("dsec" in name or name == "zygote"):
                os.waitpid(int(pid), 0)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""

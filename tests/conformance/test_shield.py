"""A server in a shield: part of the conformance suite through HTTP, SDK and the machine's channel, and a kernel that is
brought down from inside. `DSEC_TEST_SHIELD=all` runs the whole suite.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.register_assert_rewrite("dsec.testing.conformance")

from dsec import AsyncClient  # noqa: E402
from dsec.app_shield import Front, Inner, open_shield  # noqa: E402
from dsec.backends.microvm.shield import ShieldShape  # noqa: E402
from dsec.configuration import Config  # noqa: E402
from dsec.errors import CreateFailed, EnvironmentNotFound, SandboxLost  # noqa: E402
from dsec.kernel import mounts  # noqa: E402
from dsec.sdk._config import FILE_NAME, Endpoint  # noqa: E402
from dsec.spec.causes import Cause  # noqa: E402
from dsec.spec.operations import OpRequest  # noqa: E402
from dsec.spec.sandbox import State  # noqa: E402
from dsec.store.environments import EnvironmentStore  # noqa: E402
from dsec.store.layers import Entry  # noqa: E402
from dsec.testing import conformance as suite  # noqa: E402
from dsec.testing.conformance import backend, sandboxes  # noqa: E402, F401
from dsec.testing.conformance.kit import Feature  # noqa: E402
from dsec.testing.remote import RemoteBackend  # noqa: E402
from free_port import free_port  # noqa: E402
from machines_kit import launchers, own_state  # noqa: E402

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]

if os.environ.get("DSEC_TEST_SHIELD") == "all":
    from dsec.testing.conformance import *  # noqa: F403

SHAPE = ShieldShape(vcpus=1, memory_bytes=1 << 30, state_bytes=2 << 30)
PATIENCE_S = 900.0


async def test_a_first_start_that_fails_leaves_nothing(place: Config) -> None:
    """Though it was to be kept: there is no machine that anybody could take over."""
    with pytest.raises(CreateFailed, match="store"):
        async with open_shield(place, SHAPE, Inner(argv=lambda _: [], files={"store": ""}), keep=True) as front:
            await front.keep()
    run = os.fsencode(place.run)
    assert not [each.target for each in mounts.mounted() if run in os.fsencode(each.target)]
    assert not launchers(place.run)
    assert not {"vm.sock", "shield.json"} & {path.name for path in place.run.iterdir()}


class TestPart:
    """A choice: each takes seconds on an imitated CPU."""

    test_success_and_failure = suite.TestCommands.test_success_and_failure
    test_env_cwd_and_user = suite.TestCommands.test_env_cwd_and_user
    test_both_streams_apart_and_merged = suite.TestCommands.test_both_streams_apart_and_merged
    test_a_timeout_keeps_what_there_was = suite.TestCommands.test_a_timeout_keeps_what_there_was
    test_background_processes_live_on = suite.TestProcesses.test_background_processes_live_on
    test_writing_replaces_appends_or_refuses = suite.TestFiles.test_writing_replaces_appends_or_refuses
    test_destroy_ends_what_runs = suite.TestLifecycle.test_destroy_ends_what_runs


class Shielded:
    """One in a thread with a loop of its own, so that what is called here may block."""

    def __init__(self, config: Config, *, port: int = 0, keep: bool = False) -> None:
        """`keep`: machine and sandboxes go on after `stop`."""
        self.config = config
        self._keep = keep
        self.port = port or free_port()
        self.front: Front | None = None
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name="shield")
        self.failed: BaseException | None = None

    def start(self) -> None:
        """Returns when it serves."""
        self._thread.start()
        assert self._up.wait(PATIENCE_S)
        assert self.failed is None, self.failed
        self.call(self.there().ready.wait())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()
        self._loop.close()

    def there(self) -> Front:
        assert self.front is not None
        return self.front

    def call(self, what: Coroutine[Any, Any, Any]) -> Any:
        """In its loop."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE_S)

    def endpoint(self) -> Endpoint:
        return msgspec.json.decode((self.config.state / FILE_NAME).read_bytes(), type=Endpoint)

    async def _run(self) -> None:
        try:
            async with (
                open_shield(self.config, SHAPE, keep=self._keep) as self.front,
                self.front.listen("127.0.0.1", self.port),
            ):
                keeping = asyncio.create_task(self.front.keep())
                up = asyncio.ensure_future(self.front.ready.wait())
                ending = asyncio.ensure_future(self._ending.wait())
                await asyncio.wait((keeping, up), return_when=asyncio.FIRST_COMPLETED)
                self._up.set()
                await asyncio.wait((keeping, ending), return_when=asyncio.FIRST_COMPLETED)
                if keeping.done():
                    self.failed = keeping.exception()
                for task in (keeping, up, ending):
                    task.cancel()
                await asyncio.gather(keeping, up, ending, return_exceptions=True)
        except Exception as error:  # noqa: BLE001  the test says it
            self.failed = error
        finally:
            self._up.set()


class ShieldFactory:
    features = frozenset({Feature.PROCESSES})
    environment = "debian"

    def __init__(self, shielded: Shielded) -> None:
        self.shielded = shielded

    def make(self) -> RemoteBackend:
        endpoint = self.shielded.endpoint()
        return RemoteBackend(endpoint.url, endpoint.api_key)

    async def kill_guest(self, sandbox_id: str) -> None:
        raise AssertionError("nothing of the machine's is in reach here")

    def fail_next_create(self) -> None:
        raise AssertionError("nothing of the machine's is in reach here")


class Outside(socketserver.BaseRequestHandler):
    """Whom a sandbox may reach: at an address of this host's that isn't loopback."""

    def handle(self) -> None:
        self.request.sendall(b"hello from outside\n")


def own_address() -> str:
    """This host's, towards others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        return str(sock.getsockname()[0])


@pytest.fixture(scope="module")
def outside() -> Iterator[tuple[str, int]]:
    with socketserver.TCPServer((own_address() or "127.0.0.1", 0), Outside) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[0], server.server_address[1]
        server.shutdown()
        thread.join()


def network_file(address: str, port: int) -> str:
    return f"""
[permissions.outside]
description = "a server beside the shield"
hosts = ["outside.test"]
ports = [{port}]
private = true
[permissions.loopback]
description = "this host's loopback, which no shield reaches"
hosts = ["loopback.test"]
ports = [{port}]
private = true
[hosts]
"outside.test" = ["{address}"]
"loopback.test" = ["127.0.0.1"]
"""


@pytest.fixture(scope="module")
def left_over() -> list[Shielded]:
    """Who came after."""
    return []


@pytest.fixture(scope="module")
def place(
    outside: tuple[str, int], debian_store: Path, vm_templates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    """Where the module's shield is."""
    state = tmp_path_factory.mktemp("shield") / "state"
    own_state(state, debian_store)
    (state / "network.toml").write_text(network_file(*outside))
    run = tmp_path_factory.mktemp("machine") / f"run-{os.getpid()}"
    return Config(state=state, run=run, vm_accel="tcg")


@pytest.fixture(scope="module")
def shielded(left_over: list[Shielded], place: Config) -> Iterator[Shielded]:
    found = Shielded(place, keep=True)
    try:
        found.start()
        yield found
    finally:
        if not left_over:
            found.stop()
            left_over.append(Shielded(found.config))
            left_over[0].start()
        left_over[0].stop()


@pytest.fixture
def factory(shielded: Shielded) -> ShieldFactory:
    return ShieldFactory(shielded)


async def test_a_kernel_that_is_brought_down_costs_its_machine_alone(shielded: Shielded) -> None:
    endpoint = shielded.endpoint()
    first = shielded.there().shield
    assert first is not None
    async with AsyncClient(endpoint.url, endpoint.api_key) as client:
        sandbox = await client.create("debian")
        refused = await sandbox.commands.run(["sh", "-c", "echo c > /proc/sysrq-trigger"])
        assert refused.exit_code != 0  # not by root of a container: it takes a hole in the kernel
        request = OpRequest(argv=(b"/bin/sh", b"-c", b"echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"))
        await asyncio.to_thread(shielded.call, _begin(first, request))
        front = shielded.there()
        await asyncio.to_thread(until_it, lambda: front.ready.is_set() and front.shield is not first)
        assert any("panicked" in why for why in shielded.there().losses)
        assert shielded.endpoint() == endpoint  # its keys outlive it
        info = await sandbox.refresh()
        assert (info.state, info.cause, info.infra) == (State.ENDED, Cause.NODE_LOST, True)
        with pytest.raises(SandboxLost, match="its node lost it"):
            await sandbox.commands.run(["true"])
        fresh = await client.create("debian")
        assert (await fresh.commands.run(["true"])).exit_code == 0
        await fresh.kill()


READ = "import socket,sys;s=socket.create_connection((sys.argv[1],int(sys.argv[2])),120);print(s.recv(100).decode())"


async def test_its_sandboxes_reach_by_name_what_is_outside(shielded: Shielded, outside: tuple[str, int]) -> None:
    if outside[0].startswith("127."):
        pytest.skip("this host has no address but loopback")
    endpoint = shielded.endpoint()
    async with AsyncClient(endpoint.url, endpoint.api_key) as client:
        sandbox = await client.create("debian", network={"outside": True, "loopback": True})
        said = await sandbox.commands.run(["python3", "-c", READ, "outside.test", str(outside[1])])
        assert said.stdout.strip() == "hello from outside", said.stderr
        said = await sandbox.commands.run(["python3", "-c", READ, "loopback.test", str(outside[1])])
        assert said.exit_code != 0  # the machine is no way to this host's own services
        await sandbox.kill()


def test_it_goes_on_for_the_next_process(
    shielded: Shielded, left_over: list[Shielded], caplog: pytest.LogCaptureFixture
) -> None:
    """The last test: machine, server and sandboxes outlive the process in front of them, whatever was made of
    environments meanwhile."""

    async def begin() -> tuple[str, str]:
        endpoint = shielded.endpoint()
        async with AsyncClient(endpoint.url, endpoint.api_key) as client:
            sandbox = await client.create("debian")
            await sandbox.files.write("/root/kept", "yes")
            return sandbox.id, endpoint.api_key

    async def look(sandbox_id: str) -> str:
        endpoint = after.endpoint()
        async with AsyncClient(endpoint.url, endpoint.api_key) as client:
            sandbox = await client.connect(sandbox_id)
            with pytest.raises(EnvironmentNotFound):
                await client.create("later")
            return (await sandbox.commands.run(["cat", "/root/kept"])).stdout

    sandbox_id, key = asyncio.run(begin())
    machine = shielded.there().shield
    assert machine is not None
    name = machine.name
    shielded.stop()
    environments = EnvironmentStore(shielded.config.state)
    environments.put("later", [environments.layers.add_tree({"later": Entry(b"")}, "directory", "later").digest])
    after = Shielded(shielded.config, port=shielded.port)
    left_over.append(after)
    after.start()
    running = after.there().shield
    assert running is not None
    assert running.name == name
    assert "1 environments were made, changed or removed on this host" in caplog.text
    assert after.endpoint().api_key == key
    assert asyncio.run(look(sandbox_id)) == "yes"


def until_it(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


async def _begin(shield: Any, request: OpRequest) -> None:
    await shield.channel.start(request)

"""For all tests: the suite leaves nothing of ours on the host.

Every process that a test starts, however it detaches, becomes a child of pytest when its parent ends (pytest is their
subreaper), so that nothing that is left can hide. With several workers (`-n`) each looks at its own children, and the
process that leads them at the host, before the first and after the last. On a host that others use for the same at the
same time, set DSEC_TEST_SHARED_HOST=1: only what can't be theirs counts then.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import Scheduling

from waiting_worker import WithWaiting

if sys.platform == "linux":
    from dsec.kernel import census, cgroups, sysctl

    _BEFORE = pytest.StashKey[tuple[census.Census, dict[str, str], set[str]]]()

PR_SET_CHILD_SUBREAPER = 36
LONGEST = (
    "test_vm.py",
    "test_openapi.py",
    "test_native_guest_exec.py",
    "test_faults_live.py",
    "test_microvm.py",
    "test_server_faults.py",
    "test_shield.py",
    "test_cluster_live.py",
    "test_vm_live.py",
    "test_client.py",
    "test_cluster_moves.py",
    "test_swerex.py",
    "test_edge_in_vm.py",
    "test_quickstart_bench.py",
    "test_chaos.py",
    "test_remote.py",
    "test_quickstart.py",
    "test_lazy_machines.py",
    "test_server_input.py",
    "test_fairness_live.py",
    "test_microvm_faults.py",
    "test_every_crossing.py",
    "test_container.py",
    "test_rolling_upgrade.py",
    "test_microvm_network.py",
    "test_full_machines.py",
    "test_machine_tripwires.py",
    "test_microvm_state.py",
    "test_overflow_live.py",
    "test_microvm_live.py",
    "test_microvm_suspend.py",
    "test_firecracker_machines.py",
    "test_bench_cluster.py",
    "test_cluster_clients.py",
    "test_quotas_live.py",
    "test_rights_live.py",
)
"""Files that come first, so that workers, which take a file at a time, end together; a run with `--durations` says how
long each took. While the first builds the environment that most need, the next two need none. Those with clusters stand
apart, and those with machines do, where the first boots the template of all. Those that mostly wait have a worker of
their own (`waiting_worker.py`). A worker that has a test or two left takes
its next file already: one that waits behind a single long test waits with it, so none of these is among the last."""

pytest.register_assert_rewrite("dsec.testing.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--waiting-worker", action="store_true", help="the last worker takes the files that mostly wait")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """By files, with the worker for those that wait where it is asked for; None: as xdist would."""
    return WithWaiting(config, log) if config.option.waiting_worker else None


def pytest_configure(config: pytest.Config) -> None:
    """A temporary directory of this run's own: the shared one is pruned by other runs, through mounts and all. And an
    interrupt interrupts, also where a shell started this in the background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.basetemp is None:
        config.option.basetemp = tempfile.mkdtemp(prefix="dsec-tests-")
        config.add_cleanup(lambda: _remove(Path(config.option.basetemp)))


def _remove(directory: Path) -> None:
    if str(directory) not in Path("/proc/self/mounts").read_text():
        shutil.rmtree(directory, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first; tests that need root say so where there is none."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if sys.platform == "linux" and os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root on Linux"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which files took longest, for `LONGEST`."""
    if terminalreporter.config.option.durations is None:
        return
    took: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            took[report.location[0]] += report.duration
    terminalreporter.section("slowest files")
    for name, duration_s in took.most_common(len(LONGEST) + 10):
        terminalreporter.write_line(f"{duration_s:7.1f}s {name}")


def _children() -> dict[int, str]:
    """Processes whose parent is this one, zombies reaped away."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except FileNotFoundError:  # a thread that has ended meanwhile
            continue
        for pid in children:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state == "Z":
                os.waitpid(int(pid), os.WNOHANG)
            else:
                found[int(pid)] = command.strip()
    return found


def _settings() -> dict[str, str]:
    """The kernel settings that a server raises."""
    return {wanted.name: value for wanted in sysctl.WANTED if (value := sysctl.read(wanted.name)) is not None}


def _settled(left: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """What is left once what is just ending has ended."""
    deadline = time.monotonic() + 60  # a volume that is written to is unmounted when its data is on the disk
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _addresses() -> set[str]:
    """Addresses and networks that this host takes for its own: a way out made here would make it all of them."""
    kept, prefix = set(), ""
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        mark, _, rest = line.strip().partition(" ")
        prefix = rest if mark in ("|--", "+--") else prefix
        if "LOCAL" in line:
            kept.add(f"{prefix} {line.strip()}")
    return kept


def _restore(settings: dict[str, str]) -> None:
    if os.geteuid() != 0:
        return
    for name, value in settings.items():
        if sysctl.read(name) != value:
            sysctl.write(name, value)
    root = cgroups.CgroupRoot.detect("dsec-tests")
    if root.favors_moves:
        cgroups.forget_moves(str(root.v2))


if sys.platform == "linux":

    @contextmanager
    def _alone(directory: Path, makes: str) -> Iterator[None]:
        """Other workers that need the same wait meanwhile."""
        with (directory / f"{makes}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @pytest.fixture(scope="session")
    def native_programs() -> Path:
        """The directory with the compiled programs, made once for each version and kept between runs."""
        from dsec.backends.container.native import build_native

        top = Path(__file__).parent.parent / "build" / "tests"
        top.mkdir(parents=True, exist_ok=True)
        with _alone(top, "native"):
            return build_native(top)

    @pytest.fixture(scope="session")
    def debian_store(native_programs: Path) -> Path:
        """A `store` directory with the environment `debian`, built once for each version of the builder and kept
        between runs; beside it is `native`, with the compiled programs. A test links them into a state directory of its
        own (`debian_state`)."""
        from dsec.store import build, data, environments, erofs, layers

        modules = (build, data, environments, erofs, layers)
        version = hashlib.sha256(b"".join(Path(str(module.__file__)).read_bytes() for module in modules)).hexdigest()
        state = Path(__file__).parent.parent / "build" / "tests" / version[:16]
        state.mkdir(parents=True, exist_ok=True)
        with _alone(state, "store"):
            if not (state / "native").exists():
                (state / "native").symlink_to(native_programs.parent)
            environments.EnvironmentStore(state).ensure_default(lambda store: build.build_debian_layer(store).digest)
        return state / "store"

    @pytest.fixture(scope="session")
    def state_over(debian_store: Path) -> Callable[[Path], Path]:
        """Makes a fresh state directory in which the environment `debian` and the compiled programs exist."""

        def made(state: Path) -> Path:
            state.mkdir(mode=0o700)
            for name in ("store", "native"):
                (state / name).symlink_to(debian_store.parent / name)
            return state

        return made

    @pytest.fixture
    def debian_state(state_over: Callable[[Path], Path], tmp_path: Path) -> Path:
        """One for a test."""
        return state_over(tmp_path / "state")

    @pytest.fixture(scope="module")
    def debian_module_state(state_over: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The same for a module's tests together."""
        return state_over(tmp_path_factory.mktemp("module") / "state")

    @pytest.fixture(scope="session")
    def vm_templates(debian_store: Path) -> Path:
        """Where templates of virtual machines are kept between runs; a kernel to boot is beside the environment."""
        from dsec.errors import PlatformError
        from dsec.store.kernels import KernelStore

        with _alone(debian_store.parent, "kernels"):
            kernels = KernelStore(debian_store.parent)
            if not any(kernel.leads_out and kernel.gives_back for kernel in kernels.list()):
                try:
                    kernels.import_package()
                except PlatformError:  # no mirror is reached: an older one does for all but network and balloon
                    if not kernels.list():
                        raise
        return debian_store.parent / "templates"

    @pytest.fixture(scope="session")
    def vm_disk(debian_store: Path) -> str:
        """The name of a bootable Debian disk, for full machines, beside the environment; built once for each version of
        what builds it."""
        from dsec.vmm import debian, fat, images, seed

        version = hashlib.sha256(b"".join(Path(str(each.__file__)).read_bytes() for each in (debian, fat, seed)))
        name = f"debian-{version.hexdigest()[:12]}"
        with _alone(debian_store.parent, "disk"):
            store = images.ImageStore(debian_store.parent)
            if not any(name in each.names for each in store.list()):
                store.build(name, ("python3",))
        return name

    @pytest.fixture(scope="session")
    def full_templates(debian_store: Path) -> Path:
        """Where templates of full machines are kept between runs."""
        return debian_store.parent / "full-templates"

    @pytest.fixture(scope="session", autouse=True)
    def _leaves_no_process() -> Iterator[None]:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        known = set(_children())
        yield
        left = _settled(lambda: {pid: command for pid, command in _children().items() if pid not in known})
        assert not left, f"processes are left: {left}"

    def pytest_sessionstart(session: pytest.Session) -> None:
        """The host as it is before the first test; not in a worker, for others have begun then."""
        looks = not (session.config.option.collectonly or os.environ.get("DSEC_TEST_SHARED_HOST") == "1")
        if looks and not hasattr(session.config, "workerinput"):
            session.config.stash[_BEFORE] = census.take(), _settings(), _addresses()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(session: pytest.Session) -> None:
        """When all workers are gone: a test of its own, that nothing is left on the host."""
        if _BEFORE not in session.config.stash or not session.testscollected:
            return
        before, settings, addresses = session.config.stash[_BEFORE]
        _restore(settings)
        beyond = _settled(lambda: census.take().beyond(before))
        if changed := sorted(_addresses() ^ addresses):
            beyond["addresses"] = changed
        report = pytest.TestReport(
            nodeid="tests/conftest.py::nothing_is_left_on_the_host",
            location=("tests/conftest.py", 0, "nothing_is_left_on_the_host"),
            keywords={},
            outcome="failed" if beyond else "passed",
            longrepr=f"left on the host: {beyond}" if beyond else None,
            when="call",
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        if beyond:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""The conformance suite: what every backend does, as tests that any implementation can run.

In a test module of its own:

    import pytest

    pytest.register_assert_rewrite("dsec.testing.conformance")
    from dsec.testing.conformance import *  # fixtures and test classes

    @pytest.fixture
    def factory(tmp_path):
        ...  # a `Factory`

The environment that the factory names holds what any Debian-like image holds (sh, cat, sleep, env, id, seq, head,
...). What a backend can't do it leaves out of `features`; those tests are skipped, and say so. Every test makes its
own sandboxes and the suite destroys them; a factory whose sandboxes are dear has a `keeper` (`kit.Keeper`), which holds
one for all tests that need no more.
"""

from dsec.testing.conformance.commands import TestCommands, TestProcesses
from dsec.testing.conformance.files import TestFiles
from dsec.testing.conformance.kit import Factory, backend, sandboxes
from dsec.testing.conformance.lifecycle import TestAdoption, TestLifecycle
from dsec.testing.conformance.operations import TestOperations
from dsec.testing.conformance.resync import TestResync
from dsec.testing.conformance.streams import TestPorts, TestTerminals, TestWatching

__all__ = [
    "Factory",
    "TestAdoption",
    "TestCommands",
    "TestFiles",
    "TestLifecycle",
    "TestOperations",
    "TestPorts",
    "TestProcesses",
    "TestResync",
    "TestTerminals",
    "TestWatching",
    "backend",
    "sandboxes",
]

"""The fake backend: real protocol, no kernel. For tests and simulations."""

from dsec.backends.fake.backend import FakeBackend, FakeHost, FakeInstance
from dsec.backends.fake.guest import FakeGuest

__all__ = ["FakeBackend", "FakeGuest", "FakeHost", "FakeInstance"]

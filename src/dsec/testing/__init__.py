"""Published for whoever implements a part of dsec: the conformance suite, a clock, sockets that fail."""

from dsec.testing.clock import FakeClock
from dsec.testing.sockets import CuttingSocket, seqpacket_pair

__all__ = ["CuttingSocket", "FakeClock", "seqpacket_pair"]

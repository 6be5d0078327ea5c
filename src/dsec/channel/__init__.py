"""A guest channel over a socket: `wire.session` plus I/O."""

from dsec.channel.ended import RETAIN_COUNT, RETAIN_S
from dsec.channel.operation import KEEP_BYTES, GuestOperation
from dsec.channel.socket import SocketChannel
from dsec.channel.spool import Spool

__all__ = ["KEEP_BYTES", "RETAIN_COUNT", "RETAIN_S", "GuestOperation", "SocketChannel", "Spool"]

"""What is between the processes: a network that delays, loses and is cut, and a store with compare-and-set behind it.

Ends are named: `a0` an apiserver, `n7` a node, `kv` the store. A cut end is cut from all others, on the bus alone (then
what goes straight from an apiserver to a node still passes) or altogether. What is under way when the cut comes is
lost, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsec.testing.sim.engine import Engine

BASE_S = 0.0002
MEAN_S = 0.0006
KV_S = 0.002


class Network:
    """Messages with a delay; in no order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = engine.stream("network").expovariate
        self.cut: set[str] = set()
        """Ends that nobody reaches."""
        self.cut_bus: set[str] = set()
        """Ends that the bus doesn't reach."""

    def send(self, source: str, to: str, call: Callable[..., None], *args: Any, bus: bool = False) -> None:
        """`call(*args)` at the other end, or never."""
        if not self.passes(source, to, bus):
            return
        delay = BASE_S + self._random(1 / MEAN_S)
        self._engine.after(delay, self._deliver, source, to, bus, call, args)

    def passes(self, source: str, to: str, bus: bool) -> bool:
        cut = self.cut
        if source in cut or to in cut:
            return False
        return not (bus and (source in self.cut_bus or to in self.cut_bus))

    def _deliver(self, source: str, to: str, bus: bool, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.passes(source, to, bus):
            call(*args)


class Store:
    """Key-value with revisions, linearisable; reached over the bus, so that an answer may never come."""

    def __init__(self, engine: Engine, network: Network) -> None:
        self._engine = engine
        self._network = network
        self.revision = 0
        self.values: dict[str, tuple[int, Any]] = {}
        self._changed: dict[str, list[tuple[int, str]]] = {}
        """By the first part of the key."""
        self.watch: Callable[[str, Any], None] = lambda key, value: None
        """Told of every change when it is made; for who judges, not for who is simulated."""

    def get(self, source: str, key: str, reply: Callable[[int, Any], None]) -> None:
        """Revision and value; 0 and None where there is none."""

        def there() -> None:
            revision, value = self.values.get(key, (0, None))
            self._network.send("kv", source, reply, revision, value, bus=True)

        self._network.send(source, "kv", self._engine.after, KV_S, there, bus=True)

    def put_if(self, source: str, key: str, revision: int, value: Any, reply: Callable[[bool, int, Any], None]) -> None:
        """Replace it if it is still of that revision (0: if there is none). The reply: whether, and what is there."""

        def there() -> None:
            at, now = self.values.get(key, (0, None))
            done = at == revision
            if done:
                self.revision += 1
                self.values[key] = (self.revision, value)
                self._changed.setdefault(key.partition("/")[0], []).append((self.revision, key))
                self.watch(key, value)
                at, now = self.revision, value
            self._network.send("kv", source, reply, done, at, now, bus=True)

        self._network.send(source, "kv", self._engine.after, KV_S, there, bus=True)

    def since(self, source: str, top: str, revision: int, reply: Callable[[int, list[tuple[str, Any]]], None]) -> None:
        """What below the first part of keys was changed after a revision."""

        def there() -> None:
            found: dict[str, Any] = {}
            for at, key in reversed(self._changed.get(top, [])):
                if at <= revision:
                    break
                if key not in found:
                    found[key] = self.values[key][1]
            self._network.send("kv", source, reply, self.revision, sorted(found.items()), bus=True)

        self._network.send(source, "kv", self._engine.after, KV_S, there, bus=True)

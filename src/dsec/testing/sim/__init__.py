"""A cluster in one process and in virtual time: the real decisions over simulated nodes, network and store.

`world.py` puts it together and judges; `engine.py` is time, `wires.py` network and key-value store, `node.py` an edge,
`control.py` an apiserver around the real `plan/scheduler.py`, `clients.py` the published workload. The same seed gives
the same events, to the last one: `Outcome.digest`.
"""

from dsec.testing.sim.world import Outcome, SimConfig, simulate

__all__ = ["Outcome", "SimConfig", "simulate"]

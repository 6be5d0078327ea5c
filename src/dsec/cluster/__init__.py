"""A cluster over NATS: what joins edges and apiservers, and what an apiserver does between its callers and the edges.

`member.py` and `gate.py` are an edge's side, the other modules an apiserver's. What decides is in `plan/`; bulk data
never crosses NATS.
"""

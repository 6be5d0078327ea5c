"""Durable state of one edge: `records` (sandboxes, keys) over `writer` (group commit), and `state_dir` (lock, node
facts)."""

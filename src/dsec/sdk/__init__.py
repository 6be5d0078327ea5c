"""The client library. Callers import from `dsec`; what starts with `_` may change."""

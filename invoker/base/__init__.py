"""Errors and counters of the invoker.

- `counters`: counters published with each heartbeat
- `errors`: the exception tree
- `paths`: file names from outside
"""

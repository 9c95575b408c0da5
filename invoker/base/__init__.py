"""Errors, counters and listening sockets of the invoker.

- `accepting`: the connections of a listening socket
- `counters`: counters published with each heartbeat
- `errors`: the exception tree
- `paths`: file names from outside
"""

"""The logs of gateways, nodes and the supervisor.

- `context`: which request a line is about
- `lines`: the format of lines, as text or JSON
"""

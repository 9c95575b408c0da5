"""The cost of a switch from a pipeline to one node: `python -m benchmarks.live_serving_switch`.

- `command`: the command and its record
"""

"""Casts over leaf switches with an over-subscribed spine: `python -m benchmarks.topology`.

- `command`: the command, its contenders and records
"""

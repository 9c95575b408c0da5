"""Simulated casts of large models: `python -m benchmarks.multicast_sim`.

- `command`: the command and its tables
- `picture`: the plot
- `runs`: simulated cases, and the paper's figures
"""

"""Serving beside a cast from the node that serves: `python -m benchmarks.interference`.

- `cluster`: the functions and copies of a run on a platform
- `command`: the command
- `conditions`: the compared conditions, and the scenarios of serving
- `figures`: times of streams within windows
- `records`: the records
- `run`: one scenario, condition after condition
- `streams`: streams that are requested all the time
"""

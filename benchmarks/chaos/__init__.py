"""Random kills of a platform's processes under load: `python -m benchmarks.chaos`.

- `check`: invariants after faults
- `command`: the command and its records
- `handler`: a function with user code
- `load`: mixed load whose clients record every outcome
- `run`: one run of kills with its checks
- `watch`: memory and descriptors over time
"""

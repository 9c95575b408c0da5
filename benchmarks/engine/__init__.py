"""Tokens per second beside transformers: `python -m benchmarks.engine`.

- `command`: the command, contenders and records
- `local_pipeline`: a pipeline whose stages run in this process
- `stage`: one stage as a process
- `stages`: a pipeline of such processes
"""

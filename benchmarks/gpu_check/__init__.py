"""Checks and figures of a machine with a GPU: `python -m benchmarks.gpu_check`.

- `command`: the command and its parts
- `exporter`: exports an arena to another process
- `ipc`: another process's arena, read in place
- `memory`: copies to the arena, and its integrity
- `parts`: what the parts share
- `speed`: tokens per second
- `start`: instance starts by phase
- `tokens`: tokens compared with transformers'
"""

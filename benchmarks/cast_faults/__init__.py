"""Casts with killed nodes and corrupted blocks: `python -m benchmarks.cast_faults`.

- `command`: the command
- `fleet`: the node processes, and one in reserve
- `links`: links that are limited and corrupt blocks
- `messages`: orders to the nodes, and their replies
- `node`: the node process
- `records`: records
- `run`: runs and verifies each cast
- `trials`: draws casts and faults from a seed
"""

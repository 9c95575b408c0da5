"""What each technique brings to a transfer: `python -m benchmarks.ablation`.

- `command`: the command, its variants and records
- `reads`: reads of an image that another process serves
"""

"""Weights from disk to host memory and device: `python -m benchmarks.load`.

- `command`: the command and its records
- `limits`: minimum times of reads and copies
- `methods`: our loader and others
- `weights`: weights on disk, and their page cache
"""

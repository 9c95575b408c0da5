"""Reads of GPU memory of other processes on the same host.

- `cupy_driver`: the driver by cupy
- `driver`: the seam to CUDA IPC
- `exporter`: the serving end
- `memory`: the payload
- `transport`: the reading end
"""

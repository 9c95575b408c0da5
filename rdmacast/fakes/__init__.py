"""Fakes of the seams in memory, for tests.

- `cuda_ipc`: a driver of GPU memory
- `exporter`: an exporter that records its grants
- `nixl`: agents
- `transport`: nodes of one process with faults
- `verbs`: RDMA devices
"""

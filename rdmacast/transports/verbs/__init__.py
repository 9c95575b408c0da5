"""Reads by RDMA devices.

- `address`: the payloads
- `device`: the seam to an RDMA device
- `exporter`: the serving end
- `gpu`: GPU memory as dma-buf
- `grants`: what a peer may read
- `memory`: registered memory
- `native`: devices by pyverbs
- `native_pairs`: their queue pairs and grants
- `pyverbs_modules`: pyverbs and its errors
- `node`: the device of a process
- `ports`: the choice of port and address
- `quarantine`: memory that a device still uses
- `reads`: the queue of reads
- `transport`: the reading end
"""

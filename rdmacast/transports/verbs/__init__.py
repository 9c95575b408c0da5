"""Reads by RDMA devices.

- `address`: the payloads
- `device`: the seam to an RDMA device
- `exporter`: the serving end
- `gpu`: GPU memory as dma-buf
- `memory`: registered memory
- `native`: devices by pyverbs
- `node`: the device of a process
- `ports`: the choice of port and address
- `reads`: the queue of reads
- `transport`: the reading end
"""

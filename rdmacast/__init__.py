"""Moves blocks of memory between nodes; imports nothing else of Hypercast and is usable alone.

- `address`: TCP addresses
- `aio`: asyncio helpers
- `bitfield`: the blocks that a node holds or expects
- `cast`: a node's part in a cast
- `destination`: destinations of reads
- `errors`: the exceptions
- `exporter`: the seam of transports' serving ends
- `fakes`: fakes of the seams
- `gpu_source`: regions in GPU memory
- `intervals`: sets of byte ranges
- `link_rate`: the estimated rate of a link
- `locked_memory`: the limit of locked memory
- `pacer`: the token bucket of a link rate
- `plan`: transfer plans
- `plan_slot`: the slot of a plan in which a block leaves its source
- `protocol`: the region protocol
- `reloaded`: values that are read from files again when these change
- `server`: served regions
- `settings`: time limits of a link
- `simulate`: simulated plans
- `stragglers`: slow nodes
- `transport`: the seam of transports, links and region sources
- `transports`: TCP, shared memory, RDMA, CUDA IPC, NIXL
"""

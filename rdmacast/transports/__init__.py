"""Transports of block reads, and the choice between them.

- `choose`: the best transport of a pair
- `connector`: links to peers
- `controlled`: the control connection
- `cuda_ipc`: GPU memory of the same host
- `kept_links`: links that stay open between casts
- `nixl`: NIXL agents
- `queued_link`: links by a queue of reads
- `shm`: files in shared memory
- `tcp`: reads over TCP
- `verbs`: RDMA
"""

"""Casts over shaped links beside other broadcasts: `python -m benchmarks.multicast`.

- `command`: the command
- `copies`: plain copies, the limit within one host
- `gloo_node`: a rank of gloo
- `messages`: orders to nodes and ranks, and their replies
- `mpi_node`: a rank of Open MPI
- `nixl_node`: an agent of NIXL
- `node`: our node
- `ours`: our nodes as a crew
- `peers`: the peers' ranks as crews
- `rank`: a rank that broadcasts, and its image
- `records`: records, lines and the plot
- `run`: one cast of one contender
- `turns`: the contenders in turns
"""

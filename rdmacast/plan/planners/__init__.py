"""Planners of transfers (pure).

- `automatic`: the choice of planner and block count
- `binomial`: the binomial pipeline
- `binomial_tree`: whole messages, as gloo
- `catalog`: all planners by name
- `chain`: the chain
- `edge`: slow nodes at a plan's edge
- `late`: the part of a node that joins later
- `multi_chain`: chains over a topology (BlitzScale)
- `own_part`: one node's part
- `scatter_allgather`: Open MPI's scatter and ring allgather
- `sequential`: one target after the other
- `slots`: steps of a node's blocks
- `subgroups`: k sources in parallel (λScale)
- `tree`: the complete binary tree (FaaSNet)
"""

"""KV transfer or recomputation for sequences that move to this node.

- `choice`: the policy of transfers, the deadline of recomputing, and missed deadlines
- `transfer`: the KV connector, which fetches K and V from stages
"""

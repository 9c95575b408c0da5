"""KV transfer or recomputation for sequences that move to this node.

- `choice`: the cost model that decides between transfer and recomputation
- `transfer`: the KV connector, which fetches K and V from stages
"""

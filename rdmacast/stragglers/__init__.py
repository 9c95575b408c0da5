"""Detection of slow nodes in casts (pure).

- `detector`: detection from nodes' reports
- `slow_nodes`: slow nodes by their pulls, and plans around them
"""

"""Simulations of transfer plans (pure).

- `link_model`: model links and results
- `plans`: simulation by events
- `waves`: simulation by array passes
"""

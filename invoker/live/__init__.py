"""Pipelines and stages served while a model loads.

- `hosted`: stages that this node runs for pipelines of other nodes
- `pipelines`: pipelines whose last stage is on this node
"""

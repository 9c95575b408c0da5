"""Pipelines and stages: those served while a model loads, and those of groups.

- `groups`: the pipeline of a model on several nodes, as an engine
- `hosted`: stages that this node runs for pipelines of other nodes
- `pipelines`: pipelines whose last stage is on this node
"""

"""The spans of a node, made from what its parts report anyway.

- `calls`: the requests that it runs
- `node`: all of them: which are traced, and what of
- `stages`: its stages of pipelines
- `starts`: the starts of instances, and its parts in casts
"""

"""Serving while a model loads: the decision, pipelines and pairs, and their publication.

- `actions`: events of loading nodes and the resulting pipeline actions
- `assembler`: execution pipelines of loading nodes
- `connections`: the calls that keep pipelines open
- `coordinator`: connects the starts of all versions to decisions and actions
- `forecast`: predicted waits of requests, by load and by live mode
- `group`: the pipelines of one version, as published records
- `load_orders`: the layer at which each load starts
- `load_tracker`: the loads under way and the decision on each version
- `model_layers`: the blocks and costs of a model's layers
- `pairs`: layer-wise prefill by pairs, of two nodes or of a loading node with itself
- `policy`: the decision whether and how to serve while loading
- `publisher`: the live record of each version
- `recovered`: pipelines and starts of an earlier controller
- `stage_cover`: covers of all layers by ranges of nodes
"""

"""What watchers of the cluster are shown, at once and as it changes.

- `board`: the entries that are shown, and what of them has changed (pure)
- `casts`: casts and what arrives on their nodes, as entries (pure)
- `hub`: the watchers of one gateway, and the one task that serves all of them
- `scope`: which entries a key may see (pure)
- `shown`: nodes, functions, instances and pipelines as they are shown
- `traffic`: requests and tokens per second, from counts that grow (pure)
"""

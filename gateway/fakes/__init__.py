"""Fakes of the gateway's seams, for tests.

- `channel`: channels without sockets
- `dispatcher`: a scripted dispatcher, a recording cluster, blobs in memory
- `instances`: instances of a fake node
- `node`: a node without weights
- `pipelines`: pipelines of fake nodes
- `tiers`: images in a fake node's record
"""

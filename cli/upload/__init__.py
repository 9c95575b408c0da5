"""Uploads of functions.

- `blobs`: resumable uploads of blobs
- `bundle`: what a deploy uploads
- `packed`: folders that `hypercast pack` wrote
"""

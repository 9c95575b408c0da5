"""Reads of files in shared memory on the same host.

- `exporter`: replies to a reader with the path of a region's file
- `location`: the reply's format
- `transport`: the reader's links
"""

"""Moves blocks of memory between nodes. Imports nothing else of Hypercast and is usable alone."""

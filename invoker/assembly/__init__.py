"""The parts of a node, put together.

- `accounting`: the meter, the calls that it charges, and the publisher of both
- `casting`: the region server, the links and the listener
- `images`: caches, loads, checks and copies of images
- `instances`: what instances use, vLLM and handlers
- `logs`: the log of functions, and what killed nodes left of theirs
- `memory`: the arena, and the host's tier
- `node`: the whole node
- `setup`: what a node is built from
"""

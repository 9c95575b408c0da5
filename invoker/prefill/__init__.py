"""Layer-wise prefill while layers arrive: a pair of a loading node and an instance, or of one node twice.

- `engines`: single-layer stages over one KV region
- `frames`: messages between source and target of a pair
- `layers`: prompt chunks in single-layer stages, and the prompts that wait for loaded layers
- `source`: the instance of a pair, whose engine answers
- `target`: a loading node that helps another one
- `zigzag_queue`: the pair's schedule
"""

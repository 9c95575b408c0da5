"""Layer-wise prefill while layers arrive, on one node or in a ZigZag pair.

- `engines`: single-layer stages over one KV region
- `frames`: messages between source and target of a pair
- `layers`: runs prompt chunks through single-layer stages
- `layerwise`: prefill by layers on a node that loads alone
- `source`: the overloaded instance of a pair
- `target`: the loading node of a pair
- `zigzag_queue`: the pair's schedule
"""

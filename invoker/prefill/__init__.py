"""Layer-wise prefill while layers arrive: a pair of a loading node and an instance, or of one node twice.

- `engines`: single-layer stages over one KV region
- `frames`: messages between source and target of a pair
- `layer_feed`: stages of single layers, as they land
- `layers`: prompt chunks in single-layer stages, and the prompts that wait for loaded layers
- `prompts`: prompts that wait, and what the target made of them
- `source`: the instance of a pair, whose engine answers
- `source_thread`: the source's thread, which takes prompts for the engine
- `target`: a loading node that helps another one
- `zigzag_queue`: the pair's schedule
"""

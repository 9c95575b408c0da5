"""Encoder models: embeddings, classification, features.

- `batches`: batches of inputs, checked, sorted by length, padded
- `engine`: the encoder engine, for a whole model or a range of its layers
- `towers`: the towers of each architecture: embedding, layers, head
- `weights`: binding of an encoder's modules to an image
"""

"""The invoker: one process a node; it holds images in tiers and runs instances."""

"""The paged KV cache.

- `budget`: the share of the arena that an instance's KV cache gets
- `cache`: the pool of pages for all layers
- `entry`: prompts that enter a model behind layers that ran elsewhere
- `pages`: the page allocator
- `export`: K and V that are exported while the prompt runs
- `slices`: K and V of a sequence outside a cache, for export and import
"""
